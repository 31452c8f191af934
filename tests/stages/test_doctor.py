"""`repro doctor`: a real run, made-up packages on the module path, and machines that this one is not."""

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from repro import doctor
from repro.core.paths import Paths
from repro.core.runtime import load_runtime
from tests.conftest import ROOT, run_python
from tests.slow import first
from tests.stages.helpers import edit


def pretend(folder: Path, **versions: str) -> None:
    """Distributions that consist of metadata alone, as importlib.metadata finds them."""
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def line(lines, subject: str) -> tuple[str, str]:
    """(mark, text) of the one line about `subject`."""
    ((mark, text),) = [(mark, text) for mark, about, text in lines if about == subject]
    return mark, text


def check_subjects(out: str) -> None:
    """Every subject is there."""
    for subject in ("machine", "Python", "Git", "weights", "params.yaml", "GPU, driver", "disk"):
        assert f" {subject}: " in out


@pytest.fixture
def project(checkout) -> Paths:
    """A small checkout with the two files that say which packages are needed."""
    for name in ("pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, checkout / name)
    return Paths(checkout)


CLASHES = ("kernels", "mmsegmentation", "mmcv", "mmcv-full", "mmcv-lite", "mmengine", "mmengine-lite")


def test_the_command_reports_every_subject_and_made_up_clashes(tmp_path, monkeypatch, repro_cli):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(tmp_path))
    pretend(tmp_path, tqdm="4.0.0")
    pretend(tmp_path, **{name.replace("-", "_"): "0.17.2" for name in CLASHES})
    code, out, err = repro_cli("doctor")
    check_subjects(out)
    *lines, last = out.splitlines()
    marked = [text.split(maxsplit=1) for text in lines]
    assert {mark for mark, _ in marked} <= {"ok", "note", "warning", "error"}
    for mark, subject, *words in (
        *(("error", name, "0.17.2", f"pip uninstall {name}") for name in CLASHES),
        ("error", "mmcv-full", "onedl-mmcv"),
        ("warning", "requirements.lock", "tqdm 4.0.0 (pinned: "),
        ("ok", "TTT-Linear", "numba on cpu"),
    ):
        text = next(rest for found, rest in marked if found == mark and rest.startswith(f"{subject}: "))
        assert all(word in text for word in words), text
    errors, warnings = (sum(mark == kind for mark, _ in marked) for kind in ("error", "warning"))
    assert last.startswith(f"{errors} errors, {warnings} warning") and errors >= 2
    assert code == 1 and err == f"repro: doctor: {errors} errors; each is named above with its fix\n"


@pytest.mark.parametrize(
    "error", first(["ImportError('libcudart.so.13: cannot open')", "OSError('no space')", "RuntimeError('odd')"])
)
def test_it_reports_also_where_torch_is_broken(tmp_path, error):
    """The rest is there, and the import of torch is an error of one line."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"raise {error}\n")
    done = run_python("-m", "repro", "doctor", PYTHONPATH=os.pathsep.join(map(str, (tmp_path, ROOT))))
    check_subjects(done.stdout)
    (broken,) = [text for text in done.stdout.splitlines() if "torch and kernels: cannot be imported" in text]
    assert broken.lstrip().startswith("error") and error.split("'")[1] in broken
    assert done.returncode == 1 and done.stderr.startswith("repro: doctor: ") and done.stderr.count("\n") == 1


def test_a_healthy_machine_ends_with_zero(project, repro_cli, monkeypatch):
    params = project.params.read_text()
    absent = params[params.index("  imagenet:\n") : params.index("pretrain:\n")]
    project.params.write_text(params.replace(absent, ""))
    monkeypatch.setattr(doctor, "gpu_names", list)
    monkeypatch.setattr(doctor, "check_packages", lambda root: [])  # of whatever environment runs the tests
    Path(".dvc").mkdir(exist_ok=True)
    out = repro_cli.run("doctor", silent=True)
    assert out.splitlines()[-1].startswith("0 errors, ")


def test_needed_packages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    pretend(tmp_path / "site", made_up_old="1.2", made_up_new="2.0+cu130", made_up_extra="0.5")
    project, lock = tmp_path / "pyproject.toml", tmp_path / "requirements.lock"
    project.write_text(
        '[project]\nrequires-python = ">=99"\n'
        'dependencies = ["made-up-old>=1.10", "made-up-new>=2", "made-up-absent", "made-up-other; sys_platform == \'none\'"]\n'
        'optional-dependencies = {bench = ["made-up-extra>=0.6", "made-up-unused>=3"]}\n'
    )
    pins = "made-up-old==1.3\nmade-up-new==2.0\nmade-up-absent==1\nmade-up-other==1 ; sys_platform == 'none'\n"
    lock.write_text(f"# pins\n{pins}")
    lines = list(doctor.check_packages(tmp_path))
    expected = {"Python": "error", "made-up-old": "error", "made-up-absent": "error", "made-up-extra": "error"}
    assert {name: mark for mark, name, _ in lines} == expected | {lock.name: "warning"}
    assert line(lines, "made-up-old")[1].startswith("1.2, >=1.10 is needed")  # as versions, not as text
    assert line(lines, "made-up-absent")[1].startswith("not installed, any version is needed")
    differ = line(lines, lock.name)[1]
    assert differ.startswith("2 of 3 packages differ: made-up-old 1.2 (pinned: 1.3), made-up-absent not installed ")
    lock.write_text("made-up-new==2.0\n")
    assert line(doctor.check_packages(tmp_path), lock.name)[0] == "ok"
    assert [mark for mark, _, _ in doctor.check_packages(tmp_path / "none")] == ["note"]


def test_a_hidden_kernels_package_is_a_warning(tmp_path, monkeypatch):
    """Hugging Face's comes first on the path: the commands would import it."""
    other = SimpleNamespace(origin=str(tmp_path / "kernels" / "__init__.py"))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", {"kernels": other}.get)
    mark, text = line(doctor.check_checkout(ROOT), "kernels")
    assert mark == "warning" and f"the code that runs is {tmp_path}/kernels" in text


