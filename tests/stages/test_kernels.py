"""`repro kernels`: what it says where it cannot run, its records, and the tables in the documentation."""

import json

import pytest

from kernels.tools import operators
from repro.bench import kernels
from repro.core.errors import RunError, UserError
from repro.core.paths import find_root
from repro.core.record import read_json, replace_block, write_record
from tests.conftest import ROOT, run_python


def test_where_it_cannot_run(repro_cli, monkeypatch):
    """Where there is no GPU, `test_wrong_input.py` has it."""
    monkeypatch.setattr("kernels.tools.operators.INTERPRETED", True)
    assert "TRITON_INTERPRET is set" in repro_cli.refuse("kernels", "resources")


def test_it_runs_with_torch_triton_timm_typer_and_rich_alone():
    """On a bare GPU machine: nothing else of the lock file is imported on the way to the first check."""
    blocked = "dvc sklearn matplotlib pandas scipy pytest mmseg mmcv mmengine dvclive".split()
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); from repro.cli import main; sys.argv = ['repro', 'kernels', 'bench']; main()"
    done = run_python("-c", code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "PyTorch sees no CUDA device" in done.stderr, done.stderr


@pytest.fixture
def check_rows(monkeypatch):
    """Let `kernels check` find these rows, as a GPU would give them."""
    from kernels import dispatch
    from kernels.tools import check

    def give(rows):
        monkeypatch.setattr(check, "planned", lambda cases, device: [(row,) for row in rows])
        monkeypatch.setattr(check, "run", lambda cases, row: row)
        monkeypatch.setattr(dispatch, "triton_obstacle", lambda *asked: None)

    return give


SIZES = {"tokens": 17, "heads": 1, "dtype": "fp32"}
PASSED = {**SIZES, "errors": {"out": 1e-7}, "not_finite": [], "limits": {"out": 1e-5}, "passed": True}


def test_a_failed_check_is_recorded_and_fails(bare_checkout, check_rows, capsys):
    """Rows over their limits: the record says so, the exit code is 1, and bench would stop there."""
    from kernels.tools import check

    spoilt = {"errors": {"out": 1e-3}, "not_finite": ["q"], "passed": False}
    rows = [
        {"check": "default config", **PASSED},
        {"check": "default config", **PASSED, **spoilt},
        {"check": "a peer", **SIZES, "passed": None, "reason": "not installed"},
        {"check": "a config", **SIZES, "passed": False, **check.failure(ValueError("shared\nmemory"))},
    ]
    rows = [{"operator": "ttt_linear", **row} for row in rows]
    check_rows(rows)
    with pytest.raises(RunError, match="2 of 4 checks failed, see .*kernels_check.json"):
        kernels.run_check(find_root(), "ttt_linear")
    (record,) = bare_checkout.glob("results/replications/*/kernels_check.json")
    metrics = json.loads(record.read_text())["metrics"]
    assert (metrics["rows"], metrics["failed"], list(metrics["source_hash"])) == (rows, 2, ["ttt_linear"])
    said = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert said[:4] == ["ok", "FAILED", "not run", "FAILED"]
    write_record(bare_checkout / "metrics.json", metrics, {}, 0.0)  # a null without a reason would be refused


@pytest.fixture
def compiled(monkeypatch):
    """`resources` with two rows for each operator, made without a compiler; the operators compiled, in order."""
    from kernels.tools import resources

    done = []

    def compile_row(cases, target):
        done.append(cases.NAME)
        about = {"operator": cases.NAME, "kernel": f"{cases.NAME}_forward", "target": target, "dtype": "bf16"}
        counted = {"instructions": {"LDL": 0, "STL": 0, "BAR": 0}, "loops": [{"instructions": 9, "BAR": 0, "SHFL": 0}]}
        used = {"registers": len(done), "stack_bytes": 0, "shared_bytes": 0}
        return {**about, "config": {}, "default": True, **used, **counted}

    monkeypatch.setattr(resources, "compile_row", compile_row)
    monkeypatch.setattr(resources, "planned", lambda cases, defaults: [(cases, "sm_80"), (cases, "sm_90")])
    monkeypatch.setattr(resources, "source_hash", lambda cases: f"{cases.NAME}'s")
    return done


def test_with_an_operator_the_rows_of_the_others_stay(bare_checkout, monkeypatch, compiled):
    """`resources --op` of the second operator: its rows are new, the others' are kept and not compiled."""
    names = list(operators.OPERATORS)
    again, last = names[1], 2 * len(names)
    kernels.run_resources(find_root())
    kernels.run_resources(find_root(), again)
    metrics = read_json(bare_checkout / "results/replications/compile/resources.json")["metrics"]
    assert compiled == [name for name in (*names, again) for _ in range(2)]
    assert [row["operator"] for row in metrics["rows"]] == [name for name in names for _ in range(2)]
    assert [row["registers"] for row in metrics["rows"]] == [1, 2, last + 1, last + 2, *range(5, last + 1)]
    assert metrics["source_hash"] == {name: f"{name}'s" for name in names} and metrics["unfinished"] == []
    monkeypatch.setattr(kernels, "has_versions", lambda recorded: False)
    with pytest.raises(UserError, match="made with other versions; run without --op"):
        kernels.run_resources(find_root(), names[-1])


def test_what_was_interrupted_is_continued_and_what_is_complete_is_made_anew(bare_checkout, monkeypatch, compiled):
    """Ctrl-C in the second operator: what was done is kept, and the next call compiles the rest, each once."""
    from kernels.tools import resources

    names, compile_row = list(operators.OPERATORS), resources.compile_row

    def break_off(cases, target):
        if (cases.NAME, target) == (names[1], "sm_90"):
            raise KeyboardInterrupt
        return compile_row(cases, target)

    def read():
        metrics = read_json(bare_checkout / "results/replications/compile/resources.json")["metrics"]
        return [row["operator"] for row in metrics["rows"]], metrics["unfinished"]

    monkeypatch.setattr(resources, "compile_row", break_off)
    with pytest.raises(KeyboardInterrupt):
        kernels.run_resources(find_root())
    assert read() == ([names[0], names[0], names[1]], [names[1]])
    monkeypatch.setattr(resources, "compile_row", compile_row)
    twice = [name for name in names for _ in range(2)]
    for calls in (1, 2):
        kernels.run_resources(find_root())
        assert compiled == calls * twice and read() == (twice, [])


def test_a_check_stops_in_time_and_goes_on(bare_checkout, monkeypatch, check_rows):
    """`--minutes`: after the time not a row is begun; the next call begins with the row that is missing."""
    rows = [{"operator": "bi_wkv", "check": f"number {i}", **PASSED} for i in range(3)]
    check_rows(rows)
    left = iter([60, 60, 0, 60, 60, 60])
    monkeypatch.setattr(kernels, "_left", lambda deadline: next(left))
    assert kernels.run_check(find_root(), "bi_wkv", minutes=1) is False
    (record,) = bare_checkout.glob("results/replications/*/kernels_check.json")
    assert read_json(record)["metrics"]["rows"] == rows[:2]
    assert kernels.run_check(find_root(), "bi_wkv", minutes=1) is True
    assert read_json(record)["metrics"]["rows"] == rows
    complete = record.read_text()
    assert kernels.run_check(find_root(), "bi_wkv", again=False) is True and record.read_text() == complete


def test_documented_tables_are_of_committed_records():
    """results/speed.md: each generated block is what the records give; `repro report` writes them."""
    page = (ROOT / kernels.PAGE).read_text()
    for name, block, text in kernels.make_passages(find_root(ROOT)):
        assert f"<!-- {block} -->\n{text}\n<!-- /{block} -->" in page, block


def test_a_page_without_the_lines_of_a_block_is_named(tmp_path):
    (page := tmp_path / "page.md").write_text("a\n<!-- x -->\nold\n<!-- /x -->\nb\n")
    with pytest.raises(UserError, match="no lines <!-- y --> and <!-- /y -->"):
        replace_block(page, "y", "new")
