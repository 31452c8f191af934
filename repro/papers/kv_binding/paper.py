"""What the report needs of "Test-Time Training with KV Binding Is Secretly Linear Attention", in one place."""

from pathlib import Path

from ...report.paper import load_paper
from ..variants import load_variants
from . import forms, formulas, sections

PAPER = load_paper(
    Path(__file__).parent,
    formulas,
    [forms, sections],
    drawings=forms.plan_drawings,
    variants=load_variants("kv_binding"),
)
