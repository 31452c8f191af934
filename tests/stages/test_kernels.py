"""`repro kernels`: what it says where it cannot run, its records, and the tables in the documentation."""

import shutil
import subprocess
from unittest.mock import Mock

import pytest

from kernels.tools.operators import OPERATORS
from repro.bench import kernels
from repro.bench.unfinished import read_clock
from repro.core.csvfile import read_typed_csv
from repro.core.errors import RunError, UserError
from repro.core.paths import Paths, find_root
from repro.core.record import replace_block
from repro.report import kernels as report
from tests.conftest import ROOT, run_python


def test_where_it_cannot_run(repro_cli, monkeypatch):
    """Where there is no GPU, `test_wrong_input.py` has it."""
    monkeypatch.setattr("kernels.tools.operators.INTERPRETED", True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "TRITON_INTERPRET is set" in repro_cli.refuse("kernels", "bench")


@pytest.mark.slow
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
        monkeypatch.setattr(check, "check_one", lambda cases, row: row)
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
    with pytest.raises(RunError, match="2 of 4 checks failed, see .*results/speed/checks/"):
        kernels.check_kernels(find_root(), "ttt_linear")
    (line,) = read_lines(bare_checkout)
    assert (line["operator"], line["checks"], line["failed"], line["not_run"]) == ("ttt_linear", 4, 2, 1)
    assert line["failures"] == "default config; a config"
    # the second row's error is a hundred times its limit, the first's a hundredth of it
    assert (line["nearest"], line["error"], line["limit"]) == ("out in default config, fp32", 1e-3, 1e-5)
    said = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert said[:4] == ["ok", "FAILED", "not run", "FAILED"]


def read_lines(root):
    (file,) = root.glob("results/speed/checks/*.csv")
    return read_typed_csv(file, kernels.CHECK_TYPES)


def test_the_lines_of_other_operators_stay(bare_checkout, check_rows):
    for name in ("bi_wkv", "ttt_linear", "bi_wkv"):
        check_rows([{"operator": name, "check": "default config", **PASSED}])
        assert kernels.check_kernels(find_root(), name)
    assert [line["operator"] for line in read_lines(bare_checkout)] == ["ttt_linear", "bi_wkv"]


def test_a_check_stops_in_time_and_goes_on(bare_checkout, monkeypatch, check_rows, capsys):
    """`--minutes`: after the time not a check is begun; the next call begins with the one that is missing."""
    check_rows([{"operator": "bi_wkv", "check": f"number {i}", **PASSED} for i in range(3)])
    left = iter([60, 60, 0, 60, *[60] * 3])
    monkeypatch.setattr(kernels, "_left", lambda deadline: next(left))
    assert kernels.check_kernels(find_root(), "bi_wkv", minutes=1) is False
    assert not list(bare_checkout.glob("results/speed/checks/*.csv"))
    assert kernels.check_kernels(find_root(), "bi_wkv", minutes=1) is True
    assert read_lines(bare_checkout)[0]["checks"] == 3
    made = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ok: ")]
    assert len(made) == 3
    assert kernels.check_kernels(find_root(), "bi_wkv", minutes=1) is True  # it was complete, and is made anew
    assert capsys.readouterr().out.count("ok: ") == 3


def test_a_check_of_one_operator_leaves_an_unfinished_check_of_all_as_it_is(bare_checkout, monkeypatch, check_rows):
    check_rows([{"operator": "ttt_linear", "check": f"number {i}", **PASSED} for i in range(2)])
    left = iter([60, *[0] * 2 * len(OPERATORS)])  # time for one check
    monkeypatch.setattr(kernels, "_left", lambda deadline: next(left))
    assert kernels.check_kernels(find_root(), minutes=1) is False
    monkeypatch.setattr(kernels, "_left", lambda deadline: 60)
    states = bare_checkout / ".runs/measuring/checks"
    (state,) = states.iterdir()
    before = state.read_bytes()
    assert kernels.check_kernels(find_root(), "bi_wkv") is True
    assert list(states.iterdir()) == [state] and state.read_bytes() == before


def test_the_first_checks_of_each_operator_are_kept_for_the_others(bare_checkout, check_rows, capsys):
    rows = [{"operator": "bi_wkv", "check": f"number {i}", **PASSED} for i in range(3)]
    check_rows(rows)
    assert kernels.check_kernels(find_root(), "bi_wkv", first=2) and not list(
        bare_checkout.glob("results/speed/checks/*")
    )
    assert kernels.check_kernels(find_root(), "bi_wkv") and read_lines(bare_checkout)[0]["checks"] == 3
    assert capsys.readouterr().out.count("ok: ") == 3
    check_rows([rows[0], {**rows[1], "passed": False, "errors": {"out": 1.0}}, rows[2]])
    with pytest.raises(RunError, match="number 1"):
        kernels.check_kernels(find_root(), "bi_wkv", first=2)


def test_what_a_campaign_checked_is_not_checked_again(bare_checkout, check_rows, capsys):
    check_rows([{"operator": "bi_wkv", "check": "default config", **PASSED}])
    began = read_clock()
    for _ in range(2):
        assert kernels.check_kernels(find_root(), "bi_wkv", began=began)
    assert capsys.readouterr().out.count("ok: ") == 1


def test_a_failed_check_is_made_again_at_another_commit(bare_checkout, check_rows, monkeypatch, capsys):
    began = read_clock()
    check_rows([{"operator": "bi_wkv", "check": "default config", **PASSED, "passed": False}])
    for commit in ("a", "a", "b"):
        monkeypatch.setattr(kernels, "label_commit", lambda root, commit=commit: commit)
        with pytest.raises(RunError, match="1 of 1 checks failed"):
            kernels.check_kernels(find_root(), "bi_wkv", began=began)
    assert capsys.readouterr().out.count("FAILED: ") == 2


TIMED = {"operator": "bi_wkv", "implementation": "triton", "passes": "forward", "dtype": "bf16", "status": "ok"}
TIMED |= {"samples": 10, "bytes": 1, "gflop": 0.0, **vars(OPERATORS["bi_wkv"].COMPARED)}


def test_a_bench_goes_on_with_what_failed_and_with_the_rows_of_memory(bare_checkout, monkeypatch):
    """The time ends with a row that failed; the next call repeats this one and measures memory, a third nothing."""
    from kernels.tools import bench, check

    cases, made = OPERATORS["ttt_linear"], []
    sizes = {"operator": "ttt_linear", "dtype": "bf16", "gflop": 0.0, "reason": "a test"}

    def measure(cases, device, step, find):
        made.append(step[2])
        status = "failed" if made == ["copy", "triton"] else "oom"
        return sizes | vars(step[0]) | {"passes": step[1], "implementation": step[2], "status": status}

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(kernels, "device_slug", lambda device: "gpu")
    monkeypatch.setattr(kernels, "device_label", lambda device: "cuda: GPU")
    monkeypatch.setattr(check, "compare", lambda *given, **more: {"passed": True})
    steps = [
        (cases.COMPARED, "forward", "copy"),
        (cases.COMPARED, "forward", "triton"),
        (cases.SMALL, "memory", "ours"),
    ]
    monkeypatch.setattr(bench, "planned", lambda *_: {bench.step_key(cases, *step): step for step in steps})
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(kernels, "_left", lambda deadline: 0 if made == ["copy", "triton"] else 60)
    began = read_clock()
    with pytest.raises(RunError, match="1 rows failed"):
        kernels.run_bench(find_root(), "ttt_linear", began=began)
    assert made == ["copy", "triton"]
    monkeypatch.setattr(kernels, "_left", lambda deadline: 60)
    for _ in range(2):
        assert kernels.run_bench(find_root(), "ttt_linear", began=began)
        assert made == ["copy", "triton", "triton", "ours"]


def test_a_bench_whose_check_breaks_off_says_so(bare_checkout, monkeypatch):
    """As kernels do that do not compile."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(kernels, "device_slug", lambda device: "gpu")
    monkeypatch.setattr(kernels, "device_label", lambda device: "cuda: GPU")
    monkeypatch.setattr("kernels.tools.check.compare", Mock(side_effect=RuntimeError("no image")))
    with pytest.raises(RunError, match="no image"):
        kernels.run_bench(find_root(), "bi_wkv")


AUTHOR = ["-c", "user.name=a", "-c", "user.email=a@b.c"]


NOW, EARLIER = "2001-01-01T00:00:00+00:00", "2000-01-01T00:00:00+00:00"


def write_times(root, old=None, **ms):
    """The rows of `kernels bench` in a checkout: tokens -> median, whose ranges are 10 % to both sides; one may be old."""
    rows = [
        TIMED
        | {"tokens": int(name[1:]), "median_ms": x, "p20_ms": 0.9 * x, "p80_ms": 1.1 * x}
        | {"measured": EARLIER if name == old else NOW}
        for name, x in ms.items()
    ]
    kernels._write_bench(root / "results/speed/kernels/gpu.csv", rows)


@pytest.fixture
def two_commits(bare_checkout, monkeypatch):
    """A repository whose first commit times its kernels as it says there, and a bench here that finds others."""
    monkeypatch.setattr(kernels, "device_slug", lambda device: "gpu")
    monkeypatch.setattr(kernels, "read_clock", lambda: NOW)
    for name in ("repro", "kernels", "stages"):
        (bare_checkout / name).unlink()  # a link to this code, which the next lines would write over
    (bare_checkout / "repro").mkdir()
    (bare_checkout / "repro/__main__.py").write_text(
        "import shutil, sys; print(sys.argv[1:]); shutil.copytree('kept', 'results')"
    )
    write_times(bare_checkout, old="t768", t192=2.0, t384=2.0, t576=1.0, t768=2.0)
    (bare_checkout / "results").rename(bare_checkout / "kept")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run(["git", *AUTHOR, *words], cwd=bare_checkout, check=True)
    here = {"t192": 1.0, "t384": 1.9, "t768": 1.0}
    monkeypatch.setattr(kernels, "run_bench", lambda *given, **more: write_times(bare_checkout, **here))
    return bare_checkout


def test_another_commit_is_timed_by_its_own_code(two_commits, capfd):
    kernels.bench_against(find_root(), "HEAD", "bi_wkv")
    out = capfd.readouterr().out
    assert "['kernels', 'bench', '--op', 'bi_wkv']" in out
    lines = [line for line in out.splitlines() if line.startswith("bi_wkv")]
    # a shape that only one of both has measured now is left out; ranges that overlap leave it open
    assert [("T 192" in line, line.split()[-1]) for line in lines] == [(True, "2.00"), (False, "open")]
    left = subprocess.check_output(["git", "worktree", "list"], cwd=two_commits).splitlines()
    assert "1.05" in lines[1] and len(left) == 1


def test_a_commit_that_is_not_there(two_commits):
    with pytest.raises(UserError, match="--base nothing"):
        kernels.bench_against(find_root(), "nothing")


def test_a_commit_whose_kernels_cannot_be_timed(two_commits):
    """Its own code says why; ours are then not timed."""
    shutil.rmtree(two_commits / "kept")
    subprocess.run(["git", *AUTHOR, "commit", "-qam", "second"], cwd=two_commits, check=True)
    with pytest.raises(RunError, match="--base HEAD"):
        kernels.bench_against(find_root(), "HEAD")
    assert not (two_commits / "results/speed").exists()


def test_documented_tables_are_of_committed_records():
    """results/speed.md: each generated block is what the records give; `repro report` writes them."""
    page = (ROOT / report.PAGE).read_text()
    for name, block, text in report.make_passages(Paths(ROOT)):
        assert f"<!-- {block} -->\n{text}\n<!-- /{block} -->" in page, block


def test_a_page_without_the_lines_of_a_block_is_named(tmp_path):
    (page := tmp_path / "page.md").write_text("a\n<!-- x -->\nold\n<!-- /x -->\nb\n")
    with pytest.raises(UserError, match="no lines <!-- y --> and <!-- /y -->"):
        replace_block(page, "y", "new")


@pytest.mark.parametrize("command", ["check", "bench", "forms"])
def test_another_checkouts_code_measures_nothing_here(tmp_path, monkeypatch, repro_cli, command):
    for name in ("params.yaml", "dvc.yaml", "kernels/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert "this code runs" in repro_cli.refuse("kernels", command)
