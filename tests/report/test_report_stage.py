"""The stage end to end: its files, its line of counts, the same bytes each time, and a page that keeps mini runs apart."""

import csv
import re
from pathlib import Path

import pytest

from repro.papers import load_papers
from repro.report.verdicts import STATUSES
from stages.report import ReportParams, run

ROOT = Path(__file__).parents[2]
VITTT, DEIT = "vittt_tiny_patch16_224", "deit_tiny_patch16_224"


@pytest.fixture
def reported(checkout):
    """A checkout with one record of each kind, reported."""
    checkout.count(t=(VITTT, {}, 224, 6_983_116, 1.4575), r4=("regnety_040", {}, 224, 20_646_656, 3.973))
    checkout.train(
        "pretrain/vittt_nano_digits", "vittt_nano_patch16_144", "digits", top1=98.765, held_out_images=360, epochs=12
    )
    checkout.speed(
        {"model": VITTT, "batch_size": 1, "dtype": "fp32"},
        {"model": DEIT, "attention": "unfused", "batch_size": 1, "dtype": "fp32", "throughput_img_per_s": 40.0},
        {
            "model": DEIT,
            "attention": "fused",
            "batch_size": 1,
            "dtype": "fp32",
            "status": "oom",
            "reason": "out of memory",
            "throughput_img_per_s": None,
            "latency_ms": None,
            "latency_ms_ci95": None,
            "peak_memory_mib": None,
        },
        device=checkout.CPU,
    )
    run(ReportParams(), checkout.paths)
    return checkout


def page(checkout) -> str:
    return (checkout.paths.results / "tables.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    (found,) = [part for part in re.split(r"(?m)^## ", text) if part.startswith(title)]
    return found


def test_it_ends_with_one_line_of_counts(reported, capsys):
    run(ReportParams(), reported.paths)
    line = capsys.readouterr().out
    words = "matched / matched, truncated / fitted / declared / differs, explained / differs, unexplained / paper inconsistent / "
    words += "not measurable as described / not measured / out of scope"
    *counts, total = map(int, re.findall(r"\d+", line))
    assert re.sub(r" \d+", "", line) == f"{words} of\n"
    assert sum(counts) == total == len(reported.ledger.entries)


def test_json_and_csv_hold_every_entry_with_the_same_status(reported):
    content = reported.json("results/claims.json")
    rows = list(csv.DictReader((reported.paths.results / "claims.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["id"] for row in rows] == [entry["id"] for entry in content["entries"]] == list(reported.ledger.entries)
    assert [row["status"] for row in rows] == [entry["status"] for entry in content["entries"]]
    assert content["summary"]["entries"] == len(rows)
    (vittt,) = [entry for entry in content["entries"] if entry["id"] == "table1.vittt_t.macs_g"]
    assert (vittt["paper"], vittt["ours"], vittt["status"], vittt["how"]) == (
        "1.4",
        1.4575,
        "matched, truncated",
        "truncation",
    )


def test_tables_show_paper_ours_and_status(reported):
    text = page(reported)
    table1 = section(text, "Table 1")
    assert "| Vittt-T | 7 → 6.983 ✓ | 1.4 → 1.458 ✓ | 77.7 → – |" in table1
    assert "| RegNetY-4G | 12 → 20.65 ≠ᵉ (+8.65) | 4 → 3.973 ✓ | 80.0 → – |" in table1
    assert "6.98 → 6.983 ✓ | 1.44 → 1.458 ≠ᵉ (+0.018)" in section(text, "Table 3")
    for table, rows in (
        ("Table 1", 35),
        ("Table 2 (left)", 15),
        ("Table 2 (right)", 15),
        ("Table 3", 6),
        ("Table 4", 5),
    ):
        lines = [line for line in section(text, table).splitlines() if line.startswith("|")]
        assert len(lines) == rows + 2  # header and rule


def test_a_mini_run_stands_in_its_own_section_only(reported):
    text = page(reported)
    assert "98.77 %" in section(text, "Runs on other data: no comparison with the paper")
    assert text.count("98.77") == 1
    assert "98.7" not in (reported.paths.results / "claims.csv").read_text(encoding="utf-8")


def test_speed_names_its_device_and_keeps_out_of_memory_as_a_row(reported):
    part = section(page(reported), "Speed and memory measured here")
    assert f"### {reported.CPU}, batch 1, fp32, infer" in part
    assert f"| {DEIT} | unfused | 1280×1280 | 40.0 |" in part
    assert f"| {DEIT} | fused | 1280×1280 | oom |" in part
    assert reported.L40S not in part
    assert f"elsewhere: 2.5× (2.05 to 3.06) ({reported.CPU}, batch 1, fp32)" in section(
        page(reported), "Headline claims"
    )
    assert f"elsewhere: T 2.5× (2.05 to 3.06) ({reported.CPU}, batch 1, fp32)" in section(
        page(reported), "Headline claims"
    )


def test_provenance_lists_every_record(reported):
    part = (reported.paths.results / "provenance.md").read_text(encoding="utf-8")
    for record in ("complexity", "pretrain/vittt_nano_digits", "efficiency"):
        assert f"`results/{record}/metrics.json`" in part
    assert "0123456789ab" in part and "torch 2.14.1" in part
    assert f"| `repro complexity` | {reported.CPU}, AVX2 |" in part


@pytest.mark.parametrize("name", ["tables.md", "papers/vit3.md", "papers/linearize.md", "papers/kv_binding.md"])
def test_a_page_is_short_explains_its_marks_and_leads_to_the_others(name):
    text = (ROOT / "results" / name).read_text(encoding="utf-8")
    assert len(text.encode()) <= 80_000
    links = re.findall(r"\]\(([^)#]*)\)", text.split("\n\n")[1])
    files = {(ROOT / "results" / name).parent.joinpath(link).resolve().relative_to(ROOT).as_posix() for link in links}
    assert files == {
        "README.md",
        "results/papers/errata.md",
        "docs/README.md",
        "results/report.html",
        *(paper.page for paper in load_papers().values()),
    }
    explained = re.findall(r"(?m)^\| (\S) \| ", text.split("\n## How to read this page\n")[1].split("\n## ")[0])
    assert len(explained) <= 6 and {status.text.rstrip("ᵉ") for status in STATUSES.values()} == set(explained)


def test_the_profile_is_named_as_it_is(reported):
    assert "holds the mini settings" in page(reported)
    reported.write("params.yaml", "report: {speed_dtype: bf16}\n")
    run(ReportParams(speed_dtype="bf16"), reported.paths)
    assert "edited settings that equal no profile" in page(reported)


def test_markdown_tables_are_rectangular(reported):
    for block in re.findall(r"(?m)(?:^\|.*\n)+", page(reported)):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block


def test_an_empty_checkout_is_reported_too(checkout):
    run(ReportParams(), checkout.paths)
    text = page(checkout)
    assert "Nothing is measured yet: `repro efficiency`." in text
    assert "No record was found" in (checkout.paths.results / "provenance.md").read_text(encoding="utf-8")
