"""Each lie that an audit found, or that would be easy to tell, is planted here and caught."""

import csv
import shutil
from pathlib import Path

import pytest

from repro.core.errors import RunError, UserError
from stages.report import ReportParams, run

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
    """Whatever prose outside the blocks says: it is nobody's output."""
    edit(reported, "README.md", "end\n", "another end\n")
    reported.write("docs/other.md", "by hand\n")
    assert check(reported, capsys) == []
    assert "every page is what the records and the ledger give" in capsys.readouterr().out


def test_what_is_typed_by_hand_is_found(reported, capsys):
    lies = {
        "README.md, block picture": ("README.md", "peak memory over", "mean memory over"),
        "README.md, block verbs": ("README.md", "report", "reports"),
        "README.md, block verdict": ("README.md", "were not tested", "were all reached"),
        "results/claims.csv": ("results/claims.csv", '"differs, explained"', "matched"),
        "results/claims.json": ("results/claims.json", '"status": "differs, explained"', '"status": "matched"'),
        "results/papers/readings.md": ("results/papers/readings.md", "leaves choices open", "leaves nothing open"),
        "results/tables.md": ("results/tables.md", "1.44 → 1.458 ≠ᵉ (+0.018)", "1.44 → 1.458 ✓"),
    }
    for name, old, new in lies.values():
        edit(reported, name, old, new)
    assert sorted(check(reported, capsys)) == list(lies)
    run(ReportParams(), reported.paths, html=False)
    assert check(reported, capsys) == []


def test_what_is_missing_or_was_measured_anew_is_found(reported, capsys):
    (reported.paths.results / "claims.csv").unlink()
    assert check(reported, capsys) == ["results/claims.csv, which is missing"]
    run(ReportParams(), reported.paths, html=False)
    reported.count(t=(VITTT, {}, 224, 7_983_116, 1.4575))
    results = [f"results/{name}" for name in ("claims.csv", "claims.json", "tables.md")]
    assert check(reported, capsys) == ["README.md, block verdict", *results]


def test_a_speed_of_another_device_cannot_take_the_papers_name(checkout):
    """Rows of a CPU in a record that says L40S, and the reverse, are errors; honest rows of either are fine."""
    for device, said in ((checkout.CPU, checkout.L40S), (checkout.L40S, checkout.CPU)):
        checkout.speed(*(row | {"device": device} for row in pair()), device=said)
        with pytest.raises(UserError, match=f"a row names the device {device}, and the record {said}"):
            checkout.judge()
    more_threads = checkout.CPU.replace("2", "4")
    for device, said, status in (
        (more_threads, checkout.CPU, "not measured"),
        (checkout.CPU, checkout.CPU, "not measured"),
        (checkout.L40S, checkout.L40S, "matched"),
    ):
        checkout.speed(*(row | {"device": device} for row in pair()), device=said)
        assert checkout.judge()[SPEEDUP].status == status


def test_a_claim_about_kernels_takes_no_number_of_a_cpu(checkout):
    """On a CPU no kernel runs; the audit found such a number, 5.156, in this column."""
    claim = "appendix.b2.memory_factor_x"
    about = {"memory_reference_over_kernel": 4.0}
    checkout.speed(*pair(batch_size=1), device=checkout.CPU, op=about)
    verdict = checkout.judge()[claim]
    assert (verdict.status, verdict.ours) == ("not measured", None) and "on a GPU" in verdict.reason
    checkout.speed(*pair(), device=checkout.H200, op=about)
    assert (checkout.judge()[claim].status, checkout.judge()[claim].ours) == ("matched", 4.0)


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
        ("val", 49_999, "not measured"),
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
