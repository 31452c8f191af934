"""`repro run` on a graph of shell commands, with DVC itself: what runs at once, what alone, what fails, what stops."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from repro.core.config import load_yaml
from repro.core.errors import RunError
from repro.core.paths import Paths, describe_missing_results
from repro.core.runtime import RUN_BEGAN, Runtime, load_runtime
from repro.graph import find_needs
from repro.pipeline import run_stages
from stages import Stage
from tests.conftest import ROOT
from tests.faults.lab import kill_all_in, list_processes_in
from tests.slow import slow


@pytest.fixture
def project(tmp_path, monkeypatch) -> Paths:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    # a run sets these for its stages; they are as before when a test ends
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv(RUN_BEGAN, "inf 1")
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc" / "config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    (tmp_path / "params.yaml").write_text("runtime: {device: cpu, threads: 4, data_roots: {}}\n")
    return Paths(tmp_path)


def write(paths: Paths, **stages: tuple[str, list[str]]) -> None:
    """Stages, each with its command, what it reads, and <name>.out as its output."""
    lines = ["stages:"]
    for name, (command, needs) in stages.items():
        files = f"deps: [{', '.join(f'{need}.out' for need in needs)}]", f"outs:\n      - {name}.out"
        lines += [f"  {name}:", f"    cmd: '{command}'", *(f"    {each}" for each in files)]
    (paths.root / "dvc.yaml").write_text("\n".join(lines) + "\n")


def run(paths: Paths, *, force: bool = False) -> None:
    run_stages(paths, {"alone": Stage(alone=True)}, load_runtime(paths), jobs=2, force=force)


def test_two_run_at_once_and_a_second_call_has_nothing_to_do(project, capfd):
    """Each waits until the other runs too."""
    meet = (
        "touch {name}.runs; for i in $(seq 600); do [ -e {other}.runs ] && break; sleep 0.1; done; "
        "[ -e {other}.runs ] && echo $OMP_NUM_THREADS > {name}.out && echo the end of {name}"
    )
    stages = {name: (meet.format(name=name, other=other), []) for name, other in ("ab", "ba")}
    write(project, **stages)
    run(project)
    assert (project.root / "a.out").read_text() == "2\n", "each has half of the four threads"
    assert set(load_yaml(project.root / "dvc.lock")["stages"]) == {"a", "b"}
    said, written = capfd.readouterr().out, (project.root / "b.out").stat().st_mtime_ns
    assert said.count(": done (") == 2 and "[2 of 2] " in said
    assert "the end of b" in (project.logs("run", "b") / "output.txt").read_text()
    run(project)
    assert capfd.readouterr().out.count(": done (") == 2 and (project.root / "b.out").stat().st_mtime_ns == written


def test_what_needs_a_failed_stage_does_not_run_and_the_others_do(project, capfd):
    """What a stage that a signal killed had said before is not taken for its error alone."""
    write(
        project,
        wrong=("echo repro: no such file >&2; exit 3", []),
        broken=("echo ValueError; exit 1", []),
        big=("echo repro: a warning; kill -9 $$", []),
        next=("echo 1 > next.out", ["wrong"]),
        after=("echo 1 > after.out", ["next"]),
        other=("echo 1 > other.out", []),
    )
    with pytest.raises(RunError) as caught:
        run(project)
    said, lines = str(caught.value), capfd.readouterr().out.splitlines()
    assert said.startswith("3 of 6 stages failed") and "2 did not run" in said
    for name, words in {
        "wrong": ("no such file", "exited with 3"),
        "broken": ("1",),
        "big": ("exited with -9",),
    }.items():
        (line,) = [line for line in lines if f"] {name}: " in line]
        assert all(word in line for word in words) and f".runs/logs/run/{name}/output.txt" in line
    assert (project.root / "other.out").is_file()
    assert not (project.root / "next.out").exists() and not (project.root / "after.out").exists()


@pytest.mark.parametrize(("mode", "living"), [slow("read", True), ("write", True), ("write", False)])
def test_the_lock_of_a_dead_process_is_passed_over_and_one_whose_number_another_has_is_named(project, living, mode):
    """The file that is named may be removed, and then it runs; a list of locks is DVC's, and nobody else edits it."""
    (dead := subprocess.Popen(["true"])).wait()
    write(project, one=("echo 1 > one.out", []))
    holder = {"pid": os.getppid() if living else dead.pid, "cmd": "dvc repro"}
    file, output = project.root / ".dvc" / "tmp" / "rwlock", str(project.root / "one.out")
    file.parent.mkdir()
    file.write_text(json.dumps({mode: {output: holder if mode == "write" else [holder]}}))
    if living:
        with pytest.raises(RunError) as caught:
            run(project)
        assert f"remove '{file}'" in str(caught.value) and "\n" not in str(caught.value)
        file.unlink()
    run(project)
    assert (project.root / "one.out").is_file()


class Played:
    """A process that ends after some looks, as `subprocess.Popen` seen by `run_stages`."""

    def __init__(self, looks: int, code: int):
        self.looks, self.code, self.returncode = looks, code, None

    def poll(self) -> int | None:
        self.looks -= 1
        self.returncode = self.code if self.looks <= 0 else None
        return self.returncode


