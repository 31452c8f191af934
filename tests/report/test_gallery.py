"""Figures in the paper's order, pictures with their origin, and the commands that make what is missing."""

import json
import re

from PIL import Image

from repro.papers import load_primary
from repro.report.gallery import describe_origin
from repro.report.records import BEGUN_ALIKE, find_missing_records

from .conftest import visualized

# the paper's captions, in its order, without Fig. 2, 4 and 5, which are diagrams
PAPER = ["1", "3", "6", "7a", "7b", "8", "9", "10", "11"]


def figures(checkout) -> dict[str, str]:
    section = checkout.page().split("\n## Figures\n")[1].split("\n## ")[0]
    _, *parts = re.split(r"(?m)^### Fig\. (\w+)\n", section)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def draw(checkout, name: str) -> None:
    file = checkout.paths.results / name
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4)).save(file)


def test_every_figure_of_the_paper_stands_in_its_order(checkout):
    found = figures(checkout)
    assert list(found) == PAPER == [figure.place.removeprefix("Fig. ") for figure in load_primary().figures]
    assert all("Not drawn yet: `repro " in text for text in found.values())


def test_a_picture_names_the_device_and_the_profile_of_the_record_beside_it(checkout):
    checkout.record("visualize", visualized(), device=checkout.CPU)
    checkout.speed({"model": "vittt_tiny_patch16_224"}, device=checkout.H200, path="measured/h200/efficiency")
    drawn = {"8": "visualize/fig8_receptive_field.png", "6": "measured/h200/efficiency/fig6_T_batch64.png"}
    for name in (*drawn.values(), "visualize/fig3_gradient_magnitude.png"):
        draw(checkout, name)
    found = figures(checkout)
    origin = {"8": f"{checkout.CPU}; ", "6": f"{checkout.H200}; "}
    for number, name in drawn.items():
        assert f"]({name})\n\n`{name}`: {origin[number]}" in found[number]
        assert "Not drawn yet" not in found[number]
    # the pictures of Fig. 3 stand for 9 and 10
    assert [found[number].count("![") for number in ("3", "9", "10")] == [1, 0, 0]
    assert all("The pictures of Fig. 3 show it too." in found[number] for number in ("9", "10"))


def test_examples_stand_in_a_row_for_each_run(checkout):
    for run in ("detect/a", "measured/gpu/segment/b"):
        for name in ("1", "a b"):
            draw(checkout, f"{run}/examples/{name}.png")
    text = checkout.runs().split("\n## Example pictures\n")[1].split("\n## ")[0]
    rows = [line for line in text.splitlines() if "![" in line]
    assert [row.count("![") for row in rows] == [2, 2]
    assert "](detect/a/examples/a%20b.png)" in rows[0] and "](measured/gpu/segment/b/examples/1.png)" in rows[1]


def test_missing_cells_are_those_of_the_graph_and_the_parameters(checkout):
    checkout.write("params.yaml", "report: {}\ntrain: {a: {x: 1}, b: {x: 2}}\ncount: {}\n")
    checkout.write(
        "dvc.yaml",
        "stages:\n"
        "  train:\n    foreach: ${train}\n    do:\n      cmd: repro train --cell ${key}\n"
        "      metrics:\n      - results/train/${key}/metrics.json: {cache: false}\n"
        "  count:\n    cmd: repro count\n    metrics:\n    - results/count/metrics.json: {cache: false}\n"
        "  report: {cmd: repro report}\n",
    )
    missing = [command for _, command in find_missing_records(checkout.paths)]
    assert missing == ["repro train --cell a", "repro train --cell b", "repro count"]
    checkout.record("train/a", {})
    checkout.record("count", {})
    assert find_missing_records(checkout.paths) == [("results/train/b/metrics.json", "repro train --cell b")]
    text = checkout.page().split("\n## Missing cells\n")[1].split("\n## ")[0]
    assert "| `results/train/b/metrics.json` | `repro train --cell b` |" in text and text.count("| `results/") == 1
    checkout.record("train/b", {})
    assert "Missing cells" not in checkout.page()


def test_an_origin_says_how_many_of_its_records_older_code_made(checkout):
    for cell in "ab":
        checkout.train(f"pretrain/{cell}", "vittt_nano_patch16_144", "digits", held_out_images=8, top1=90.0)

    def describe(**hashes):
        for cell, number_hash in hashes.items():
            file = checkout.paths.results / "pretrain" / cell / "metrics.json"
            record = json.loads(file.read_text())
            record["identity"]["number_hash"] = number_hash
            file.write_text(json.dumps(record))
        return describe_origin(checkout.results().sources, "here").partition("here")[2]

    assert describe() == ""
    assert describe(a="of other files") == "; 1 of 2 made by older code"
    assert describe(b="of other files") == "; made by older code"


def test_many_seeds_that_the_present_code_begins_alike_stand_before_one_new_seed(checkout):
    many, one = (f"measured/{device}/pretrain/a" for device in ("old", "new"))
    shared = {"held_out_images": 8, "top1_ci95_percent": [80.0, 95.0]}
    checkout.train(many, "vittt_nano_patch16_144", "digits", top1=(90.0, 80.0), **shared)
    checkout.train(one, "vittt_nano_patch16_144", "digits", top1=90.0, **shared)
    file = checkout.paths.results / many / "metrics.json"
    record = json.loads(file.read_text())
    present, record["identity"]["number_hash"] = record["identity"]["number_hash"], "of other files"
    record["metrics"]["by_seed"][0]["weights_hash"] = "w"
    file.write_text(json.dumps(record))

    def find_standing():
        return [(source.path.split("/")[2], source.age) for source in checkout.results().sources if source.most_seeds]

    assert find_standing() == [("new", "")]
    followed = {"first_epochs": {"of w": {"weights_hash": "w", "number_hash": present, "follows": True}}}
    begun = {"metrics": followed, "identity": {"device": "cpu"}}
    checkout.write("results/measured/new/first_epochs.json", json.dumps(begun))
    assert find_standing() == [("old", BEGUN_ALIKE)]
