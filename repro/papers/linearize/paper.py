"""What the report needs of "Linearizing Vision Transformer with Test-Time Training", in one place."""

from pathlib import Path

from ...report.paper import Variants, list_tables, load_paper
from ..variants import load_variants
from . import formulas
from .sections import find_attention, list_layers, list_students

_VARIANTS = load_variants("linearize")

PAPER = load_paper(
    Path(__file__).parent,
    formulas=(
        formulas.recipe_setting,
        formulas.neighbours_macs_g,
        formulas.in_tenths,
        formulas.identity_error,
        formulas.shift_error,
        formulas.foreign_weights,
    ),
    parts={"students": list_students, "attention": find_attention, "layers": list_layers},
    variants=Variants(
        options=_VARIANTS.options,
        recipes={name: each.changes for name, each in _VARIANTS.variants.items() if each.changes},
        tables=list_tables(_VARIANTS.rows, _VARIANTS.orders),
    ),
)