@pytest.mark.parametrize("seed", range(12))
def test_in_any_graph_everything_runs_once_that_needs_no_failed_stage(project, monkeypatch, seed):
    """With needs done before, at most so many at once, the quiet ones alone; drawn graphs of eight stages."""
    chosen = random.Random(seed)
    names, jobs = [f"{'alone' if chosen.random() < 0.25 else 'stage'}@{number}" for number in range(8)], 1 + seed % 3
    needs = {
        name: tuple(other for other in names[:place] if chosen.random() < 0.25) for place, name in enumerate(names)
    }
    failing = {name for name in names if chosen.random() < 0.2}
    expected: set[str] = set()  # names are in an order in which they could run
    for name in names:
        if all(each in expected and each not in failing for each in needs[name]):
            expected.add(name)
    processes, threads = {}, {}

    def start(paths, name, environment, *, force):
        open_names = {other for other, process in processes.items() if process.returncode is None}
        assert name not in processes and len(open_names) < jobs
        assert not any(each.startswith("alone") for each in open_names | ({name} if open_names else set()))
        assert all(processes[each].returncode == 0 for each in needs[name])
        processes[name] = Played(chosen.randint(1, 4), int(name in failing))
        threads[name] = int(environment["OMP_NUM_THREADS"])
        return processes[name]

    monkeypatch.setattr("repro.pipeline.find_needs", lambda root: needs)
    monkeypatch.setattr("repro.pipeline._start", start)
    monkeypatch.setattr("repro.pipeline._find_error", lambda paths, name: "an error")
    monkeypatch.setattr("repro.pipeline.time.sleep", lambda seconds: None)
    runtime = Runtime(device="cpu", threads=6, data_roots={})
    failed = failing & expected
    try:
        run_stages(project, {"alone": Stage(alone=True)}, runtime, jobs=jobs, force=False)
        assert not failed
    except RunError as error:
        assert failed and f"{len(failed)} of 8" in str(error) and f"{8 - len(expected)} did not run" in str(error)
    assert set(processes) == expected
    assert threads == {name: 6 if name.startswith("alone") else 6 // jobs for name in expected}


def test_a_stopped_run_says_how_committed_results_come_back(project, capfd):
    """The stage fails after DVC has removed what it had made; the command that is named restores it, and nothing else."""
    write(project, one=("[ ! -e stop ] && echo 1 > results/one.txt", []))
    graph, (one, two) = project.root / "dvc.yaml", (project.results / f"{name}.txt" for name in ("one", "two"))
    graph.write_text(graph.read_text().replace("- one.out", "- results/one.txt: {cache: false}"))
    project.results.mkdir()
    two.write_text("2\n")
    run(project)
    for command in ("init -q", "add results", "-c user.name=a -c user.email=a@b commit -qm a"):
        subprocess.run(["git", *command.split()], cwd=project.root, check=True)
    two.write_text("edited\n")
    (project.root / "stop").touch()
    with pytest.raises(RunError):
        run(project, force=True)
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "git checkout" in line]
    assert not one.exists() and "results/one.txt" in line
    subprocess.run(line.partition(": ")[2], shell=True, cwd=project.root, check=True)
    assert one.read_text() == "1\n" and two.read_text() == "edited\n"
    assert describe_missing_results(project.root) is None


def test_the_longest_chain_comes_first(project):
    needs = {"short": [], "a": [], "b": ["a"], "c": ["b", "short"]}
    write(project, **{name: (f"echo 1 > {name}.out", needed) for name, needed in needs.items()})
    found = find_needs(project.root)
    assert list(found) == ["a", "short", "b", "c"] and {name: list(found[name]) for name in found} == needs


def test_a_graph_that_dvc_cannot_read_is_an_error_of_one_line(project):
    (project.root / "dvc.yaml").write_text("stages:\n  a: {cmd: echo, deps: 3}\n")
    with pytest.raises(RunError, match=r"^[^\n]*dvc\.yaml[^\n]*$"):
        find_needs(project.root)


def start_two_slow_stages(project) -> subprocess.Popen:
    """A run whose stages note a SIGINT and take their time to save; when it is returned both have begun."""
    slow = 'trap "sleep 0.5; touch {name}.saved; exit 130" INT; touch {name}.runs; while true; do sleep 0.1; done'
    write(project, left=(slow.format(name="left"), []), right=(slow.format(name="right"), []))
    program = (
        "from pathlib import Path; from repro.core.paths import Paths; from repro.core.runtime import Runtime; "
        "from repro.pipeline import run_stages; "
        f"run_stages(Paths(Path({str(project.root)!r})), {{}}, Runtime(device='cpu', data_roots={{}}), jobs=2, force=False)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=environment)
    while not all((project.root / f"{name}.runs").exists() for name in ("left", "right")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    return process


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no pidfd")
@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGKILL)])
def test_when_a_run_is_stopped_or_killed_its_stages_save_and_no_process_of_it_lives_on(project, number):
    process = start_two_slow_stages(project)
    assert len(list_processes_in(project.root)) >= 4
    process.send_signal(number)
    said = process.communicate(timeout=120)[1]
    assert ("Interrupted" in said) == (number == signal.SIGTERM)
    until = time.monotonic() + 20 * (number == signal.SIGKILL)  # a run that is stopped waits for its stages
    while (left := list_processes_in(project.root)) and time.monotonic() < until:
        time.sleep(0.05)
    kill_all_in(project.root)
    assert not left
    assert all((project.root / f"{name}.saved").exists() for name in ("left", "right"))


@pytest.mark.parametrize(("threads", "given", "expected"), [(4, "2", 2), (4, "8", 4), (4, None, 4), (None, "2", None)])
def test_the_threads_of_a_process_limit_those_of_the_parameters(project, monkeypatch, threads, given, expected):
    project.params.write_text(f"runtime: {{threads: {'null' if threads is None else threads}, data_roots: {{}}}}\n")
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert load_runtime(project) == Runtime(threads=expected, data_roots={})
