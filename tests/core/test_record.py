import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import llvmlite
import numba
import pytest

from repro.core import record as records
from repro.core.errors import RunError, UserError
from repro.core.hashing import hash_files
from repro.core.record import atomic, make_identity, read_json, read_record, write_json, write_record, write_text
from repro.data.settings import DigitsSettings
from tests.conftest import ROOT, run_python
from tests.imports import import_closure


def test_failure_keeps_the_old_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    with pytest.raises(KeyboardInterrupt), atomic(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="Out of range"):
        write_json(path, {"x": float("nan")})
    assert read_json(path) == {"x": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_atomic_makes_folders_and_ordinary_permissions(tmp_path):
    path = tmp_path / "new" / "folder" / "a.txt"
    write_text(path, "é")
    assert path.read_bytes() == "é".encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_full_disk_names_the_file_that_has_no_room(tmp_path):
    for error in (OSError(errno.ENOSPC, "full"), OSError(errno.ENOSPC, "full", "from", None, "to")):
        with pytest.raises(OSError, match="full") as failed, atomic(tmp_path / "a.txt"):
            raise error
        assert failed.value.filename == str(tmp_path / "a.txt")
    assert not os.listdir(tmp_path)


def leave_temporary(folder):
    """Write what `atomic` leaves when its process is killed."""
    with atomic(folder / "run.json") as temporary:
        pass
    temporary.write_text("half")
    return temporary


def test_what_a_killed_process_left_is_swept_and_nothing_else(tmp_path):
    (tmp_path / "below").mkdir()
    left, below = leave_temporary(tmp_path), leave_temporary(tmp_path / "below")
    others = [tmp_path / name for name in (".notes.tmp", ".a.12345678.txt", "a.12345678.tmp", "run.json")]
    for file in others:
        file.touch()
    records.sweep(tmp_path, tmp_path / "missing")
    assert not left.exists() and below.exists() and all(file.exists() for file in others)
    write_record(tmp_path / "below/metrics.json", {}, {}, 1.0)
    assert not below.exists()


def test_git_ignores_what_a_killed_process_left(tmp_path):
    name = f"results/pretrain/nano/{leave_temporary(tmp_path).name}"
    subprocess.run(["git", "check-ignore", "--no-index", "-q", name], cwd=ROOT, check=True)


def test_a_folder_that_cannot_be_written_is_noticed_and_another_left_as_it_is(tmp_path):
    records.require_writable(tmp_path / "a" / "b")
    assert not os.listdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=f"{tmp_path}/file: cannot be written"):
        records.require_writable(tmp_path / "file" / "b")


@pytest.mark.parametrize("scores", [(), ("n",)])
def test_a_record_comes_last(tmp_path, monkeypatch, scores):
    done, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: (done.append(Path(target).name), replace(source, target)))
    write_record(tmp_path / "metrics.json", {"n": 1}, {}, 1.0, scores=scores)
    assert done[-1] == "metrics.json" and "run.json" in done


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such file"), ("{", "not valid JSON"), ("", "not valid JSON")]
)
def test_bad_json_is_named(tmp_path, content, message):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=rf"a\.json: {message}"):
        read_json(path)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"top1_percent": None}, "'top1_percent' is null without a reason"),
        ({"rows": [{"a": {"b": None}}]}, "'b' is null without a reason"),
        ({"top1_percent": None, "top1_percent_reason": ""}, "without a reason"),
        ({"loss": float("nan")}, "nan is not a finite number"),
        ({"rows": [1.0, float("inf")]}, "inf is not a finite number"),
    ],
)
def test_records_refuse_missing_numbers_without_a_reason(tmp_path, metrics, message):
    with pytest.raises(ValueError, match=message):
        write_record(tmp_path / "cell/metrics.json", metrics, {}, 1.0)
    assert not list(tmp_path.rglob("*.json"))


