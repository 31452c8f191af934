"""The stage end to end: its files, its line of counts, a page that keeps mini runs apart, and lies that it finds."""

import csv
import re

import pytest

from repro.core.errors import RunError
from repro.papers import load_papers
from repro.report.verdicts import STATUSES
from tests.conftest import ROOT

VITTT, DEIT = "vittt_tiny_patch16_224", "deit_tiny_patch16_224"
MARKERS = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n\n" for name in ("claims", "verdict", "picture", "verbs"))


@pytest.fixture
def reported(checkout):
    """A checkout with one record of each kind, reported."""
    checkout.count(t=(VITTT, {}, 224, 6_983_116, 1.4575), r4=("regnety_040", {}, 224, 20_646_656, 3.973))
    about = {"top1": 98.765, "held_out_images": 360, "epochs": 12}
    checkout.train("pretrain/vittt_nano_digits", "vittt_nano_patch16_144", "digits", **about)
    missing = dict.fromkeys(("throughput_img_per_s", "latency_ms", "peak_memory_mib"))
    rows = [
        {"model": VITTT},
        {"model": DEIT, "attention": "unfused", "throughput_img_per_s": 40.0},
        {"model": DEIT, "attention": "fused", "status": "oom", "reason": "out of memory", **missing},
    ]
    checkout.speed(*(row | {"batch_size": 1, "dtype": "fp32"} for row in rows), device=checkout.CPU)
    checkout.write("README.md", f"# Title\n\n{MARKERS}end\n")
    checkout.run_stage()
    return checkout


def section(text: str, title: str) -> str:
    (found,) = [part for part in re.split(r"(?m)^## ", text) if part.startswith(title)]
    return found


def test_it_ends_with_one_line_of_counts_and_before_any_record_nothing_fails(checkout, capsys):
    checkout.run_stage(html=False)
    line = capsys.readouterr().out
    *counts, total = map(int, re.findall(r"\d+", line))
    assert re.sub(r" \d+", "", line) == f"{' / '.join(STATUSES)} of\n"
    assert sum(counts) == total == len(checkout.ledger.entries)
    assert "Nothing is measured yet: `repro efficiency`." in checkout.read("results/tables.md")


def test_every_page_shows_the_records(reported):
    text, cpu = reported.read("results/tables.md"), reported.CPU
    table1, speed = section(text, "Table 1"), section(text, "Speed and memory measured here")
    assert "| Vittt-T | 7 → 6.983 ✓ | 1.4 → 1.458 ✓ | 77.7 → – |" in table1
    assert "| RegNetY-4G | 12 → 20.65 ≠ᵉ (+8.65) | 4 → 3.973 ✓ | 80.0 → – |" in table1
    rows = {"Table 1": 35, "Table 2 (left)": 15, "Table 2 (right)": 15, "Table 3": 6, "Table 4": 5}
    for table, count in rows.items():
        lines = [line for line in section(text, table).splitlines() if line.startswith("|")]
        assert len(lines) == count + 2  # header and rule
    assert f"### {cpu}, batch 1, fp32, infer" in speed and reported.L40S not in speed
    assert "[elsewhere](#" in section(text, "Headline claims")
    elsewhere = section(text, "On other devices than the paper's")
    # the Abstract and Section 5.3 print the same ratio
    assert elsewhere.count(f"| {cpu}, batch 1, fp32 | 2.5× (2.05 to 3.06) |") == 1
    for block in re.findall(r"(?m)(?:^\|.*\n)+", text):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block
    # a small run is on the page of the runs only
    runs = reported.read("results/papers/vision_ttt_runs.md")
    assert runs.count("98.77 %") == 1 and "98.77" not in text
    claims = reported.read("results/claims.csv")
    entries = list(csv.DictReader(claims.splitlines(keepends=True)))
    assert "98.7" not in claims
    assert [entry["id"] for entry in entries] == list(reported.ledger.entries)
    (vittt,) = [entry for entry in entries if entry["id"] == "table1.vittt_t.macs_g"]
    found = [vittt[key] for key in ("paper", "ours", "status", "how")]
    assert found == ["1.4", "1.4575", "matched, truncated", "truncation"]


