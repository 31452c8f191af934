"""The built wheel, installed beside the packages of this environment and used from an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("repro", "kernels", "stages")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Build and install the wheel; return what runs Python with it in an empty folder."""
    base = tmp_path_factory.mktemp("wheel")
    source, installed, empty = base / "source", base / "installed", base / "empty"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    empty.mkdir()
    offline = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [
        *offline,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(base),
        str(source),
    ]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = base.glob("*.whl")
    subprocess.run(
        [*offline, "install", "--no-deps", "--no-index", "--target", str(installed), str(wheel)],
        check=True,
        timeout=300,
    )

    def run(*arguments: str) -> subprocess.CompletedProcess:
        # the wheel first: an environment where the project is installed from its checkout has it as well
        path = os.pathsep.join([str(installed), sysconfig.get_paths()["purelib"]])
        command = [sys.executable, "-S", *arguments]
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=300)

    run.installed = installed
    return run


def test_it_has_every_file_that_the_code_reads(run):
    expected = {
        file.relative_to(ROOT)
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.*")
        if file.suffix in (".yaml", ".html", ".py")
    }
    assert {file for file in expected if not (run.installed / file).is_file()} == set()


def test_timm_builds_its_models(run):
    code = "import repro.models, timm, torch; print(timm.create_model('vittt_nano_patch16_144')(torch.ones(1, 3, 144, 144)).isfinite().all())"
    done = run("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "tensor(True)"), done.stderr


def test_every_ledger_is_read(run):
    code = "import repro.papers as p; print(p.__file__, all(len(each.ledger.entries) for each in p.load_papers().values()))"
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(run.installed / "repro" / "papers" / "__init__.py"), "True"]


def test_a_report_of_nothing_is_refused_in_one_line(run):
    done = run("-m", "repro", "report")
    assert done.returncode and len(done.stderr.strip().splitlines()) == 1, done.stderr
