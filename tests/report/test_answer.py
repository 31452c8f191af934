"""What a page opens with and README shows: every number from a record, with its device, profile and scope, whomever it speaks for."""

import datetime
from pathlib import Path

import pytest

from repro.core.config import active_profile
from repro.core.paths import Paths
from repro.core.record import read_json
from repro.core.runtime import RUN_BEGAN
from repro.measure.adapted import adapted_cost
from repro.measure.flops import cost
from repro.report.answer import answer_blocks, readme_blocks
from repro.report.claims import judge_paper
from repro.report.contest import find_speeds
from repro.report.markdown import render_blocks
from repro.report.results import Results
from stages import stage_names, verb_of
from stages.report import ReportParams, load_scores, run

ROOT = Path(__file__).parents[2]
VITTT, DEIT = "vittt_tiny_patch16_224", "deit_tiny_patch16_224"
ROWS = (  # model, attention, size, ms, MiB
    (VITTT, None, 224, 40.0, 60.0),
    (DEIT, "fused", 224, 10.0, 50.0),
    (DEIT, "unfused", 224, 20.0, 50.0),
    (VITTT, None, 1280, 1000.0, 200.0),
    (DEIT, "fused", 1280, 2500.0, 190.0),
    (DEIT, "unfused", 1280, None, None),
)


def speeds(checkout, device=None, path="measured/cpu/efficiency", rows=ROWS, **more):
    checkout.speed(
        *(
            {
                "model": model,
                "attention": attention,
                "image_size": [size, size],
                "latency_ms": latency,
                "peak_memory_mib": memory,
                "status": "ok" if latency else "oom",
                "reason": "out of memory",
                "batch_size": 1,
                "dtype": "fp32",
                **more,
            }
            for model, attention, size, latency, memory in rows
        ),
        device=device or checkout.CPU,
        path=path,
    )


def facts(checkout, readme: bool = False) -> dict[str, list[str]]:
    """What -> [ours, scope] of the table on top of the page, or of README's."""
    report = checkout.report()
    block = readme_blocks(report)["results"] if readme else render_blocks(answer_blocks(report))
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines()[2:] if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def test_counts_of_the_papers_own_model_say_how_many_match(checkout):
    counts = {f"v{size}": (f"vittt_{size}_patch16_224", {}, 224) for size in ("tiny", "small", "base")}
    numbers = {"vtiny": (6_983_116, 1.4575), "vsmall": (26_365_000, 5.345), "vbase": (104_000_000, 20.41)}
    checkout.count(**{name: (*about, *numbers[name]) for name, about in counts.items()})
    ours, scope = facts(checkout)["parameters of the paper's own model"]
    # of T: Table 1, Table 3's last row and Table 4's last; of S: Table 1. B has 104 M here, and the paper 102
    assert ours == "Vittt-T/S/B 6.983 / 26.36 / 104 M (paper: 7 / 26 / 102); 4 of 24 match"
    assert scope == f"{checkout.CPU}; the mini profile"
    ours, _ = facts(checkout)["multiply-adds (FLOPs) of the paper's own model"]
    assert ours.endswith("(paper: 1.4 / 5.3 / 20.3); 2 of 25 match, 1 of them by truncation")  # 1.4575 is cut to 1.4, 5.345 rounds to 5.3


