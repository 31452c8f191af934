"""What the report needs of "Test-Time Training with KV Binding Is Secretly Linear Attention", in one place."""

from pathlib import Path

from ...report.paper import Drawing, Variants, list_tables, load_paper
from ..variants import load_variants
from . import formulas
from .forms import (
    PICTURE,
    compare_setting,
    draw_forms,
    find_forms,
    find_setting,
    list_backbones,
    list_ratios,
    show_picture,
)
from .sections import compare_momenta, count_probed, list_changes, list_probes, list_residuals, weigh_learners

_VARIANTS = load_variants("kv_binding")

PAPER = load_paper(
    Path(__file__).parent,
    formulas=(
        formulas.identity_error,
        formulas.theorem_error,
        formulas.lact_error,
        formulas.mirrored_training_error,
        formulas.reads_static_kernel,
        formulas.parallel_error,
        formulas.order_error,
    ),
    drawings=(Drawing(file=PICTURE, find=find_forms, draw=draw_forms),),
    parts={
        "residuals": list_residuals,
        "momenta": compare_momenta,
        "ratios": list_ratios,
        "forms_setting": find_setting,
        "paper_setting": compare_setting,
        "forms_picture": show_picture,
        "changes": list_changes,
        "backbones": list_backbones,
        "choice": weigh_learners,
        "probes": list_probes,
        "probed": count_probed,
    },
    variants=Variants(
        options=_VARIANTS.options,
        models={name: each.changes["model"].partition("_nano")[0] for name, each in _VARIANTS.variants.items()},
        tables=list_tables(_VARIANTS.rows, _VARIANTS.orders),
    ),
)