@pytest.mark.parametrize("name", ["tables.md", "papers/vit3.md", "papers/linearize.md", "papers/kv_binding.md"])
def test_a_page_is_short_explains_its_marks_and_leads_to_the_others(name):
    text = (ROOT / "results" / name).read_text(encoding="utf-8")
    assert len(text.encode()) <= 80_000
    links = re.findall(r"\]\(([^)#]*)\)", text.split("\n\n")[1])
    files = {(ROOT / "results" / name).parent.joinpath(link).resolve().relative_to(ROOT).as_posix() for link in links}
    others = {"README.md", "results/papers/errata.md", "docs/README.md"}
    assert files == others | {paper.page for paper in load_papers().values()}
    explained = re.findall(r"(?m)^\| (\S) \| ", text.split("\n## How to read this page\n")[1].split("\n## ")[0])
    assert len(explained) <= 6 and {status.mark.rstrip("ᵉ") for status in STATUSES} == set(explained)


def test_the_pages_are_the_same_bytes_under_every_profile(reported):
    """Whatever params.yaml is."""
    before = {file: file.read_bytes() for file in reported.paths.results.rglob("*.md")}
    reported.write("params.yaml", "pretrain: {a: {x: 1}}\n")
    reported.run_stage(html=False)
    assert {file: file.read_bytes() for file in reported.paths.results.rglob("*.md")} == before


def check(checkout, capsys) -> list[str]:
    """The lines of `repro report --check` before its error; none where it finds nothing."""
    capsys.readouterr()

    def read_all():
        return {file: file.read_bytes() for file in checkout.paths.root.rglob("*") if file.is_file()}

    before = read_all()
    try:
        checkout.run_stage(check=True)
        found = []
    except RunError as error:
        assert "\n" not in str(error) and "`repro report`" in str(error) and error.exit_code == 1
        found = capsys.readouterr().out.splitlines()
        assert str(error).startswith(f"report: {len(found)} outdated ")
    assert read_all() == before, "it must write nothing"
    return [line.removeprefix("report: ").removesuffix(": not what the records and the ledger give") for line in found]


def edit(checkout, name: str, old: str, new: str) -> None:
    text = checkout.read(name)
    assert old in text
    checkout.write(name, text.replace(old, new, 1))


def test_true_pages_pass_and_what_is_missing_or_was_measured_anew_is_found(reported, capsys):
    """Whatever prose outside the blocks says: it is nobody's output."""
    edit(reported, "README.md", "end\n", "another end\n")
    reported.write("docs/other.md", "by hand\n")
    assert check(reported, capsys) == []
    assert "every page is what the records and the ledger give" in capsys.readouterr().out
    (reported.paths.results / "claims.csv").unlink()
    reported.count(t=(VITTT, {}, 224, 7_983_116, 1.4575))
    pages = ("papers/errata.md", "papers/reproduction.md", "tables.md")
    missing = "results/claims.csv, which is missing"
    outdated = ["README.md, block claims", missing, *(f"results/{name}" for name in pages)]
    assert check(reported, capsys) == outdated


def test_what_is_typed_by_hand_is_found(reported, capsys):
    lies = {
        "README.md, block claims": ("README.md", "not tested", "all reached"),
        "README.md, block picture": ("README.md", "peak memory over", "mean memory over"),
        "README.md, block verbs": ("README.md", "report", "reports"),
        "README.md, block verdict": ("README.md", "DeiT-T, fused attention", "ViT, fused attention"),
        "results/claims.csv": ("results/claims.csv", '"differs, explained"', "matched"),
        "results/papers/readings.md": ("results/papers/readings.md", "leaves choices open", "leaves nothing open"),
        "results/tables.md": ("results/tables.md", "1.44 → 1.458 ≠ᵉ (+0.018)", "1.44 → 1.458 ✓"),
    }
    for name, old, new in lies.values():
        edit(reported, name, old, new)
    assert sorted(check(reported, capsys)) == list(lies)