def test_of_the_papers_own_model_as_many_counts_match_as_an_audit_found(checkout):
    """It counted the built models itself: 23 of 24 parameters, one of them by truncation, and 2 of 25 FLOPs, one by truncation. Since one
    Conv1d arrives with the gate, which it proposed, all 24 match."""
    sizes = {"T": "tiny", "S": "small", "B": "base"}
    designs = ("ttt_layer", "share_qk", "gating", "conv1d", "dual", "conv2d")
    cells = [(VITTT, {"design": name}, 224) for name in designs] + [
        (VITTT, {"pool": name}, 224) for name in ("head", "mid", "double", "max")
    ]
    cells += [(f"vittt_{sizes[size]}_patch16_224", {}, 224) for size in "SB"]
    costs = [cost(model, options, (size, size)) for model, options, size in cells]
    written = {f"row{place}": (*cell, found.num_params, found.macs_g) for place, (cell, found) in enumerate(zip(cells, costs, strict=True))}
    saved = {}
    for size, name in sizes.items():
        ours, theirs = (cost(f"{family}_{name}_patch16_224", {}, (1280, 1280)).macs for family in ("vittt", "deit"))
        saved[size] = 100 * (1 - ours / theirs)
    dwconv = {size: 12 * 9 * width / 1e6 for size, width in (("T", 192), ("S", 384), ("B", 768))}
    checkout.count(saved=saved, dwconv=dwconv, **written)
    content = checkout.json("results/complexity/metrics.json")
    for name in sizes.values():
        for image_size in ((800, 1344), (512, 512)):
            backbone = f"vittt_{name}_patch16_224"
            about = {"model": "vit_adapter", "options": {"backbone": backbone}, "image_size": list(image_size)}
            found = adapted_cost(backbone, image_size)
            counts = {key: getattr(found, key) for key in ("num_params", "macs_g", "macs_g_paper_convention")}
            content["metrics"]["rows"][f"{name}{image_size}"] = about | counts
    checkout.record("complexity", content["metrics"])
    found = facts(checkout)
    assert found["parameters of the paper's own model"][0].endswith("; 24 of 24 match, 1 of them by truncation")
    assert found["multiply-adds (FLOPs) of the paper's own model"][0].endswith("; 2 of 25 match, 1 of them by truncation")


def test_a_noisy_row_gives_no_ratio(checkout):
    speeds(checkout, latency_ms_ci95=[7.0, 13.0])  # wide beside 10 and 20 ms, and narrow beside the others
    ours, _ = facts(checkout)["Vittt-T against DeiT-T at 224²"]
    noisy = ["DeiT-T, fused: 10.0 ms, 50.0 MiB, noisy: spread", "DeiT-T, unfused: 20.0 ms, 50.0 MiB, noisy: spread"]
    assert ours == "; ".join(["Vittt-T: 40.0 ms, 60.0 MiB", *noisy])
    ours, _ = facts(checkout)["Vittt-T against DeiT-T at 1280²"]
    assert "2500 ms, 190 MiB (Vittt-T 2.50× as fast)" in ours


def test_speed_is_said_for_us_and_against_us_with_its_device(checkout):
    speeds(checkout)
    found = facts(checkout)
    ours, scope = found["Vittt-T against DeiT-T at 224²"]
    assert "Vittt-T: 40.0 ms, 60.0 MiB; DeiT-T, fused: 10.0 ms, 50.0 MiB (Vittt-T 0.250× as fast)" in ours
    assert scope == f"{checkout.CPU}, batch 1, fp32, infer; run by hand"
    ours, scope = found["Vittt-T against DeiT-T at 1280²"]
    assert "2500 ms, 190 MiB (Vittt-T 2.50× as fast); DeiT-T, unfused: oom" in ours and scope == "the same"
    assert found["anything on a GPU"] == ["**not measured**", "no record is of a GPU"]


def test_the_record_with_most_rows_is_shown_and_among_equals_a_gpus(checkout):
    speeds(checkout, path="efficiency", rows=ROWS[:2])
    speeds(checkout)
    contest = checkout.paper.contest
    assert find_speeds(contest, checkout.results()).source.path == "results/measured/cpu/efficiency/metrics.json"
    speeds(checkout, device=checkout.H200, path="measured/a_gpu/efficiency", rows=ROWS[:3])
    assert find_speeds(contest, checkout.results()).group.device == checkout.CPU
    speeds(checkout, device=checkout.H200, path="measured/a_gpu/efficiency")
    assert find_speeds(contest, checkout.results()).group.device == checkout.H200
    assert facts(checkout)["anything on a GPU"][0] == checkout.H200
    speeds(checkout, device=checkout.H200, path="measured/a_gpu/efficiency", mode="train")
    assert find_speeds(contest, checkout.results()).group.device == checkout.CPU


