"""What a page opens with and README shows: every number from a record, with what it was measured on."""

import collections
import datetime
import re
from types import SimpleNamespace

import pytest

from repro.bench.pooling import COMMAND, HOST, UNKNOWN
from repro.core.record import read_json
from repro.core.runtime import RUN_BEGAN
from repro.report.answer import judge_question, measure_deviations, readme_blocks, speed_blocks, verdict_blocks
from repro.report.gallery import find_speeds
from repro.report.markdown import place_on_page
from repro.report.pages import build_passages
from repro.report.template import name_device
from repro.report.verdicts import Status, count_alone
from tests.conftest import ROOT
from tests.slow import slow

VITTT, DEIT = "vittt_tiny_patch16_224", "deit_tiny_patch16_224"
ROWS = (  # model, attention, size, ms, MiB
    (VITTT, None, 224, 40.0, 60.0),
    (DEIT, "fused", 224, 10.0, 50.0),
    (DEIT, "unfused", 224, 20.0, 50.0),
    (VITTT, None, 1280, 1000.0, 200.0),
    (DEIT, "fused", 1280, 2500.0, 190.0),
    (DEIT, "unfused", 1280, None, None),
)
START = datetime.datetime.fromisoformat("2026-01-01T12:00:29+00:00").timestamp()


def speeds(checkout, device=None, path="cpu", rows=ROWS, **more):
    about = {"batch_size": 1, "dtype": "fp32", "reason": "out of memory", **more}
    listed = [
        {"model": model, "attention": attention, "image_size": [size] * 2, "latency_ms": ms, "peak_memory_mib": memory}
        | {"backend": "numba" if model == VITTT else "torch"}
        for model, attention, size, ms, memory in rows
    ]
    rows = [row | {"status": "ok" if row["latency_ms"] else "oom"} | about for row in listed]
    checkout.speed(*rows, device=device or checkout.CPU, path=path)


def read_rows(blocks: str) -> list[list[str]]:
    """The cells of the rows of the first table."""
    table = blocks.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def test_counts_of_the_papers_own_model_say_how_many_match(checkout):
    counts = {f"v{size}": (f"vittt_{size}_patch16_224", {}, 224) for size in ("tiny", "small", "base")}
    numbers = {"vtiny": (6_983_116, 1.4575), "vsmall": (26_365_000, 5.345), "vbase": (104_000_000, 20.41)}
    checkout.count(**{name: (*about, *numbers[name]) for name, about in counts.items()})
    found = {question: row for question, *row in read_rows(verdict_blocks(checkout.report()))}
    _, ours, scope = found["parameters of the paper's own model"]
    # T's are in Table 1, Table 3's last row and Table 4's last; S's in Table 1. B has 104 M here, and the paper 102
    assert ours.startswith("Vittt-T/S/B 6.983 / 26.36 / 104 M (paper: 7 / 26 / 102); ")
    assert scope.startswith(checkout.CPU)
    verdict, ours, _ = found["multiply-adds (FLOPs) of the paper's own model"]
    # 1.4575 is cut to 1.4, 5.345 rounds to 5.3
    assert "(paper: 1.4 / 5.3 / 20.3); " in ours and "2 of 25" in verdict


def test_speed_is_said_for_us_and_against_us_with_its_device(checkout):
    speeds(checkout, ends=None)  # one process each, and so no range
    shown, one = speed_blocks(checkout.report()), "× (one process)"
    name = "some processor, 2 threads, batch 1, fp32, commit 0123456789ab"
    fused = f"10.0 ms, 50.0 MiB: 0.250{one}, 20 % more memory"
    assert read_rows(shown) == [
        [name, "1280²", "1000 ms, 200 MiB", "oom", f"2500 ms, 190 MiB: 2.50{one}, 5 % more memory"],
        [name, "224²", "40.0 ms, 60.0 MiB", f"20.0 ms, 50.0 MiB: 0.500{one}, 20 % more memory", fused],
    ]
    assert "DeiT-T is neither" in shown and "No GPU" in shown
    # after one row was measured again, both commits are named
    file = checkout.paths.results / "speed/cpu.csv"
    file.write_text(file.read_text().replace("0123456789ab", "fedcba987654", 1))
    assert {row[0] for row in read_rows(speed_blocks(checkout.report()))} == {
        name.replace("0123456789ab", "fedcba987654 and 0123456789ab")
    }
    # the ranges of both rows are one of the ratio, however wide it is: 0.25 · 0.5 / 1.5 and 0.25 · 1.5 / 0.5
    speeds(checkout, rows=[row for row in ROWS if row[2] == 224], ends=(0.5, 1.5))
    (_, row) = read_rows(speed_blocks(checkout.report()))
    assert "0.500× (0.167 to 1.50), 20 %" in row[3] and "0.250× (0.0833 to 0.750)" in row[4]