def test_record_keeps_what_changes_from_run_to_run_apart(tmp_path):
    row = {"x": None, "reason": "out of memory"}
    metrics = {"top1_percent": None, "top1_percent_reason": "no GPU", "row": row, "n": 3}
    contents = []
    for seconds in (1.0, 2.0):
        write_record(tmp_path / "metrics.json", metrics, {"params": "abc"}, seconds)
        contents.append((tmp_path / "metrics.json").read_bytes())
        metrics = dict(reversed(metrics.items()))
        assert read_json(tmp_path / "run.json")["seconds"] == seconds
    assert contents[0] == contents[1]
    assert json.loads(contents[0]) == {"metrics": metrics, "identity": {"params": "abc"}}


def test_scores_lie_apart_from_everything_else_and_are_read_with_it(tmp_path):
    metrics = {"top1_percent": 90.5, "by_seed": [{"seed": 0}], "std": None, "std_reason": "one seed"}
    identity = {"params": "abc"}
    for folder, scores in (("split", ("top1_percent", "not_measured")), ("whole", ())):
        write_record(tmp_path / folder / "metrics.json", metrics, identity, 1.0, scores=scores)
        assert read_record(tmp_path / folder / "metrics.json") == {"metrics": metrics, "identity": identity}
    assert read_json(tmp_path / "split" / "metrics.json") == {"top1_percent": 90.5}
    assert read_json(tmp_path / "whole" / "metrics.json") == {"metrics": metrics, "identity": identity}


@pytest.mark.parametrize("name", ["metrics.json", "record.json"])
def test_half_a_record_that_is_damaged_is_named(tmp_path, name):
    write_record(tmp_path / "metrics.json", {"top1_percent": 90.5}, {}, 1.0, scores=["top1_percent"])
    write_json(tmp_path / name, [])
    with pytest.raises(UserError, match=rf"/{name}: not what a run wrote"):
        read_record(tmp_path / "metrics.json")


FORMS = [
    {},
    {"a": {}, "b": 1},
    [[1, 2.5, None], []],
    {"by_seed": [{"seed": 0, "top1_percent": 97.5}, {"seed": 1, "top1_percent": 98.0}]},
    {"curve": ["seed,epoch", "0,1"], "empty": [""]},
    {"text": 'a "quoted", [bracketed] {text}\n', "é": "²"},
]


@pytest.mark.parametrize("form", FORMS)
def test_a_record_is_sorted_json_with_a_line_for_what_holds_nothing_else(form):
    text = records.format_record(form)
    assert json.loads(text) == form
    # its tokens are those of Python's own writer, which may stand on fewer lines and never on more
    usual = json.dumps(form, indent=2, sort_keys=True)
    assert "".join(text.split()) == "".join(usual.split()) and text.count("\n") <= usual.count("\n")
    flat = form.get("by_seed", []) if isinstance(form, dict) else []
    assert all(json.dumps(run, sort_keys=True) in text for run in flat)


KNOWN = {
    "params_hash": "p",
    "data_manifest_hash": "d",
    "golden_hash": "g",
    "device": "cpu: X, 2 threads",
    "dtype": "fp32",
}
KNOWN |= {"backend": "torch", "parent_commit": "old", "command": "repro pretrain"}


# what changes from run to run
OF_A_RUN = {"parent_commit": "new", "command": "repro run", "device": "cpu: X, 1 thread", "versions": {"torch": "3"}}


