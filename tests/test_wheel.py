"""The built wheel, installed beside the packages of this environment and used from an empty folder."""

import os
import shutil
import subprocess
import sysconfig

import pytest

from tests.conftest import ROOT, run_python

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
    offline = "-m pip --disable-pip-version-check"
    build = "wheel --no-build-isolation --wheel-dir"
    for command, where, what in ((build, base, "source"), ("install --target", installed, "*.whl")):
        (given,) = base.glob(what)
        done = run_python(*f"{offline} {command}".split(), str(where), "--no-deps", "--no-index", str(given))
        assert done.returncode == 0, done.stderr

    def run(*arguments: str) -> subprocess.CompletedProcess:
        # the wheel first: an environment where the project is installed from its checkout has it as well
        path = os.pathsep.join([str(installed), sysconfig.get_paths()["purelib"]])
        return run_python("-S", *arguments, cwd=empty, PYTHONPATH=path)

    run.installed = installed
    return run


def test_it_has_every_file_that_the_code_reads(run):
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.*")]
    expected = {file.relative_to(ROOT) for file in files if file.suffix in (".yaml", ".html", ".py")}
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


def test_its_command_line_lists_the_verbs(run):
    done = run("-m", "repro", "--help")
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in ("predict", "prepare-data"))