def test_nothing_measured_is_said_in_one_row_each(checkout):
    found = facts(checkout)
    assert len(found) <= 10 and found["Vittt-T against DeiT-T"][0] == "not measured"
    numbers = {"parameters": 24, "multiply-adds": 25, "accuracies": 65, "speeds": 16}
    for word, number in numbers.items():
        (row,) = [row for label, row in found.items() if word in label]
        assert row[0] == f"0 of {number} match; none is measured" and row[1] not in ("", "–")
    assert "picture" not in readme_blocks(checkout.report())
    assert list(facts(checkout, readme=True)) == list(found)


def test_runs_on_embedded_data_name_seeds_intervals_and_what_needs_no_learning(checkout):
    checkout.train(
        "pretrain/v", "vittt_nano_patch16_144", "digits", top1=(96.0, 98.0), held_out_images=359, top1_ci95_percent=[84.3, 109.7], epochs=7
    )
    checkout.train("baselines/d", "deit_nano_patch16_144", "digits", top1=15.0, held_out_images=359, epochs=7)
    scores = {"ap_box_percent": 23.5, "ap50_box_percent": 40.9}
    reference = {"ap_box_percent": 24.3, "ap50_box_percent": 29.6}
    checkout.train("detect/v", "vittt_nano_patch16_144", "scenes", held_out_images=100, epochs=7, without_learning=reference, **scores)
    found = facts(checkout)
    ours, scope = found["top1 on embedded digits"]
    assert ours == "vittt_nano 97.0 % [84.3, 100.0], deit_nano 15.0 %"
    assert "359 held-out images, 7 epochs, one seed or 2 seeds" in scope and scope.startswith(f"{checkout.CPU}; the mini profile")
    ours, _ = found["box AP on embedded scenes"]
    assert ours == "vittt_nano: box AP 23.5 %, AP50 40.9 %; without learning: box AP 24.3 %, AP50 29.6 %"


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({}, "vittt_nano 95.0 % [92.5, 97.5]"),  # the same training, with five seeds
        ({"recipe_hash": "another"}, "vittt_nano 97.0 %"),
        ({"options": {"design": "dual"}}, "vittt_nano 97.0 %"),
        ({"top1": 95.0}, "vittt_nano 97.0 %"),  # by hand with one seed
    ],
)
def test_a_repeat_by_hand_with_more_seeds_stands_for_the_pipelines_record(checkout, more, shown):
    checkout.train("pretrain/v", "vittt_nano_patch16_144", "digits", top1=97.0, held_out_images=359, epochs=7)
    usual = {"top1": (94.0, 94.5, 95.0, 95.5, 96.0), "top1_ci95_percent": [92.5, 97.5], "held_out_images": 359, "epochs": 7}
    checkout.train("measured/gpu/pretrain/v", "vittt_nano_patch16_144", "digits", **{**usual, **more})
    ours, scope = facts(checkout)["top1 on embedded digits"]
    assert ours == f"vittt_nano: top1 {shown.removeprefix('vittt_nano ')}, top5 99.0 %"
    is_repeat = "[" in shown
    assert ("; run by hand;" in scope, "5 seeds" in scope) == (is_repeat, is_repeat)


def test_a_mix_of_the_pipelines_records_and_of_repeats_says_so(checkout):
    """The pipeline's record is not replaced by one with fewer seeds."""
    checkout.train("pretrain/v", "vittt_nano_patch16_144", "digits", top1=97.0, held_out_images=359)
    checkout.train("baselines/d", "deit_nano_patch16_144", "digits", top1=(15.0, 16.0), held_out_images=359)
    checkout.train("measured/gpu/v", "vittt_nano_patch16_144", "digits", top1=(94.0, 96.0), held_out_images=359)
    checkout.train("measured/gpu/d", "deit_nano_patch16_144", "digits", top1=80.0, held_out_images=359)
    ours, scope = facts(checkout)["top1 on embedded digits"]
    assert ours == "vittt_nano 95.0 %, deit_nano 15.5 %" and "; run by hand and the mini profile;" in scope and scope.count("2 seeds") == 1


