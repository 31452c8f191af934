"""Each lie that an audit found, or that would be easy to tell, is planted here and caught."""

import csv
import dataclasses
import re
import shutil
from pathlib import Path

import pytest

from repro.core.errors import RunError, UserError
from repro.report.ledger import load_ledger
from stages.report import ReportParams, run
from tests.slow import first

ROOT = Path(__file__).parents[2]
VITTT, DEIT = "vittt_tiny_patch16_224", "deit_tiny_patch16_224"
MARKERS = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n\n" for name in ("verdict", "picture", "verbs"))
SPEEDUP = "text.abstract.speedup_1280_t"


def pair(**conditions):
    """Vittt-T and DeiT-T at 1280×1280, the first 4.72 times as fast, as the paper says."""
    usual = {"batch_size": 64, "dtype": "fp16", **conditions}
    return [
        {"model": VITTT, "throughput_img_per_s": 4.72} | usual,
        {"model": DEIT, "attention": "unfused", "throughput_img_per_s": 1.0} | usual,
    ]


@pytest.fixture
def reported(checkout):
    """A checkout with some records, reported."""
    checkout.count(t=(VITTT, {}, 224, 6_983_116, 1.4575))
    checkout.speed(*pair(batch_size=1, dtype="fp32"), device=checkout.CPU)
    checkout.write("README.md", f"# Title\n\n{MARKERS}end\n")
    run(ReportParams(), checkout.paths, html=False)
    return checkout


def check(checkout, capsys) -> list[str]:
    """The lines of `repro report --check` before its error; none where it finds nothing."""
    capsys.readouterr()
    before = {file: file.read_bytes() for file in checkout.paths.root.rglob("*") if file.is_file()}
    try:
        run(ReportParams(), checkout.paths, check=True)
        found = []
    except RunError as error:
        assert "\n" not in str(error) and "`repro report`" in str(error) and error.exit_code == 1
        found = capsys.readouterr().out.splitlines()
        assert str(error).startswith(f"report: {len(found)} outdated ")
    assert {file: file.read_bytes() for file in checkout.paths.root.rglob("*") if file.is_file()} == before, (
        "it must write nothing"
    )
    return [line.removeprefix("report: ").removesuffix(": not what the records and the ledger give") for line in found]


def edit(checkout, name: str, old: str, new: str) -> None:
    file = checkout.paths.root / name
    text = file.read_text(encoding="utf-8")
    assert text.count(old) >= 1, old
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_pages_that_are_true_pass(reported, capsys):
    assert check(reported, capsys) == []
    assert "every page is what the records and the ledger give" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "old", "new"),
    first(
        [
            ("results/tables.md", "1.44 → 1.458 ≠ᵉ (+0.018)", "1.44 → 1.458 ✓"),
            ("results/claims.json", '"status": "differs, explained"', '"status": "matched"'),
            ("results/claims.csv", '"differs, explained"', "matched"),
            ("results/papers/readings.md", "Vision-TTT leaves choices open", "Vision-TTT leaves nothing open"),
        ],
        2,
    ),
)
def test_a_status_that_is_typed_by_hand_is_found(reported, capsys, name, old, new):
    edit(reported, name, old, new)
    assert check(reported, capsys) == [name]
    run(ReportParams(), reported.paths, html=False)
    assert check(reported, capsys) == []


@pytest.mark.parametrize(
    ("block", "old", "new"),
    first(
        [
            ("verdict", "were not tested", "were all reached"),
            ("picture", "logarithmic", "linear"),
            ("verbs", "report", "reports"),
        ]
    ),
)
def test_a_number_of_readme_that_no_record_has_is_found(reported, capsys, block, old, new):
    edit(reported, "README.md", old, new)
    assert check(reported, capsys) == [f"README.md, block {block}"]


def test_what_is_missing_or_was_measured_anew_is_found(reported, capsys):
    (reported.paths.results / "claims.csv").unlink()
    assert check(reported, capsys) == ["results/claims.csv, which is missing"]
    run(ReportParams(), reported.paths, html=False)
    reported.count(t=(VITTT, {}, 224, 7_983_116, 1.4575))
    assert check(reported, capsys) == [
        "README.md, block verdict",
        "results/claims.csv",
        "results/claims.json",
        "results/tables.md",
    ]


