"""What the report needs of "Test-Time Training with KV Binding Is Secretly Linear Attention", in one place."""

from ...report.paper import load_paper
from . import forms, sections

PAPER = load_paper(__package__, [forms, sections], drawings=forms.plan_drawings)