def test_readme_is_written_between_its_markers_and_nowhere_else(checkout):
    speeds(checkout)
    text = "# Title\n\n<!-- results -->\nold\n<!-- /results -->\n\nbetween\n\n<!-- picture -->\n<!-- /picture -->\n\nend\n"
    readme = checkout.write("README.md", text)
    run(ReportParams(), checkout.paths, html=False)
    written = readme.read_text(encoding="utf-8")
    blocks = readme_blocks(checkout.report())
    expected = text.replace("\nold\n", f"\n{blocks['results']}\n").replace("<!-- picture -->\n", f"<!-- picture -->\n{blocks['picture']}\n")
    assert written == expected and "](results/figures/readme_resolution.png)" in written
    assert (checkout.paths.results / "figures" / "readme_resolution.png").is_file()
    checkout.write("README.md", "# Without markers\n")
    run(ReportParams(), checkout.paths, html=False)
    assert readme.read_text(encoding="utf-8") == "# Without markers\n"


@pytest.fixture
def timed(checkout):
    """Three stages, of 90, 31 and 10 seconds, that ended one after another, and a README with a block."""
    speeds(checkout)
    checkout.train("pretrain/v", "vittt_nano_patch16_144", "digits", top1=97.0, held_out_images=359)
    checkout.train("detect/v", "vittt_nano_patch16_144", "scenes", held_out_images=10)
    checkout.count(v=(VITTT, {}, 224, 6_983_116, 1.4575))
    checkout.write("README.md", "<!-- results -->\n<!-- /results -->\n")
    files = sorted(file for file in checkout.paths.results.rglob("*run.json") if "measured" not in file.parts)
    for number, (seconds, file) in enumerate(zip((90, 31, 10), files, strict=True)):
        file.write_text(f'{{"seconds": {seconds}, "finished": "2026-01-01T12:0{2 + number}:00+00:00"}}')
    return files


def test_the_time_of_the_pipeline_is_noted_where_all_stages_ran_and_outlives_the_files_that_git_does_not_keep(checkout, timed):
    for gone in (None, timed[0]):
        if gone:
            gone.unlink()
        run(ReportParams(), checkout.paths, html=False)
        assert (
            f"| the stages of `make reproduce` | 2 min | {checkout.CPU}; the mini profile |"
            in (checkout.paths.root / "README.md").read_text()
        )
    noted = read_json(checkout.paths.results / "pipeline.json")
    assert (noted["seconds"], noted["jobs"]) == (131, 1) and noted["commits"] == ["0123456789abcdef"]


@pytest.mark.parametrize(
    ("began", "expected"),
    [
        ("2026-01-01T12:00:29+00:00", (300, 2)),  # the first stage began a second later
        ("2026-01-01T12:00:40+00:00", (131, 1)),  # it is of an earlier run
    ],
)
def test_the_time_of_stages_that_ran_at_once_is_that_of_their_run(checkout, timed, monkeypatch, began, expected):
    start = datetime.datetime.fromisoformat(began).timestamp()
    monkeypatch.setenv(RUN_BEGAN, f"{start} 2")
    monkeypatch.setattr("time.time", lambda: start + 300)
    run(ReportParams(), checkout.paths, html=False)
    noted = read_json(checkout.paths.results / "pipeline.json")
    assert (noted["seconds"], noted["jobs"]) == expected
    at_once = ", 2 at once" if expected[1] == 2 else ""
    assert f"| {expected[0] / 60:.0f} min{at_once} |" in (checkout.paths.root / "README.md").read_text()


@pytest.mark.parametrize("name", ["results", "picture"])
def test_this_readme_is_what_the_committed_records_give(paper, name):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, opened, rest = readme.partition(f"<!-- {name} -->\n")
    if not opened:
        pytest.skip(f"README.md has no block {name} yet")
    paths = Paths(ROOT)
    results = Results(paths, [paper], load_scores(paths))
    verbs, named = [verb_of(stage) for stage in stage_names()], active_profile(paths, besides=("runtime",))
    report = judge_paper(paper, results, speed_dtype="fp16", verbs=verbs, profile=named)
    assert rest.partition(f"\n<!-- /{name} -->")[0] == readme_blocks(report)[name]
