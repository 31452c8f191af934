"""`repro doctor`: a real run, made-up packages on the module path, and machines that this one is not."""

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from repro import doctor
from repro.core.paths import Paths
from tests.conftest import ROOT, run_python
from tests.slow import first
from tests.stages.helpers import edit

SECTIONS = (
    "machine|packages|name clashes|PyTorch and TTT-Linear|segmentation|parameters and data|disk and shared memory"
)


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


def run_doctor(*path: Path) -> subprocess.CompletedProcess:
    """The command in a process of its own, with these folders first on the module path; every section is there."""
    done = run_python("-m", "repro", "doctor", PYTHONPATH=os.pathsep.join(map(str, path)))
    headings = [text for text in done.stdout.splitlines()[:-1] if not text.startswith(" ")]
    assert headings == SECTIONS.split("|"), done.stderr
    return done


@pytest.fixture
def project(checkout) -> Paths:
    """A small checkout with the two files that say which packages are needed."""
    for name in ("pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, checkout / name)
    return Paths(checkout)


def test_the_command_reports_every_section_and_made_up_clashes(tmp_path):
    pretend(tmp_path, kernels="0.17.2", mmcv_full="1.7.2", timm="0.9.16", tqdm="4.0.0", onedl_mmcv="2.3.5")
    done = run_doctor(tmp_path)
    *lines, last = done.stdout.splitlines()
    marked = [text.split(maxsplit=1) for text in lines if text.startswith(" ")]
    assert {mark for mark, _ in marked} <= {"ok", "note", "warning", "error"}
    for mark, subject, *words in (
        ("warning", "kernels", "0.17.2", "pip uninstall kernels"),
        ("error", "mmcv-full", "1.7.2 has the import name of onedl-mmcv", "pip uninstall mmcv-full"),
        ("error", "timm", f"0.9.16, >=1.0.29 is needed: {doctor.INSTALL}"),
        ("warning", "requirements.lock", "tqdm 4.0.0 (pinned: ", "timm 0.9.16"),
        ("warning", "onedl-mmcv", "2.3.5, repro segment is tested with 2.3.6: "),
        ("ok", "TTT-Linear", "numba on cpu, not triton: q is on cpu"),
    ):
        text = next(rest for found, rest in marked if found == mark and rest.startswith(f"{subject}: "))
        assert all(word in text for word in words), text
    errors, warnings = (sum(mark == kind for mark, _ in marked) for kind in ("error", "warning"))
    assert last == f"{errors} errors, {warnings} warnings" and errors >= 2
    assert done.returncode == 1 and done.stderr == f"repro: doctor: {errors} errors; each is named above with its fix\n"


@pytest.mark.parametrize(
    "error", first(["ImportError('libcudart.so.13: cannot open')", "OSError('no space')", "RuntimeError('odd')"])
)
def test_it_reports_also_where_torch_is_broken(tmp_path, error):
    """Every section is there, and the import of torch is an error of one line."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"raise {error}\n")
    done = run_doctor(tmp_path, ROOT)
    (broken,) = [text for text in done.stdout.splitlines() if "torch and kernels: cannot be imported" in text]
    assert broken.lstrip().startswith("error") and error.split("'")[1] in broken
    assert done.returncode == 1 and done.stderr.startswith("repro: doctor: ") and done.stderr.count("\n") == 1


def test_a_healthy_machine_ends_with_zero(project, repro_cli, monkeypatch):
    params = project.params.read_text()
    absent = params[params.index("  imagenet:\n") : params.index("pretrain:\n")]
    project.params.write_text(params.replace(absent, ""))
    monkeypatch.setattr(doctor, "gpu_names", list)
    monkeypatch.setattr(doctor, "check_floors", lambda file: [])  # of whatever environment runs the tests
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
    lines = list(doctor.check_floors(project))
    expected = {"Python": "error", "made-up-old": "error", "made-up-new": "ok", "made-up-absent": "error"}
    assert {name: mark for mark, name, _ in lines} == {**expected, "made-up-extra": "error"}
    assert line(lines, "made-up-old")[1].startswith("1.2, >=1.10 is needed")  # as versions, not as text
    assert line(lines, "made-up-absent")[1].startswith("not installed, any version is needed")
    pins = "made-up-old==1.3\nmade-up-new==2.0\nmade-up-absent==1\nmade-up-other==1 ; sys_platform == 'none'\n"
    lock.write_text(f"# pins\n{pins}")
    differ, absent = (text for _, _, text in doctor.check_lock(lock))
    assert differ.startswith("1 of 3 packages differ: made-up-old 1.2 (pinned: 1.3): ")
    assert absent.startswith("1 of 3 packages are not installed: made-up-absent: ")
    lock.write_text("made-up-new==2.0\n")
    assert [mark for mark, _, _ in doctor.check_lock(lock)] == ["ok"]
    missing = [*doctor.check_floors(tmp_path / "none"), *doctor.check_lock(tmp_path / "none")]
    assert [mark for mark, _, _ in missing] == ["note", "note"]


def test_a_hidden_kernels_package_is_an_error(tmp_path):
    """Hugging Face's comes first on the path: the commands would import it."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    pretend(tmp_path, kernels="0.17.2")
    code = "from pathlib import Path; from repro import doctor; from repro.core.paths import Paths; print(*doctor.check_names(Paths(Path())))"
    said = run_python("-c", code, cwd=tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)])).stdout
    assert said.startswith("('error', 'kernels'") and "pip uninstall kernels" in said


