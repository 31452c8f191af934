"""The declaration of "Test-Time Training with KV Binding Is Secretly Linear Attention" for the report."""

from ...report.paper import load_paper
from . import forms, sections

PAPER = load_paper(__package__, [forms, sections], drawings=forms.plan_drawings)
