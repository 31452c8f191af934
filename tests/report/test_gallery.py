"""Figures in the paper's order, pictures with their origin, learning curves, and the commands of what is missing."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from repro.core.csvfile import format_csv
from repro.core.errors import UserError
from repro.core.figures import STYLES
from repro.papers import load_papers
from repro.papers.vision_ttt.paper import PAPER as VISION_TTT
from repro.report import dense
from repro.report.gallery import list_examples
from repro.report.results import Results

from .conftest import SCORES, visualized

# the paper's captions, in its order, without Fig. 2, 4 and 5, which are diagrams
PAPER = ["1", "3", "6", "7a", "7b", "8", "9", "10", "11"]
REFERENCE = {"ap_box_percent": 25.5, "ap50_box_percent": 30.0}
CONFUSION = {"of": "objects", "classes": ["7", "nothing"], "counts": [[8, 2], [1, 0]]}


def figures(checkout) -> dict[str, str]:
    section = checkout.page().split("\n## Figures\n")[1].split("\n## ")[0]
    _, *parts = re.split(r"(?m)^### Fig\. (\w+)\n", section)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def draw(checkout, name: str) -> None:
    file = checkout.paths.results / name
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4)).save(file)


def test_every_figure_of_the_paper_is_in_its_order(checkout):
    found = figures(checkout)
    assert list(found) == PAPER == [figure.place.removeprefix("Fig. ") for figure in VISION_TTT.figures]
    assert all("Not drawn yet: `" in text for text in found.values())


def test_a_picture_names_the_device_and_the_profile_of_the_record_next_to_it(checkout):
    checkout.record("visualize", visualized(), device=checkout.CPU)
    checkout.speed({"model": "vittt_tiny_patch16_224"}, device=checkout.H200, path="replications/h200/efficiency")
    drawn = {"8": "visualize/fig8_receptive_field.png"}
    for name in (*drawn.values(), "visualize/fig3_gradient_magnitude.png"):
        draw(checkout, name)
    found = figures(checkout)
    origin = {"8": f"{checkout.CPU}; "}
    for number, name in drawn.items():
        assert f"]({name})\n\n`{name}`: {origin[number]}" in found[number]
        assert "Not drawn yet" not in found[number]
    # the pictures of Fig. 3 serve for 9 and 10
    assert [found[number].count("![") for number in ("3", "9", "10")] == [1, 0, 0]
    assert all("The pictures of Fig. 3 show it too." in found[number] for number in ("9", "10"))


def detector(checkout, path="detect/nano_scenes", seeds=1, has_curve=True, model="nano", **more):
    scores = {"ap_box_percent": 50.0, "ap50_box_percent": 80.0, "split": "test", "epochs": 2, "held_out_images": 100}
    if seeds > 1:
        scores |= {"ap_box_ci95_percent": [48.0, 52.0], "ap50_box_ci95_percent": [78.0, 82.0]}
    runs = [{"seed": seed, "confusion": CONFUSION} for seed in range(seeds)]
    usual = {**scores, "by_seed": runs, "without_learning": REFERENCE, "init": {"weights": "w"}}
    rows = [
        {"seed": seed, "epoch": epoch, "ap_box_percent": 20.0 * epoch + seed, "ap50_box_percent": 40.0 * epoch}
        for seed in range(seeds)
        for epoch in (1, 2)
    ]
    curve = format_csv(rows).splitlines() if has_curve else None
    checkout.train(path, model, "scenes", curve=curve, **{**usual, **more})


def drawn(checkout) -> dict[str, list[str]]:
    return {name: [each.path for each in sources] for name, (sources, _) in dense.plan_dense(checkout.report()).items()}


def test_nothing_is_drawn_without_a_curve_or_without_the_method_that_learns_nothing(checkout):
    assert drawn(checkout) == {}
    detector(checkout, without_learning=None, without_learning_reason="nothing to compare with")
    assert drawn(checkout) == {}
    detector(checkout, has_curve=False)
    assert list(drawn(checkout)) == ["confusion_scenes.png"]  # which the record itself has


def test_a_run_by_hand_with_more_seeds_takes_the_place_of_the_pipelines_and_random_weights_are_next_to_it(checkout):
    detector(checkout)
    detector(checkout, "replications/cpu/detect/nano_scenes_random", seeds=3, init=None)
    pipeline = "results/detect/nano_scenes/metrics.json"
    by_hand = [f"results/replications/cpu/detect/nano_scenes_{name}.json" for name in ("3seeds", "random")]
    expected = {"learning": [pipeline, by_hand[1]], "confusion": [pipeline]}
    assert drawn(checkout) == {f"{kind}_scenes.png": files for kind, files in expected.items()}
    detector(checkout, "replications/cpu/detect/nano_scenes_3seeds", seeds=3)
    assert sorted(drawn(checkout)["learning_scenes.png"]) == by_hand


def test_the_pictures_have_the_lines_and_the_shares(checkout, tmp_path, monkeypatch):
    """By matplotlib itself: seeds, mean, the reported score, the line without learning; 8 of 10 are 80 %."""
    figures, save = [], dense.save_png
    monkeypatch.setattr(dense, "save_png", lambda figure, path: figures.append(figure) or save(figure, path))
    detector(checkout, "replications/cpu/detect/nano_scenes_3seeds", seeds=3)
    detector(checkout)
    for name, (_, draw) in dense.plan_dense(checkout.report()).items():
        draw(tmp_path / "drawn" / name)
    curves, confusion = figures
    panel = curves.axes[0]
    lines = {line.get_label(): list(line.get_ydata()) for line in panel.lines}
    assert lines["nano, pretrained weights, 3 seeds"] == [21.0, 41.0]
    assert lines["without learning"] == [25.5, 25.5]
    assert [20.0, 40.0] in [
        list(line.get_ydata()) for line in panel.lines
    ] and panel.get_ylabel() == "detect: box AP (%)"
    assert curves.axes[1].get_ylabel() == "detect: box AP50 (%)" and "star: test" in curves.get_suptitle()
    matrix = confusion.axes[0]
    np.testing.assert_allclose(matrix.images[0].get_array(), [[80, 20], [100, 0]])
    assert [label.get_text() for label in matrix.get_yticklabels()] == ["7 (10)", "nothing (1)"]
    files = sorted((tmp_path / "drawn").iterdir())
    assert [path.name for path in files] == ["confusion_scenes.png", "learning_scenes.png"]
    assert all(min(Image.open(path).size) > 200 for path in files)


def test_tasks_and_families_share_a_picture_which_every_paper_of_one_of_them_shows(checkout, tmp_path, monkeypatch):
    """Colours are of families, dashes of random weights; a paper without any of the models shows none."""
    monkeypatch.setattr(dense, "save_png", lambda figure, path: figure)
    detector(checkout, model="vittt_nano")
    detector(checkout, "replications/cpu/detect/random", model="vittt_nano", init=None)
    detector(checkout, "replications/cpu/detect/hvit3", model="hvit3_nano", init=None)
    papers = load_papers()
    results = Results(checkout.paths, list(papers.values()), SCORES)
    reports = {name: SimpleNamespace(paper=paper, results=results) for name, paper in papers.items()}
    plans = {name: dense.plan_dense(report) for name, report in reports.items()}
    shown = {name: sorted(plan) for name, plan in plans.items() if plan}
    assert shown == {"vision_ttt": ["confusion_scenes.png", "learning_scenes.png"], "vit3": ["learning_scenes.png"]}
    figures = [plans[name]["learning_scenes.png"][1](tmp_path / name) for name in shown]
    for figure in figures:
        lines = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
        assert {name: style for name, style in lines.items() if name.endswith("one seed")} == {
            "vittt_nano, pretrained weights, one seed": (STYLES["vittt"][1], "-"),
            "vittt_nano, random weights, one seed": (STYLES["vittt"][1], "--"),
            "hvit3_nano, random weights, one seed": (STYLES["hvit3"][1], "--"),
        }
        assert len(figure.axes) == 2 and len(figure.legends[0].get_texts()) == 4


def test_they_are_below_the_examples_with_their_records(checkout):
    detector(checkout)
    text = list_examples(checkout.report())
    assert "](results/figures/learning_scenes.png)" in text
    assert f"`figures/confusion_scenes.png`: {checkout.CPU}" in text
    with checkout.edit("detect/nano_scenes/metrics.json") as record:
        record["curve"] = ["a,b", "1,2", "1,2,3,4"]
    with pytest.raises(UserError, match="nano_scenes/metrics.json: curve: not valid CSV"):
        dense.plan_dense(checkout.report())