def test_segmentation_is_pinned(tmp_path, monkeypatch):
    with monkeypatch.context() as bare:
        bare.setattr(doctor, "installed_version", lambda name: None)
        assert [mark for mark, _, text in doctor.check_mmseg() if "not installed" in text] == ["warning"] * 3
    monkeypatch.syspath_prepend(str(tmp_path))
    pretend(tmp_path, **{name.replace("-", "_"): pin for name, pin in doctor.MMSEG.items()})
    assert [mark for mark, _, _ in doctor.check_mmseg()] == ["ok", "ok", "ok"]


def test_data_and_parameters(project):
    """Among them `runtime.data_roots.<cell>`, which comes before the root of the cell's kind."""
    edit("digits: data/digits", "digits: data/digits, photos: data/mine")
    edit("prepare_data:\n", "prepare_data:\n  photos: {kind: folder}\n")
    lines, subject = doctor.examine(project)["parameters and data"], "runtime.data_roots.photos"
    assert line(lines, subject)[0] == "error" and "prepare_data.photos needs it" in line(lines, subject)[1]
    assert line(lines, "params.yaml") == ("note", "edited, equals no profile")
    assert line(lines, "runtime.data_roots.digits") == ("ok", "data/digits, used by prepare_data.digits")
    mark, text = line(lines, "runtime.data_roots.imagenet")
    assert mark == "error" and "does not exist" in text and "docs/data.md" in text
    shutil.rmtree(project.root / "data" / "digits")
    (project.root / "data" / "mine").mkdir()
    report = doctor.examine(project)
    assert line(report["parameters and data"], "runtime.data_roots.digits")[0] == "note"
    assert line(report["parameters and data"], subject) == ("ok", "data/mine, used by prepare_data.photos")
    assert line(report["disk and shared memory"], "disk of data root photos")[0] == "ok"
    shutil.copy(ROOT / "profiles" / "mini.yaml", project.params)
    assert line(doctor.examine(project)["parameters and data"], "params.yaml") == ("ok", "equals the mini profile")
    project.params.write_text("runtime: {device: tpu, data_roots: {}}\n")
    mark, text = line(doctor.examine(project)["parameters and data"], "params.yaml")
    assert mark == "error" and "runtime.device" in text and "profile use mini" in text


def test_little_disk_and_shared_memory(project, monkeypatch):
    usage = SimpleNamespace(total=64 * 2**20, free=3e9)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(doctor, "SHM", str(project.root))
    lines = doctor.examine(project)["disk and shared memory"]
    assert line(lines, "disk of project folder")[0] == line(lines, "disk of .runs")[0] == "warning"
    assert line(lines, "disk of data root digits")[0] == "ok"
    mark, text = line(lines, "disk of data root imagenet")
    assert mark == "warning" and text.startswith("3 GB free, 150 GB needed")
    assert line(lines, str(project.root)) == ("ok", "0.062 GiB, runtime.workers is 0")
    project.params.write_text(project.params.read_text().replace("workers: 0", "workers: 4"))
    mark, text = line(doctor.examine(project)["disk and shared memory"], str(project.root))
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
    report = doctor.examine(project)
    assert line(report["machine"], "GPU, driver") == ("ok", "NVIDIA Old, 470.0")
    lines = report["PyTorch and TTT-Linear"]
    mark, text = line(lines, "C compiler")
    assert mark == "error" and "install gcc, or set CC" in text
    assert [mark for mark, about, text in lines if about == "torch"] == ["ok", "warning"]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(kernels, "selected_backend", old_gpu)
    lines = doctor.examine(project)["PyTorch and TTT-Linear"]
    (cpu, gpu) = ((mark, text) for mark, about, text in lines if about == "TTT-Linear")
    assert cpu == ("ok", "torch on cpu, not triton: cpu is old") and gpu[0] == "warning"
    assert gpu[1].startswith("torch on cuda:0, not triton: cuda:0 is old: ")
