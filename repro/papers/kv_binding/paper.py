"""What the report needs of "Test-Time Training with KV Binding Is Secretly Linear Attention", in one place."""

from ...report.paper import load_paper
from ..variants import load_variants
from . import forms, sections

PAPER = load_paper(__package__, [forms, sections], drawings=forms.plan_drawings, variants=load_variants("kv_binding"))
