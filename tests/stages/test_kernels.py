"""`repro kernels`: what it says where it cannot run, its records, and the tables in the documentation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from repro.bench import kernels
from repro.core.errors import RunError, UserError
from repro.core.paths import find_root
from repro.core.record import read_json, replace_block

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with this code, as the working directory."""
    for package in ("kernels", "repro", "stages"):
        (tmp_path / package).symlink_to(ROOT / package)
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "interpreted", "message"),
    [
        (["check"], False, "expected a CUDA device"),
        (["bench"], False, "sees no CUDA device"),
        (["resources"], True, "TRITON_INTERPRET is set"),
        (["check", "--op", "bi_wvk"], False, "did you mean 'bi_wkv'?"),
    ],
)
def test_where_it_cannot_run(repro_cli, monkeypatch, arguments, interpreted, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("kernels.tools.operators.INTERPRETED", interpreted)
    code, out, err = repro_cli("kernels", *arguments)
    assert (code, out) == (2, "") and err.startswith("repro: kernels") and message in err and err.count("\n") == 1


def test_it_runs_with_torch_triton_timm_typer_and_rich_alone():
    """On a bare GPU machine: nothing else of the lock file is imported on the way to the first check."""
    blocked = ["dvc", "sklearn", "matplotlib", "pandas", "scipy", "pytest", "mmseg", "mmcv", "mmengine", "dvclive"]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); from repro.cli import main; sys.argv = ['repro', 'kernels', 'bench']; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "PyTorch sees no CUDA device" in done.stderr, done.stderr


def test_a_failed_check_is_recorded_and_fails(checkout, monkeypatch, capsys):
    """Rows over their limits, as broken kernels would give them: the record says so, the exit code is 1, and bench
    would stop there.
    """
    from kernels import dispatch
    from kernels.tools import check
    from repro.core.record import write_record

    sizes = {"operator": "ttt_linear", "tokens": 17, "heads": 1, "dtype": "fp32"}
    rows = [
        {
            "check": "default config",
            **sizes,
            "errors": {"out": 1e-7},
            "not_finite": [],
            "limits": {"out": 1e-5},
            "passed": True,
        },
        {
            "check": "default config",
            **sizes,
            "errors": {"out": 1e-3},
            "not_finite": ["q"],
            "limits": {"out": 1e-5},
            "passed": False,
        },
        {"check": "a peer", **sizes, "passed": None, "reason": "not installed"},
        {"check": "a config", **sizes, "passed": False, **check.failure(ValueError("shared\nmemory"))},
    ]
    monkeypatch.setattr(check, "rows", lambda cases, device, skip: iter(rows[skip:]))
    monkeypatch.setattr(check, "count", lambda cases, device: len(rows))
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda *asked: None)
    with pytest.raises(RunError, match="2 of 4 checks failed, see .*kernels_check.json"):
        kernels.run_check(find_root(), "ttt_linear")
    (record,) = checkout.glob("results/measured/*/kernels_check.json")
    metrics = json.loads(record.read_text())["metrics"]
    assert (metrics["rows"], metrics["failed"], list(metrics["source_hash"])) == (rows, 2, ["ttt_linear"])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()][:4] == [
        "ok",
        "FAILED",
        "not run",
        "FAILED",
    ]
    write_record(checkout, metrics, {}, 0.0)  # a null without a reason would be refused


@pytest.fixture
def compiled(monkeypatch):
    """`resources` with two rows for each operator, made without a compiler; the operators compiled, in order."""
    from kernels.tools import resources

    done = []

    def rows(cases, skip=0, defaults=False):
        numbers = {"stack_bytes": 0, "shared_bytes": 0, "instructions": {"LDL": 0, "STL": 0, "BAR": 0}}
        labels = {
            "operator": cases.NAME,
            "kernel": f"{cases.NAME}_forward",
            "config": {},
            "default": True,
            "dtype": "bf16",
        }
        for target in ("sm_80", "sm_90")[skip:]:
            done.append(cases.NAME)
            yield {
                **labels,
                "target": target,
                "registers": len(done),
                **numbers,
                "loops": [{"instructions": 9, "BAR": 0, "SHFL": 0}],
            }

    monkeypatch.setattr(resources, "rows", rows)
    monkeypatch.setattr(resources, "planned", lambda cases, defaults: range(2))
    monkeypatch.setattr(resources, "source_hash", lambda cases: f"{cases.NAME}'s")
    return done


