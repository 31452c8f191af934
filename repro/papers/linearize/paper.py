"""What the report needs of "Linearizing Vision Transformer with Test-Time Training", in one place."""

from pathlib import Path

from ...report.paper import load_paper
from ..variants import load_variants
from . import formulas, sections

PAPER = load_paper(Path(__file__).parent, formulas, [sections], variants=load_variants("linearize"))