def test_prose_outside_the_blocks_is_nobodys_output(reported, capsys):
    edit(reported, "README.md", "end\n", "another end\n")
    reported.write("docs/other.md", "by hand\n")
    assert check(reported, capsys) == []


def test_the_command_ends_with_one_line_and_exit_code_1(reported, repro_cli, monkeypatch):
    edit(reported, "results/claims.json", '"status": "differs, explained"', '"status": "matched"')
    monkeypatch.chdir(reported.paths.root)
    code, _, err = repro_cli("report", "--check")
    assert code == 1 and err.count("\n") == 1


def test_a_narrowed_statement_does_not_load(checkout, tmp_path):
    """The audit's example: the paper says that ViT3 is far behind in dense tasks, and a ledger asked for S and B, where
    it is true.
    """
    text = checkout.paper.ledger_file.read_text(encoding="utf-8")
    says = "ViT3 is comparable with Vittt in classification, and has a considerable performance gap in dense prediction"
    claim = f"  - id: text.gap\n    place: Section 5.2\n    says: {says}\n    kind: statement\n    holds: %s\n"
    gaps = [f"table2_ade20k.vittt_{size}.miou_percent > table2_ade20k.vit3_{size}.miou_percent" for size in "tsb"]
    narrowed, whole = (
        text.replace("claims:\n", "claims:\n" + claim % " and ".join(asked), 1) for asked in (gaps[1:], gaps)
    )
    file = tmp_path / "ledger.yaml"
    file.write_text(narrowed, encoding="utf-8")
    with pytest.raises(ValueError, match="text.gap: the statement is narrowed: it is about more sizes than S, B"):
        load_ledger(file)
    file.write_text(whole, encoding="utf-8")
    assert "text.gap" in load_ledger(file).entries


def test_a_speed_of_another_device_cannot_take_the_papers_name(checkout):
    """Rows of a CPU in a record that says L40S, and the reverse, are errors; honest rows of either are fine."""
    for device, said in ((checkout.CPU, checkout.L40S), (checkout.L40S, checkout.CPU)):
        checkout.speed(*(row | {"device": device} for row in pair()), device=said)
        with pytest.raises(
            UserError, match=f"results/efficiency/metrics.json: a row names the device {device}, and the record {said}"
        ):
            checkout.judge()
    # more of its threads
    checkout.speed(*(row | {"device": checkout.CPU.replace("2", "4")} for row in pair()), device=checkout.CPU)
    assert checkout.judge()[SPEEDUP].status == "not measured"
    checkout.speed(*pair(), device=checkout.CPU)
    assert (checkout.judge()[SPEEDUP].status, checkout.judge()[SPEEDUP].ours) == ("not measured", None)
    checkout.speed(*pair(), device=checkout.L40S)
    assert checkout.judge()[SPEEDUP].status == "matched"


def test_a_claim_about_kernels_takes_no_number_of_a_cpu(checkout):
    """On a CPU no kernel runs; the audit found such a number, 5.156, in this column."""
    claim = "appendix.b2.memory_factor_x"
    about = {"memory_reference_over_kernel": 4.0}
    checkout.speed(*pair(batch_size=1), device=checkout.CPU, op=about)
    verdict = checkout.judge()[claim]
    assert (verdict.status, verdict.ours) == ("not measured", None) and "on a GPU" in verdict.reason
    checkout.speed(*pair(), device=checkout.H200, op=about)
    assert (checkout.judge()[claim].status, checkout.judge()[claim].ours) == ("matched", 4.0)


def test_a_fitted_row_is_not_called_matched(checkout):
    """All 30 FLOPs of Table 2 as the paper prints them: not one of them counts as a match."""
    rows = {}
    for table, image_size in (("table2_coco", [800, 1344]), ("table2_ade20k", [512, 512])):
        for name, printed in checkout.ledger.table(table).records.items():
            about = {
                "model": "vit_adapter",
                "options": {"backbone": printed["model"]},
                "image_size": image_size,
                "num_params": 1,
            }
            rows[f"{table}.{name}"] = {**about, "macs_g": 1.0, "macs_g_paper_convention": float(printed["macs_g"])}
    checkout.record("complexity", {"rows": rows, "saved_at_1280_percent": {}, "dwconv_params_m": {}})
    compared = [
        verdict.compared for name, verdict in checkout.judge().items() if re.fullmatch(r"table2_\w+\.\w+\.macs_g", name)
    ]
    assert compared == ["fitted"] * 30


