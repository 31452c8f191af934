"""The declaration of ViT³ for the report."""

from ...report.paper import load_paper
from . import sections

PAPER = load_paper(__package__, [sections], pictures={"Fig. 3": ("vit3_fig3", sections.draw_depth)})
