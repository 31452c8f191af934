"""The declaration of "Linearizing Vision Transformer with Test-Time Training" for the report."""

from ...report.paper import load_paper
from . import sections

PAPER = load_paper(__package__, [sections])