NOISY = {"latency_ms_ci95": [5.0, 15.0]}


def test_a_noisy_row_gives_no_verdict_and_no_ratio(checkout):
    """An interval of ±50 % around the median of 10 ms."""
    checkout.speed(*(row | NOISY for row in pair()), device=checkout.L40S)
    checkout.speed(*(row | NOISY for row in pair(batch_size=1)), device=checkout.H200, path="measured/h200/efficiency")
    verdict = checkout.judge()[SPEEDUP]
    assert (verdict.status, verdict.ours, verdict.elsewhere) == ("not measured", None, ()) and "noisy" in verdict.reason
    assert "noisy: spread" in checkout.page() and "(Vittt-T " not in checkout.page()
    checkout.speed(*pair(), device=checkout.L40S)
    checkout.speed(*pair(batch_size=1), device=checkout.H200, path="measured/h200/efficiency")
    assert checkout.judge()[SPEEDUP].status == "matched" and "(Vittt-T 1.00× as fast)" in checkout.page()  # 10 ms each


def test_an_explanation_that_does_not_give_the_printed_number_is_dropped(checkout, tmp_path):
    """The audit: a note explained all of Table 3 by Conv1d, DWConv and rates, of which it explains the last row alone."""
    checkout.count(dual=(VITTT, {"design": "dual"}, 224, 1, 1.4534), conv2d=(VITTT, {}, 224, 1, 1.4575))
    text = checkout.paper.ledger_file.read_text(encoding="utf-8")
    note = "  - {ids: [table3.dual.macs_g, table3.conv2d.macs_g], text: 'without them it is {computed}', shows: 'vittt_design_g(\"%s\")'}\n"
    lie = text.replace("\nexplanations:\n", f"\nexplanations:\n{note % 'dual'}", 1)
    file = tmp_path / "ledger.yaml"
    file.write_text(lie, encoding="utf-8")
    checkout.paper = dataclasses.replace(checkout.paper, ledger_file=file)
    verdicts = checkout.judge()
    # Eq. 13 gives 1.4448 for both designs: it is cut to 1.44, which Table 3 prints for the last row, and 1.42 for the
    # one before
    assert verdicts["table3.dual.macs_g"].compared == "differs, unexplained"
    assert verdicts["table3.conv2d.macs_g"].compared == "differs, explained"


def test_a_setting_that_was_copied_from_the_paper_is_no_match(checkout):
    """This project's own profile, which repeats the paper's recipe: the audit found 17 such matches, 6 more were
    arithmetic.
    """
    shutil.copy(ROOT / "profiles/paper.yaml", checkout.write("profiles/paper.yaml", ""))
    verdicts = checkout.judge()
    settings = [verdict for verdict in verdicts.values() if verdict.entry.kind in ("setting", "data")]
    assert {verdict.status for verdict in settings} <= {"declared", "not measured"}
    copied = [verdict for verdict in settings if verdict.sources == ("profiles/paper.yaml",)]
    assert len(copied) >= 17 and not any(verdict.status.startswith("matched") for verdict in copied)
    run(ReportParams(), checkout.paths, html=False)
    rows = list(csv.DictReader((checkout.paths.results / "claims.csv").read_text(encoding="utf-8").splitlines()))
    assert not [row["id"] for row in rows if row["kind"] == "setting" and row["status"].startswith("matched")]


@pytest.mark.parametrize(
    ("split", "held_out_images", "status"),
    [
        ("val", 50_000, "matched"),
        ("tune", 50_000, "not measured"),  # as many images, of another split
        ("train", 50_000, "not measured"),
        ("val", 49_999, "not measured"),
        ("val", 10_000, "not measured"),
        ("test", 100_000, "not measured"),
        ("", 50_000, "not measured"),  # a record that does not say
    ],
)
@pytest.mark.parametrize("path", ["pretrain/t", "measured/gpu/evaluate/t"])
def test_a_score_of_another_split_or_of_a_part_is_in_no_column(checkout, path, split, held_out_images, status):
    checkout.train(path, VITTT, "imagenet", top1=77.7, held_out_images=held_out_images, split=split)
    if path.startswith("measured"):  # as `repro evaluate` writes it
        content = checkout.json(f"results/{path}/metrics.json")
        content["metrics"].pop("by_seed")
        checkout.record(path, content["metrics"])
    assert checkout.judge()["table1.vittt_t.top1_percent"].status == status