def test_the_fastest_way_of_either_side_is_compared_where_there_are_several(checkout):
    speeds(checkout)
    assert "fastest way" not in speed_blocks(checkout.report())
    speeds(
        checkout,
        path="compiled",
        rows=[(DEIT, "fused", 1280, 2000.0, 210.0), (VITTT, None, 1280, 1500.0, 1.0)],
        compile=True,
    )
    speeds(checkout, path="bf16", rows=[(DEIT, "fused", 224, 8.0, 40.0)], dtype="bf16")
    # a range is from 0.9 to 1.1 of its median: 2 · 0.9 / 1.1 and 2 · 1.1 / 0.9
    shown = speed_blocks(checkout.report()).split("\n\n")[-1]
    name = "some processor, 2 threads, batch 1, commit 0123456789ab"
    small = "8.00 ms, 40.0 MiB (bf16, fused attention)"
    large = "2000 ms, 210 MiB (fp32, fused attention, `torch.compile`)"
    assert read_rows(shown) == [
        [name, "1280²", "1000 ms, 200 MiB (fp32)", large, "2.00× (1.64 to 2.44)"],
        [name, "224²", "40.0 ms, 60.0 MiB (fp32)", small, "0.200× (0.164 to 0.244)"],
    ]
    emulated = {"dtype": "fp16", "status": "emulated", "reason": "no units"}
    speeds(checkout, path="half", rows=[(VITTT, None, 224, None, None)], **emulated)
    assert "fp16 on some processor, 2 threads: not measured, since no units." in speed_blocks(checkout.report())


def test_the_record_with_most_rows_is_shown_and_among_equals_a_gpus(checkout):
    speeds(checkout, path="efficiency", rows=ROWS[:2])
    speeds(checkout)
    comparison = checkout.paper.comparison
    assert find_speeds(comparison, checkout.results()).source.path == "results/speed/cpu.csv"
    speeds(checkout, device=checkout.H200, path="a_gpu", rows=ROWS[:3])
    assert find_speeds(comparison, checkout.results()).group.device == checkout.CPU
    speeds(checkout, device=checkout.H200, path="a_gpu")
    assert find_speeds(comparison, checkout.results()).group.device == checkout.H200
    assert "No GPU" not in speed_blocks(checkout.report())
    speeds(checkout, device=checkout.H200, path="a_gpu", mode="train")
    assert find_speeds(comparison, checkout.results()).group.device == checkout.CPU


def test_a_record_over_several_processes_is_shown_before_one_with_more_rows(checkout):
    more = [(VITTT, None, side, 500.0, 90.0) for side in (384, 640)]
    speeds(checkout, rows=[*ROWS, *more], ends=None)
    speeds(checkout, device="cpu: another", path="another")
    assert find_speeds(checkout.paper.comparison, checkout.results()).group.device == "cpu: another"


def test_the_name_of_a_gpu_says_that_the_hosts_share_is_not_known(checkout):
    speeds(checkout, device=checkout.H200, path="a_gpu")
    assert UNKNOWN in name_device(checkout.report(), "GPU")
    speeds(checkout)
    assert UNKNOWN not in name_device(checkout.report(), "CPU")


SIDES = (224, 384, 640, 1280)


