"""Figures as files: few colours, near to what matplotlib draws, and the same bytes each time."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from repro.core.figures import new_figure, save_png

RNG = np.random.default_rng(0)
RAMP = np.linspace(0, 1, 64).reshape(8, 8)
DRAWN = {
    "small text": lambda panel: panel.text(0.1, 0.5, "small ± text²", fontsize=5, color="#009E73"),
    "noise": lambda panel: panel.imshow(RNG.random((16, 16)), cmap="viridis"),
    "a grey photograph": lambda panel: panel.imshow(np.repeat(RAMP[..., None], 3, 2)),
    "a curve on a map": lambda panel: (panel.imshow(RAMP, cmap="viridis"), panel.plot([0, 7], [7, 0], "w--")),
}


@pytest.mark.parametrize("what", DRAWN)
def test_a_picture_has_few_colours_that_are_near_to_those_drawn(tmp_path, what):
    figure, (panel,) = new_figure(1)
    DRAWN[what](panel)
    files = [save_png(figure, tmp_path / name) for name in ("one.png", "other.png")]
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn = np.asarray(canvas.buffer_rgba())[..., :3].astype(int)
    with Image.open(files[0]) as picture:
        found = np.asarray(picture.convert("RGB")).astype(int)
        assert picture.format == "PNG" and len(picture.getcolors()) <= 256
    assert np.abs(found - drawn).max() <= 24 and (found[0, 0] == 255).all()
    assert files[0].read_bytes() == files[1].read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {"one.png", "other.png"}


def test_panels_stand_row_by_row():
    figure, panels = new_figure(3, 2)
    places = [(-round(panel.get_position().y0, 3), round(panel.get_position().x0, 3)) for panel in panels]
    assert len(places) == 6 == len(figure.axes) and places == sorted(places)
