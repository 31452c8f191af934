"""What the report needs of "Linearizing Vision Transformer with Test-Time Training", in one place."""

from ...report.paper import load_paper
from ..variants import load_variants
from . import sections

PAPER = load_paper(__package__, [sections], variants=load_variants("linearize"))