@pytest.mark.parametrize(
    ("ours", "theirs", "ends", "expected"),
    [
        ((40, 50, 60, 70), (30, 45, 90, 200), (0.95, 1.05), "from between 384² and 640² on"),
        # the ranges of the middle size meet
        ((40, 50, 60, 70), (30, 51, 90, 200), (0.95, 1.05), "from between 224² and 640² on"),
        ((40, 50, 60, 70), (41, 60, 90, 200), (0.95, 1.05), "from 384² on"),
        ((40, 50, 60, 70), (80, 90, 100, 110), (0.95, 1.05), "at every size"),
        ((40, 50, 60, 70), (20, 20, 20, 20), (0.95, 1.05), "at no size"),
        ((40, 50, 60, 70), (80, 90, 100, 71), (0.95, 1.05), "from no size on"),
        ((40, 50, 60, 70), (80, 90, 100, 35), (0.95, 1.05), "from no size on"),
        ((40, 50, 60, 70), (30, 45, 90, 200), None, None),  # one process
        ((40, 50, 60), (30, 45, 90), (0.95, 1.05), None),  # too few sizes
    ],
)
def test_the_caption_of_the_picture_says_where_the_lines_cross(checkout, ours, theirs, ends, expected):
    rows = [
        (model, attention, side, float(ms), 100.0)
        for model, attention, times in ((VITTT, None, ours), (DEIT, "fused", theirs))
        for side, ms in zip(SIDES, times, strict=False)
    ]
    speeds(checkout, rows=rows, ends=ends)
    shown = readme_blocks([checkout.report()])["picture"]
    assert (f"in time, {expected} (fused attention)" in shown) if expected else ("lies below" not in shown)


def test_the_memory_has_its_own_crossing(checkout):
    """Each peak is of three processes that agree."""
    peaks = {VITTT: (60.0, 70.0, 80.0, 90.0), DEIT: (50.0, 60.0, 90.0, 300.0)}
    rows = [
        (model, attention, side, 10.0, peak)
        for model, attention in ((VITTT, None), (DEIT, "unfused"))
        for side, peak in zip(SIDES, peaks[model], strict=True)
    ]
    speeds(checkout, rows=rows)
    shown = readme_blocks([checkout.report()])["picture"]
    assert "; in memory, from between 384² and 640² on (unfused attention)" in shown


def test_nothing_measured_is_said_in_one_row_each(checkout):
    report = checkout.report()
    rows = read_rows(verdict_blocks(report))
    for word, number in {"parameters": 24, "multiply-adds": 25, "accuracies": 65, "speeds": 16}.items():
        ((_, verdict, ours, why),) = [row for row in rows if word in row[0]]
        assert "not tested" in verdict and ours == f"{number} numbers" and why not in ("", "–")
    assert "not measured" in speed_blocks(report)
    assert "picture" not in readme_blocks([checkout.report()])


@pytest.mark.parametrize(
    ("began", "expected"),
    [
        slow(None, (131, 1)),  # the sum of the stages
        (START, (300, 2)),  # that of the run: the first stage began a second later
        slow(START + 11, (131, 1)),  # it is of an earlier run
    ],
)
def test_the_time_of_the_pipeline_is_noted_where_all_stages_ran(checkout, monkeypatch, began, expected):
    """Stages of 90, 31 and 10 seconds ended one after another; the note outlives the files that Git does not keep."""
    speeds(checkout)
    checkout.train("pretrain/v", "vittt_nano_patch16_144", "digits", top1=97.0, held_out_images=359)
    checkout.train("detect/v", "vittt_nano_patch16_144", "scenes", held_out_images=10)
    checkout.count(v=(VITTT, {}, 224, 6_983_116, 1.4575))
    checkout.write("README.md", "<!-- run -->\n<!-- /run -->\n")
    # a record of another profile, which this run did not make
    checkout.write("profiles/mini.yaml", "prepare_data: {digits: {}}\nablate: {}\n")
    for path in ("prepare_data/other", "ablate/other"):
        checkout.record(path, {})
        (checkout.paths.results / path / "run.json").unlink()
    files = sorted(file for file in checkout.paths.results.rglob("*run.json") if "replications" not in file.parts)
    for number, (seconds, file) in enumerate(zip((90, 31, 10), files, strict=True)):
        file.write_text(f'{{"seconds": {seconds}, "finished": "2026-01-01T12:0{2 + number}:00+00:00"}}')
    if began:
        monkeypatch.setenv(RUN_BEGAN, f"{began} 2")
        monkeypatch.setattr("time.time", lambda: began + 300)
    for gone in (None, *files[: not began]):
        if gone:
            gone.unlink()
        checkout.run_stage(html=False)
        assert (
            f": {expected[0] / 60:.0f} minutes (some processor{', 2 at once' * (expected[1] == 2)})\n"
            in checkout.read("README.md")
        )
    noted = read_json(checkout.paths.results / "pipeline.json")
    assert (noted["seconds"], noted["jobs"]) == expected and noted["commits"] == ["0123456789ab"]
    assert {"complexity", "pretrain@v", "detect@v"} == set(noted["stages"]) and sum(noted["stages"].values()) == 131


