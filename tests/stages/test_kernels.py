"""`repro kernels`: what it says where it cannot run, its records, and the tables in the documentation."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from repro.core.errors import RunError, UserError
from repro.core.record import replace_block
from stages import kernels

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


def run_repro(*arguments, code=None, **environment):
    command = [sys.executable, *(["-c", code] if code else ["-m", "repro", "kernels", *arguments])]
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=os.environ | hidden | environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["check"], {}, "q is on cpu, expected a CUDA device"),
        (["bench"], {}, "PyTorch sees no CUDA device; speed is measured on a GPU"),
        (["resources"], {"TRITON_INTERPRET": "1"}, "the interpreter compiles nothing; unset it"),
        (["check", "--op", "bi_wvk"], {}, "--op bi_wvk: no such operator; did you mean 'bi_wkv'?"),
    ],
)
def test_where_it_cannot_run(arguments, environment, message):
    done = run_repro(*arguments, **environment)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("repro: kernels") and message in done.stderr and done.stderr.count("\n") == 1


def test_it_runs_with_torch_triton_timm_typer_and_rich_alone():
    """On a bare GPU machine: nothing else of the lock file is imported on the way to the first check."""
    blocked = ["dvc", "sklearn", "matplotlib", "pandas", "scipy", "pytest", "mmseg", "mmcv", "mmengine", "dvclive"]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); from repro.cli import main; sys.argv = ['repro', 'kernels', 'bench']; main()"
    done = run_repro(code=code)
    assert done.returncode == 2 and "PyTorch sees no CUDA device" in done.stderr, done.stderr


def test_a_failed_check_is_recorded_and_fails(checkout, monkeypatch, capsys):
    """Rows over their limits, as broken kernels would give them: the record says so, the exit code is 1, and bench would stop there."""
    from kernels import dispatch
    from kernels.tools import check
    from repro.core.record import write_record

    sizes = {"operator": "ttt_linear", "tokens": 17, "heads": 1, "dtype": "fp32"}
    rows = [
        {"check": "default config", **sizes, "errors": {"out": 1e-7}, "not_finite": [], "limits": {"out": 1e-5}, "passed": True},
        {"check": "default config", **sizes, "errors": {"out": 1e-3}, "not_finite": ["q"], "limits": {"out": 1e-5}, "passed": False},
        {"check": "a peer", **sizes, "passed": None, "reason": "not installed"},
        {"check": "a config", **sizes, "passed": False, **check.failure(ValueError("shared\nmemory"))},
    ]
    monkeypatch.setattr(check, "rows", lambda cases, device: iter(rows))
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda *asked: None)
    with pytest.raises(RunError, match="2 of 4 checks failed, see .*kernels_check.json"):
        kernels.check("ttt_linear")
    (record,) = checkout.glob("results/measured/*/kernels_check.json")
    metrics = json.loads(record.read_text())["metrics"]
    assert (metrics["rows"], metrics["failed"], list(metrics["source_hash"])) == (rows, 2, ["ttt_linear"])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()][:4] == ["ok", "FAILED", "not run", "FAILED"]
    write_record(checkout, metrics, {}, 0.0)  # a null without a reason would be refused


def test_with_an_operator_the_rows_of_the_others_stay(checkout, monkeypatch, capsys):
    """`resources --op` of the second operator: its row and hash are new, in their place between the others', which are not compiled."""
    from kernels.tools import operators, resources

    page, record = checkout / kernels.DOCS, checkout / "results/measured/compile/resources.json"
    page.parent.mkdir()
    page.write_text("".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in (kernels.RESOURCES_BLOCK, kernels.SPILLS_BLOCK)))
    compiled = []

    def rows(cases):
        compiled.append(cases.NAME)
        numbers = {"registers": len(compiled), "stack_bytes": 0, "shared_bytes": 0, "instructions": {"LDL": 0, "STL": 0, "BAR": 0}}
        labels = {"operator": cases.NAME, "kernel": f"{cases.NAME}_forward", "config": {}, "default": True, "dtype": "bf16"}
        return iter([{**labels, "target": "sm_90", **numbers, "loops": [{"instructions": 9, "BAR": 0, "SHFL": 0}]}])

    monkeypatch.setattr(resources, "rows", rows)
    monkeypatch.setattr(operators, "source_hash", lambda cases: f"{cases.NAME} {len(compiled)}")
    names = list(operators.OPERATORS)
    again = names[1]
    kernels.resources()
    kernels.resources(again)
    metrics = json.loads(record.read_text())["metrics"]
    assert compiled == [*names, again]
    assert [(row["operator"], row["registers"]) for row in metrics["rows"]] == [
        (name, len(compiled) if name == again else names.index(name) + 1) for name in names
    ]
    assert metrics["source_hash"] == {name: f"{name} {len(compiled) if name == again else len(names)}" for name in names}
    assert f"| `{again}` forward | sm_90 | {len(compiled)} |" in page.read_text()
    assert f"Of the {len(names)} rows, one for each kernel, configuration, dtype and target, 0 spill" in page.read_text()
    monkeypatch.setattr(kernels, "versions", lambda: {"triton": "another"})
    with pytest.raises(UserError, match="made with other versions; run without --op"):
        kernels.resources(names[-1])
    capsys.readouterr()


@pytest.mark.parametrize(
    ("block", "pattern"),
    [
        (kernels.BENCH_BLOCK, "*/kernels.json"),
        (kernels.RESOURCES_BLOCK, "compile/resources.json"),
        (kernels.SPILLS_BLOCK, "compile/resources.json"),
    ],
)
def test_documented_tables_are_of_committed_records(block, pattern):
    """docs/gpu.md: each generated block is made of a record under results/measured, or, without one, of nulls."""
    from kernels.tools import bench, operators, text

    found = re.search(rf"<!-- {block} -->\n(.*?)\n<!-- /{block} -->", (ROOT / kernels.DOCS).read_text(), re.S)[1]
    records = [json.loads(path.read_text()) for path in (ROOT / "results" / "measured").glob(pattern)]
    if block != kernels.BENCH_BLOCK:
        describe = text.resources_table if block == kernels.RESOURCES_BLOCK else text.describe_spills
        tables = [describe(record["metrics"]["rows"]) for record in records]
    else:
        nothing = {name: bench.summarise(cases, []) for name, cases in operators.OPERATORS.items()}
        tables = [text.bench_table(record["metrics"], record["identity"]["device"]) for record in records]
        tables = tables or [text.bench_table({"rows": [], "summary": nothing}, "not measured yet (`repro kernels bench`, on a GPU)")]
    assert found in tables


def test_a_block_is_replaced_where_its_lines_are(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- /x -->\nb\n")
    replace_block(page, "x", "new\nlines")
    assert page.read_text() == "a\n<!-- x -->\nnew\nlines\n<!-- /x -->\nb\n"
    with pytest.raises(UserError, match="no lines <!-- y --> and <!-- /y -->"):
        replace_block(page, "y", "new")