def test_with_an_operator_the_rows_of_the_others_stay(checkout, monkeypatch, compiled):
    """`resources --op` of the second operator: its rows are new, in their place between the others', which are not
    compiled.
    """
    from kernels.tools import operators

    names = list(operators.OPERATORS)
    again = names[1]
    kernels.run_resources(find_root())
    kernels.run_resources(find_root(), again)
    metrics = read_json(checkout / "results/measured/compile/resources.json")["metrics"]
    assert compiled == [name for name in (*names, again) for _ in range(2)]
    assert [row["operator"] for row in metrics["rows"]] == [name for name in names for _ in range(2)]
    assert [row["registers"] for row in metrics["rows"]] == [
        1,
        2,
        *range(2 * len(names) + 1, 2 * len(names) + 3),
        *range(5, 2 * len(names) + 1),
    ]
    assert metrics["source_hash"] == {name: f"{name}'s" for name in names} and metrics["unfinished"] == []
    monkeypatch.setattr(kernels, "has_versions", lambda recorded: False)
    with pytest.raises(UserError, match="made with other versions; run without --op"):
        kernels.run_resources(find_root(), names[-1])


def test_what_was_interrupted_is_continued_and_what_is_complete_is_made_anew(checkout, monkeypatch, compiled):
    """Ctrl-C in the second operator: its first row and the first operator are kept, and the next call compiles the
    rest, each once.
    """
    from kernels.tools import operators, resources

    names, rows = list(operators.OPERATORS), resources.rows

    def break_off(cases, skip=0, defaults=False):
        made = rows(cases, skip)
        yield next(made)
        if names[1] == cases.NAME:
            raise KeyboardInterrupt
        yield from made

    monkeypatch.setattr(resources, "rows", break_off)
    with pytest.raises(KeyboardInterrupt):
        kernels.run_resources(find_root())
    record = checkout / "results/measured/compile/resources.json"
    metrics = read_json(record)["metrics"]
    assert [row["operator"] for row in metrics["rows"]] == [names[0], names[0], names[1]] and metrics["unfinished"] == [
        names[1]
    ]
    monkeypatch.setattr(resources, "rows", rows)
    kernels.run_resources(find_root())
    metrics = read_json(record)["metrics"]
    assert compiled == [name for name in names for _ in range(2)]
    assert len(metrics["rows"]) == 2 * len(names) and metrics["unfinished"] == []
    kernels.run_resources(find_root())
    assert compiled == 2 * [name for name in names for _ in range(2)]


def test_a_check_stops_in_time_and_goes_on(checkout, monkeypatch):
    """`--minutes`: after the time not a row is begun; the next call begins with the row that is missing."""
    from kernels import dispatch
    from kernels.tools import check

    limit = {"errors": {"out": 1e-7}, "not_finite": [], "limits": {"out": 1e-5}, "passed": True}
    rows = [
        {"operator": "bi_wkv", "check": f"number {i}", "tokens": 17, "channels": 4, "dtype": "fp32", **limit}
        for i in range(3)
    ]
    monkeypatch.setattr(check, "rows", lambda cases, device, skip: iter(rows[skip:]))
    monkeypatch.setattr(check, "count", lambda cases, device: len(rows))
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda *asked: None)
    left = iter([60, 60, 0])
    monkeypatch.setattr(kernels, "_left", lambda deadline: next(left))
    assert kernels.run_check(find_root(), "bi_wkv", minutes=1) is False
    (record,) = checkout.glob("results/measured/*/kernels_check.json")
    assert [row["check"] for row in read_json(record)["metrics"]["rows"]] == ["number 0", "number 1"]
    monkeypatch.setattr(kernels, "_left", lambda deadline: 60)
    assert kernels.run_check(find_root(), "bi_wkv", minutes=1) is True
    assert read_json(record)["metrics"]["rows"] == rows


def test_documented_tables_are_of_committed_records():
    """results/speed.md: each generated block is what the records under results/measured give; `repro report` writes
    them.
    """
    page = (ROOT / kernels.PAGE).read_text()
    for name, block, text in kernels.make_passages(find_root(ROOT)):
        assert f"<!-- {block} -->\n{text}\n<!-- /{block} -->" in page, block


def test_a_block_is_replaced_where_its_lines_are(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- /x -->\nb\n")
    replace_block(page, "x", "new\nlines")
    assert page.read_text() == "a\n<!-- x -->\nnew\nlines\n<!-- /x -->\nb\n"
    with pytest.raises(UserError, match="no lines <!-- y --> and <!-- /y -->"):
        replace_block(page, "y", "new")