def test_every_block_that_code_writes_is_what_the_committed_records_give(committed):
    """In README and in the pages of docs/ and results/."""
    blocks = [("README.md", name, block) for name, block in readme_blocks(committed).items()]
    for file, marker, text in (*blocks, *(each for report in committed for each in build_passages(report))):
        _, _, rest = (ROOT / file).read_text(encoding="utf-8").partition(f"<!-- {marker} -->\n")
        assert rest.partition(f"\n<!-- /{marker} -->")[0] == place_on_page(text, file), (file, marker)


def verdict(status, ours=1.0, **more):
    return SimpleNamespace(status=status, ours=ours, delta=None, **more)


@pytest.mark.parametrize(
    ("statuses", "ending"),
    [
        ({Status.MATCHED: 3, Status.TRUNCATED: 1}, "reproduce"),
        ({Status.MATCHED: 3, Status.UNEXPLAINED: 1}, "mostly reproduce"),
        ({Status.MATCHED: 2, Status.UNEXPLAINED: 1}, "2 of 3 hold, 1 fail or contradict another passage"),
        (
            {Status.MATCHED: 12, Status.EXPLAINED: 3, Status.INCONSISTENT: 9, Status.OUT_OF_SCOPE: 8},
            "12 of 32 hold, 12 fail or contradict another passage",
        ),
        ({Status.FITTED: 3, Status.MATCHED: 1}, "agree only by a fitted convention"),
        ({Status.NOT_MEASURED: 5}, "were not tested"),
    ],
)
def test_the_verdict_follows_the_statuses_and_its_numbers_add_up(statuses, ending):
    ours = {Status.NOT_MEASURED: None}
    said, detail = judge_question(
        [verdict(each, ours.get(each, 1.0)) for each in collections.Counter(statuses).elements()]
    )
    assert said.endswith(ending)
    if "hold" in said:
        good, total, _ = (int(word) for word in re.findall(r"\d+", said))
        assert good + sum(map(int, re.findall(r"(\d+) [a-z]", detail))) == total == sum(statuses.values())


def test_what_is_out_of_scope_or_not_measurable_has_no_counterpart_either():
    """2 of 5: a contradiction is listed with its evidence, and a setting is ours by declaration."""
    statuses = [Status.OUT_OF_SCOPE, Status.NOT_MEASURABLE, Status.INCONSISTENT, Status.DECLARED, Status.MATCHED]
    assert count_alone(map(verdict, statuses)) == 2


def test_numbers_that_lie_close_say_how_close_and_count_once():
    """Of four printed numbers, 2.0 stands in two places; 1 %, 4 % and 2 % are off, and 6 % would be too far."""

    def number(printed, ours):
        entry = SimpleNamespace(printed=printed, unit="G")
        return SimpleNamespace(status=Status.UNEXPLAINED, ours=ours, delta=ours - float(printed), entry=entry)

    own = [number("1.0", 1.01), number("2.0", 2.08), number("2.0", 2.08), number("5.0", 4.9)]
    assert measure_deviations(own) == pytest.approx([0.01, 0.04, 0.02])
    said, detail = judge_question(own)
    assert said.endswith("within 4.0 %") and "all 4" in detail and "3 different" in detail and "2.0 %" in detail
    assert "hold" in judge_question([*own, number("1.0", 1.06)])[0]
    assert measure_deviations([*own, verdict(Status.MATCHED, True)]) == []


def test_a_time_of_the_host_gives_no_ratio_and_its_memory_all_the_same(checkout):
    """Both models take as long at 1280² as at 224², whose work is 33 times smaller."""
    rows = [(*row[:3], {VITTT: 11.0, DEIT: 3.0}[row[0]], 60.0 if row[0] == VITTT else 50.0) for row in ROWS]
    speeds(checkout, device=checkout.H200, rows=rows)
    text = speed_blocks(checkout.report())
    ratios = [cell for row in read_rows(text) for cell in row[3:] if ":" in cell]
    assert all(HOST in cell and "20 % more memory" in cell and "×" not in cell for cell in ratios)
    assert len(ratios) == 4 and COMMAND in text
    slow = [(*row[:3], row[3] * (row[2] // 224) ** 2, row[4]) for row in rows]
    speeds(checkout, device=checkout.H200, rows=slow)
    text = speed_blocks(checkout.report())
    assert all("×" in cell for row in read_rows(text) for cell in row[3:]) and UNKNOWN in text and COMMAND not in text
