"""Learning curves and confusions: which records are drawn, and what a picture shows of them."""

import numpy as np
import pytest
from PIL import Image

from repro.core.csvfile import write_csv
from repro.core.errors import UserError
from repro.report.dense import plan_dense
from repro.report.gallery import list_examples
from repro.report.markdown import render_blocks

REFERENCE = {"ap_box_percent": 25.5, "ap50_box_percent": 30.0}
CONFUSION = {"of": "objects", "classes": ["7", "nothing"], "counts": [[8, 2], [1, 0]]}


def detector(checkout, path="detect/nano_scenes", seeds=1, **more):
    scores = {"ap_box_percent": 50.0, "ap50_box_percent": 80.0, "split": "test", "epochs": 2, "held_out_images": 100}
    if seeds > 1:
        scores |= {"ap_box_ci95_percent": [48.0, 52.0], "ap50_box_ci95_percent": [78.0, 82.0]}
    runs = [{"seed": seed, "confusion": CONFUSION} for seed in range(seeds)]
    usual = {**scores, "by_seed": runs, "without_learning": REFERENCE, "init": {"weights": "w"}}
    checkout.train(path, "nano", "scenes", **{**usual, **more})
    rows = [
        {"seed": seed, "epoch": epoch, "ap_box_percent": 20.0 * epoch + seed, "ap50_box_percent": 40.0 * epoch}
        for seed in range(seeds)
        for epoch in (1, 2)
    ]
    write_csv(checkout.paths.results / path / "curve.csv", rows)


def drawn(checkout) -> dict[str, list[str]]:
    return {name: [source.path for source in sources] for name, (sources, _) in plan_dense(checkout.report()).items()}


def test_nothing_is_drawn_without_a_curve_or_without_the_method_that_learns_nothing(checkout):
    assert drawn(checkout) == {}
    detector(checkout, without_learning=None, without_learning_reason="nothing to compare with")
    assert drawn(checkout) == {}
    detector(checkout)
    (checkout.paths.results / "detect/nano_scenes/curve.csv").unlink()
    assert list(drawn(checkout)) == ["confusion_detect_nano_scenes.png"]  # which the record itself has


def test_a_run_by_hand_with_more_seeds_takes_the_place_of_the_pipelines_and_random_weights_stand_beside(checkout):
    detector(checkout)
    detector(checkout, "measured/cpu/detect/nano_scenes_random", seeds=3, init=None)
    pipeline = "results/detect/nano_scenes/metrics.json"
    by_hand = [f"results/measured/cpu/detect/nano_scenes_{name}/metrics.json" for name in ("3seeds", "random")]
    expected = {"learning": [pipeline, by_hand[1]], "confusion": [pipeline]}
    assert drawn(checkout) == {f"{kind}_detect_nano_scenes.png": files for kind, files in expected.items()}
    detector(checkout, "measured/cpu/detect/nano_scenes_3seeds", seeds=3)
    assert sorted(drawn(checkout)["learning_detect_nano_scenes.png"]) == by_hand


def test_the_pictures_have_the_lines_and_the_shares(checkout, tmp_path, monkeypatch):
    """Read from matplotlib itself: seeds, mean, the reported score with its interval, the line without learning; 8 of
    10 are 80 %.
    """
    from repro.report import dense

    figures, save = [], dense.save_png
    monkeypatch.setattr(dense, "save_png", lambda figure, path: figures.append(figure) or save(figure, path))
    detector(checkout, "measured/cpu/detect/nano_scenes_3seeds", seeds=3)
    detector(checkout)
    for name, (_, draw) in plan_dense(checkout.report()).items():
        draw(tmp_path / "drawn" / name)
    curves, confusion = figures
    panel = curves.axes[0]
    lines = {line.get_label(): list(line.get_ydata()) for line in panel.lines}
    assert lines["pretrained weights, 3 seeds"] == [21.0, 41.0]
    assert lines["without learning"] == [25.5, 25.5]
    assert [20.0, 40.0] in [list(line.get_ydata()) for line in panel.lines] and panel.get_ylabel() == "box AP (%)"
    assert curves.axes[1].get_ylabel() == "AP50 (%)" and "star: test" in curves.get_suptitle()
    matrix = confusion.axes[0]
    np.testing.assert_allclose(matrix.images[0].get_array(), [[80, 20], [100, 0]])
    assert [label.get_text() for label in matrix.get_yticklabels()] == ["7 (10)", "nothing (1)"]
    files = sorted((tmp_path / "drawn").iterdir())
    assert [path.name for path in files] == ["confusion_detect_nano_scenes.png", "learning_detect_nano_scenes.png"]
    assert all(min(Image.open(path).size) > 200 for path in files)


def test_they_stand_below_the_examples_with_their_records(checkout):
    detector(checkout)
    text = render_blocks(list_examples(checkout.report()))
    assert "](figures/learning_detect_nano_scenes.png)" in text
    assert f"`figures/confusion_detect_nano_scenes.png`: {checkout.CPU}" in text
    checkout.write("results/detect/nano_scenes/curve.csv", "")
    with pytest.raises(UserError, match="curve.csv: not valid CSV"):
        plan_dense(checkout.report())