STATES = {  # what is changed in params.yaml and removed from data/ -> the cell, its mark, and words of its line
    "not written yet": ({}, "digits", "digits", "note", "prepare-data"),
    "not there": ({}, None, "imagenet", "error", "docs/data.md says, 150 GB"),
    "an empty root": (
        {"digits: data/digits": "digits: data/digits, photos: absent"},
        None,
        "photos",
        "error",
        "absent does not",
    ),
    "a folder that `tune` is cut from": (
        {
            "digits: data/digits": "digits: data/digits, photos: absent",
            "{kind: folder}": "{kind: folder, tune_split: {}}",
        },
        None,
        "photos",
        "error",
        "absent does not",
    ),
    "a root of the kind": ({"digits: data/digits": "digits: data/digits, folder: data"}, None, "photos", "ok", "data"),
    "no root of either": ({}, None, "photos", "error", "photos nor folder"),
    "its own folder first": (
        {"digits: data/digits": "photos: data, folder: absent, digits: x"},
        None,
        "photos",
        "ok",
        "data",
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_data_is_here_or_the_line_says_how_to_get_it(project, state):
    changes, removed, cell, mark, words = STATES[state]
    edit("prepare_data:\n", "prepare_data:\n  photos: {kind: folder}\n")
    for before, after in changes.items():
        edit(before, after)
    if removed:
        shutil.rmtree(project.root / "data" / removed)
    found, text = line(doctor._check_data(project, load_runtime(project)), f"prepare_data.{cell}")
    assert found == mark and words in text and "\n" not in text


def test_parameters(project):
    assert line(doctor.examine(project), "params.yaml") == ("note", "edited, equals no profile")
    shutil.copy(ROOT / "profiles" / "mini.yaml", project.params)
    assert line(doctor.examine(project), "params.yaml") == ("ok", "profile mini")
    for wrong in (
        "runtime: {device: tpu, data_roots: {}}\n",
        "runtime: {data_roots: {}}\nprepare_data: {a: {odd: 1}}\n",
    ):
        project.params.write_text(wrong)
        *_, (mark, text) = [(mark, text) for mark, about, text in doctor.examine(project) if about == "params.yaml"]
        assert mark == "error" and ("runtime.device" in text or "odd" in text) and "profile use mini" in text


def test_git_dvc_and_weights(project):
    """A checkout that Git does not know has neither a commit nor, as yet, a folder of DVC's or weights."""
    shutil.rmtree(project.root / ".dvc", ignore_errors=True)
    lines = list(doctor.check_checkout(project.root))
    assert [line(lines, name)[0] for name in ("Git", "DVC", "weights")] == ["note", "error", "note"]
    for command in ("init -q", "add params.yaml", "-c user.name=a -c user.email=b commit -qm c"):
        subprocess.run(["git", *command.split()], cwd=project.root, check=True)
    for folder in (".dvc", "artifacts/pretrain/nano"):
        (project.root / folder).mkdir(parents=True)
    (project.root / "artifacts/pretrain/nano/weights.safetensors").touch()
    lines = list(doctor.check_checkout(project.root))
    assert line(lines, "Git")[0] == "ok" and line(lines, "weights") == ("ok", "of 1 cells")
    assert "DVC" not in [about for _, about, _ in lines]


def test_little_disk_and_shared_memory(project, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(total=64 * 2**20, free=3e9))
    monkeypatch.setattr(doctor, "SHM", str(project.root))
    lines = list(doctor.examine(project))
    assert line(lines, "disk")[0] == "warning" and str(project.root) not in [about for _, about, _ in lines]
    project.params.write_text(project.params.read_text().replace("workers: 0", "workers: 4"))
    mark, text = line(doctor.examine(project), str(project.root))
    assert mark == "warning" and "--shm-size" in text


def test_a_gpu_that_cannot_be_used(project, monkeypatch):
    import torch

    import kernels

    def old_gpu(backend, device, **asked):
        if backend == "triton":
            raise ValueError(f"backend 'triton': {device} is old; use auto, torch or reference")
        return "torch"

    monkeypatch.setattr(doctor, "gpu_names", lambda: ["NVIDIA Old, 470.0"])
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    lines = list(doctor.examine(project))
    assert line(lines, "GPU, driver") == ("ok", "NVIDIA Old, 470.0")
    mark, text = line(lines, "C compiler")
    assert mark == "error" and "install gcc, or set CC" in text
    assert [mark for mark, about, text in lines if about == "torch"] == ["ok", "warning"]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(kernels, "selected_backend", old_gpu)
    lines = list(doctor.examine(project))
    (cpu, gpu) = ((mark, text) for mark, about, text in lines if about == "TTT-Linear")
    assert cpu == ("ok", "torch on cpu") and gpu[0] == "warning" and gpu[1].startswith("torch on cuda:0, slower ")
