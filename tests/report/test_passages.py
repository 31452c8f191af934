"""Passages of docs/: they are written from the records, between markers; without a record they say so and name the
command.
"""

import dataclasses
from pathlib import Path

from repro.report.markdown import render_blocks
from repro.report.pages import build_passages, write_report
from repro.report.passages import compare_without_learning, count_noisy_rows

from .conftest import JUDGE

ROOT = Path(__file__).parents[2]
DETECTOR = {"ap_box_percent": 25.0, "ap50_box_percent": 40.0, "ap_mask_percent": 20.0, "epochs": 7}
REFERENCE = {"ap_box_percent": 25.5, "ap50_box_percent": 30.0, "ap_mask_percent": 20.5}


def passage(build, checkout) -> str:
    return render_blocks(build(checkout.report()))


def detector(checkout, path="detect/nano_scenes", **more):
    checkout.train(path, "nano", "scenes", held_out_images=100, without_learning=REFERENCE, **DETECTOR, **more)


def test_the_report_writes_them_where_the_markers_are_and_nowhere_else(checkout):
    """Without a record a passage is one sentence with the command."""
    for file, passages in checkout.paper.passages.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        assert all(
            text.count(f"<!-- {marker} -->\n") == text.count(f"<!-- /{marker} -->\n") == 1 for marker in passages
        )
    said = passage(count_noisy_rows, checkout)
    assert "`repro efficiency`" in said and said.count(".") == said.count("\n") + 1 == 1
    checkout.speed({"model": "a"}, device=checkout.CPU)
    file = checkout.write("results/speed.md", "a\n<!-- noise -->\nold\n<!-- /noise -->\nb\n")
    other = checkout.write("docs/architecture.md", "c\n")
    write_report([checkout.paper], checkout.results(), JUDGE, with_html=False)
    said = passage(count_noisy_rows, checkout)
    assert file.read_text(encoding="utf-8") == f"a\n<!-- noise -->\n{said}\n<!-- /noise -->\nb\n"
    assert other.read_text(encoding="utf-8") == "c\n" and "batch" in said


def test_pictures_of_a_passage_are_found_from_its_page(checkout):
    from repro.report.document import Picture

    shown = {"docs/deep/x.md": {"y": lambda report: [(Picture("figures/a.png", "a"),)]}}
    checkout.paper = dataclasses.replace(checkout.paper, passages=shown)
    assert [text for _, _, text in build_passages(checkout.report())] == ["![a](../../results/figures/a.png)"]


def test_a_run_is_ahead_or_behind_by_its_interval_and_one_seed_by_its_sign(checkout):
    detector(checkout)
    ends = {"ap_box": [24.0, 26.0], "ap50_box": [39.0, 41.0], "ap_mask": [19.0, 20.4]}
    intervals = {f"{name}_ci95_percent": interval for name, interval in ends.items()}
    seeds = [{"seed": seed} for seed in range(5)]
    path = "measured/cpu/detect/nano_scenes_5seeds"
    detector(checkout, path, init={"weights": "w"}, by_seed=seeds, **intervals)
    said = passage(compare_without_learning, checkout)
    ahead, one = "ahead of it in AP50 (+10.0 points); ", "behind it in box AP (-0.5 points) and mask AP (-0.5 points)"
    several = "behind it in mask AP (-0.5 points); not separated from it in box AP (-0.5 points)"
    assert f"{ahead}{one} (one seed)." in said and f"{ahead}{several} (5 seeds)." in said
    row = "| `detect/nano_scenes` | random | 7 | 1 | 100 | 25.0 % | 40.0 % | 20.0 % |"
    assert f"{row} {checkout.CPU}; the mini settings |" in said
    assert "| pretrained | 7 | 5 | 100 | 25.0 % [24.0, 26.0] |" in said and "outside the pipeline" in said
    assert said.count("| without learning | – | – | – | – | 25.5 % | 30.0 % | 20.5 % | – |") == 1


def test_runs_with_other_references_stand_apart_and_classes_are_means_over_seeds(checkout):
    by_seed = [
        {"seed": 0, "class_iou_percent": {"sky": 90.0, "7": 0.0}},
        {"seed": 1, "class_iou_percent": {"sky": 80.0, "7": None, "7_reason": "not there"}},
    ]
    scores = {"miou_percent": 20.0, "aacc_percent": 80.0, "epochs": 3, "held_out_images": 100, "by_seed": by_seed}
    for name, reference in (("a", 22.0), ("b", 22.0), ("c", 23.0)):
        without = {"miou_percent": reference, "aacc_percent": 30.0}
        checkout.train(f"segment/{name}", "nano", "scenes", without_learning=without, **scores)
    said = passage(compare_without_learning, checkout)
    assert said.count("| segment, scenes |") == 2 and said.count("| without learning |") == 2
    assert "| IoU (%) by class | 7 | sky |" in said and "| `segment/a` | 0.0 | 85.0 |" in said


def test_noise_is_counted_by_device(checkout):
    quiet, wide = {"model": "a", "latency_ms_ci95": [9.5, 10.5]}, {"model": "b", "latency_ms_ci95": [8.0, 12.0]}
    checkout.speed(quiet, wide, device=checkout.H200)
    about = {"compared": [], "growth": [], "gates": [], "repeated": {"rows": 54, "overlap_percent": 50.0}}
    checkout.speed({**quiet, "batch_size": 1, "run": 1}, device=checkout.CPU, path="measured/cpu", **about)
    said = passage(count_noisy_rows, checkout)
    assert f"| {checkout.H200}, batch 64, fp16, infer | 2 | 1 | 10 % | 40 % |" in said
    assert f"| {checkout.CPU}, batch 1, fp16, infer | 1 | 0 | 10 % | – |" in said
    assert "54 rows were measured twice; of those with intervals, 50 % overlap." in said
