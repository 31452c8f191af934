"""What the report needs of ViT³, in one place."""

from pathlib import Path
from types import ModuleType

from ...report.paper import load_paper
from ..variants import load_variants
from . import sections


def _load_formulas() -> ModuleType:
    from . import formulas  # it loads PyTorch

    return formulas


PAPER = load_paper(
    Path(__file__).parent,
    _load_formulas,
    [sections],
    variants=load_variants("vit3"),
    pictures={"Fig. 3": ("vit3_fig3", sections.draw_depth)},
)
