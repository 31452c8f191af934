"""What the report needs of "Test-Time Training with KV Binding Is Secretly Linear Attention", in one place."""

from pathlib import Path
from types import ModuleType

from ...report.paper import load_paper
from ..variants import load_variants
from . import forms, sections


def _load_formulas() -> ModuleType:
    from . import formulas  # it loads PyTorch

    return formulas


PAPER = load_paper(
    Path(__file__).parent,
    _load_formulas,
    [forms, sections],
    drawings=forms.plan_drawings,
    variants=load_variants("kv_binding"),
)
