"""Figures as PNG files of at most 256 colours; equal numbers give equal bytes.

matplotlib is imported only when a figure is drawn, so that this module imports fast.
"""

import io
from pathlib import Path
from typing import Any

from .record import atomic

# family -> (label, colour, marker, line) in every figure; colours are Okabe and Ito's, which suit colour-blind readers,
# and related families share one
STYLES = {
    "vittt": ("Vittt", "#D55E00", "o", "-"),
    "deit": ("DeiT, unfused attention", "#0072B2", "s", "--"),
    "deit_fused": ("DeiT, fused attention", "#56B4E9", "s", "-"),
    "softvittt": ("softmax attention, 3×3 conv", "#0072B2", "P", ":"),  # both controls: Vittt's block and DeiT's
    "vim": ("Vim", "#009E73", "^", "-"),
    "vrwkv": ("VRWKV", "#CC79A7", "v", "-"),
    "vit3": ("ViT³", "#E69F00", "D", "-"),
    "t5": ("T5", "#E69F00", "P", ":"),
    "hvit3": ("H-ViT³", "#E69F00", "d", "--"),
    "vmamba": ("VMamba", "#009E73", "<", "--"),
    "mambavision": ("MambaVision", "#009E73", ">", ":"),
    "resnet": ("ResNet", "#000000", "x", "-"),
}


def new_figure(columns: int, rows: int = 1) -> tuple[Any, Any]:
    """Make a figure and its panels, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * columns, 4.2 * rows), dpi=130)
    return figure, figure.subplots(rows, columns, squeeze=False).ravel()


def save_png(figure: Any, path: Path) -> Path:
    """Write a figure of matplotlib as PNG of at most 256 colours, atomically and without a date."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi="figure")
    # MAXCOVERAGE covers all colours, not only the most frequent ones, so a colour map keeps its steps
    few = Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    with atomic(path) as temporary:
        few.save(temporary, format="PNG", optimize=True)
    return path
