"""What the report needs of "Linearizing Vision Transformer with Test-Time Training", in one place."""

from ...report.paper import load_paper
from . import sections

PAPER = load_paper(__package__, [sections])