@pytest.mark.parametrize("scores", [(), ("n",)])
@pytest.mark.parametrize(
    ("metrics", "identity", "curve", "is_kept"),
    [
        ({}, {}, ["a"], True),
        ({}, OF_A_RUN, ["a"], True),
        ({"n": 2}, {}, ["a"], False),
        ({"m": 1}, {}, ["a"], False),
        ({}, {"params_hash": "q"}, ["a"], False),
        ({}, {"data_manifest_hash": "e"}, ["a"], False),
        ({}, {"golden_hash": "h"}, ["a"], False),
        ({}, {"device": "cpu: Y, 2 threads"}, ["a"], False),
        ({}, {"dtype": "bf16"}, ["a"], False),
        ({}, {}, ["b"], True),  # the same weights and scores, of which a record keeps another part of the curve
    ],
)
def test_a_run_that_finds_the_same_leaves_the_record_byte_for_byte(tmp_path, scores, metrics, identity, curve, is_kept):
    file = tmp_path / "metrics.json"
    write_record(file, {"n": 1, "top": (0.1, 0.2)}, KNOWN, 1.0, scores=scores, curve=["a"])
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir() if each.name != "run.json"}
    write_record(file, {"n": 1, "top": (0.1, 0.2), **metrics}, {**KNOWN, **identity}, 2.0, scores=scores, curve=curve)
    after = {each.name: each.read_bytes() for each in tmp_path.iterdir() if each.name != "run.json"}
    assert (before == after) == is_kept and read_json(tmp_path / "run.json")["seconds"] == 2.0
    assert is_kept or read_record(file)["identity"] == {**KNOWN, **identity}


FILES = {
    "repro/__init__.py": "",
    "repro/core/__init__.py": "from .paths import find",
    "repro/core/paths.py": "import os",
    "repro/data/__init__.py": "",
    "repro/data/loader.py": "from ..core import paths\nfrom . import sibling\nimport torch",
    "repro/data/sibling.py": "def f():\n    from .late import g  # imported when called",
    "repro/data/late.py": "from ..models.vim import Vim",
    "repro/data/other.py": "",
    "repro/models/__init__.py": "",
    "repro/models/vim.py": "import kernels.scan.op",
    "kernels/__init__.py": "",
    "kernels/scan/__init__.py": "",
    "kernels/scan/op.py": "from .reference import scan as reference_scan",
    "kernels/scan/reference.py": "import numpy.linalg",
    "stages/__init__.py": "",
    "stages/train.py": "from repro.data.loader import Loader",
    "stages/report.py": "import repro.core.paths as p",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_import_closure_by_hand(checkout):
    core = ["repro/__init__.py", "repro/core/__init__.py", "repro/core/paths.py"]
    assert import_closure(checkout, ["stages.report"]) == sorted([*core, "stages/__init__.py", "stages/report.py"])
    not_reached = {"repro/data/other.py", "stages/report.py"}
    assert import_closure(checkout, ["stages.train"]) == sorted(FILES.keys() - not_reached)


def test_hash_of_files_follows_names_and_contents(checkout):
    before = hash_files(checkout, FILES)
    assert hash_files(checkout, reversed(FILES)) == before
    (checkout / "repro/core/paths.py").write_text("import os  # changed")
    assert hash_files(checkout, FILES) != before


def test_identity_holds_what_explains_a_number(checkout):
    def identity(**changes):
        values = {"data_manifest": manifest, "device": "cpu", "dtype": "fp32", "backend": "torch", **changes}
        return make_identity(checkout, DigitsSettings(), **values)

    manifest = checkout / "manifest.json"
    manifest.write_text("{}")
    base = identity()
    keys = "command parent_commit params_hash data_manifest_hash device machine dtype backend versions"
    assert set(base) - {"command_reason"} == set(keys.split())
    assert base["parent_commit"] is None, "this checkout is no Git repository"
    assert base["versions"]["python"] == sys.version.split()[0]
    assert base["versions"]["numba"] == numba.__version__ and base["versions"]["llvmlite"] == llvmlite.__version__
    assert identity() == base
    manifest.write_text("{ }")
    assert identity()["data_manifest_hash"] != base["data_manifest_hash"]
    assert identity(data_manifest=None)["data_manifest_hash"] is None


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/usr/bin/repro", "pretrain", "--cell", "nano"], "repro pretrain --cell nano"),
        (["/here/repro/__main__.py", "--debug", "efficiency"], "repro --debug efficiency"),
        (["repro", "evaluate", "--weights", "/here/.runs/w.pth"], "repro evaluate --weights .runs/w.pth"),
        (["repro", "evaluate", "--data", "folder:/elsewhere/me/pets"], "repro evaluate --data folder:.../pets"),
        (["repro", "evaluate", "--data", "folder:/here/data/pets"], "repro evaluate --data folder:data/pets"),
        (["repro", "evaluate", "--weights", "../me/w.pth"], "repro evaluate --weights .../w.pth"),
        (["repro", "evaluate", "--weights", "runs/../../me/w.pth"], "repro evaluate --weights .../w.pth"),
        (["repro", "evaluate", "--data=folder:data/../../me/pets"], "repro evaluate --data=folder:.../pets"),
        (["repro", "explain", "-o/elsewhere/me/a.png"], "repro explain -o.../a.png"),
        (["repro", "evaluate", "--data", "folder:./pets"], "repro evaluate --data folder:./pets"),
        (["repro", "explain", "--probe", "steps=2"], "repro explain --probe steps=2"),
        (["/usr/bin/pytest", "-q"], None),
        (["/elsewhere/other/__main__.py"], None),
    ],
)
def test_the_command_as_a_user_types_it(argv, command):
    assert records.find_command(Path("/here"), argv) == command


@pytest.mark.parametrize(
    ("name", "content", "is_checkout"),
    [
        *((name, "code", True) for name in ("repro", "kernels", "stages")),
        ("repro", "code", False),
        ("repro", "link", True),
        ("repro", "nothing", True),
    ],
)
def test_a_record_names_the_code_that_runs(tmp_path, name, content, is_checkout):
    """That of another checkout is refused; a link to the code that runs, and a folder without any, are fine."""
    if content == "code":
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    elif content == "link":
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "dvc.yaml" if is_checkout else tmp_path / "other").touch()
    about = {"device": "cpu", "dtype": "fp32", "backend": "none"}
    if is_checkout and content == "code":
        with pytest.raises(UserError, match=f"{ROOT / name}.*{tmp_path}"):
            make_identity(tmp_path, DigitsSettings(), **about)
    else:
        assert make_identity(tmp_path, DigitsSettings(), **about)["parent_commit"] is None


VERBS = "ablate golden complexity detect environment evaluate explain generate linearize prepare-data pretrain report run segment tune"


def test_a_verb_that_records_is_refused_before_it_works_with_other_code(tmp_path, monkeypatch, repro_cli):
    (tmp_path / "repro").mkdir()
    for file in ("repro/__init__.py", "dvc.yaml", "params.yaml"):
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    needed = {"evaluate": ["--data", "digits"]}
    for verb in VERBS.split():
        assert str(tmp_path) in repro_cli.refuse(verb, *needed.get(verb, []))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["dvc.yaml", "params.yaml", "repro"]


@pytest.mark.parametrize("name", ["x" * 250 + ".json", "😀" * 63])
def test_a_file_of_the_longest_name_is_written_whole(tmp_path, name):
    records.write_text(tmp_path / name, "text")
    assert [file.name for file in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "text"


def test_a_process_notes_its_own_command_and_needs_no_torch(checkout):
    """`python -m repro` is `repro`; here the identity is made by a stage of its own, which does not import torch."""
    code = (
        "import sys, json; from pathlib import Path; from repro.core.record import make_identity; from repro.data.settings import DigitsSettings;"
        "sys.argv = ['/x/repro/__main__.py', 'toy', '--cell', 'a'];"
        f"made = make_identity(Path({str(checkout)!r}), DigitsSettings(), device='cpu', dtype='uint8', backend='none');"
        "print(json.dumps([made, 'torch' in sys.modules]))"
    )
    identity, has_torch = json.loads(run_python("-c", code).stdout)
    assert identity["command"] == "repro toy --cell a" and "command_reason" not in identity
    assert not has_torch
    machine = identity["machine"]
    assert machine["vector"] is machine["blas"] is machine["threads"] is None
    assert machine["blas_reason"] == "made without PyTorch"
