"""`repro measure`: its steps run apart, stop in time, are continued, outlive one that breaks; a CPU's records."""

import dataclasses
import importlib
import os
import shutil
import signal
from functools import partial

import pytest
import torch

from repro.bench import campaign
from repro.bench.campaign import CAMPAIGN, CampaignStep, run_campaign
from repro.bench.params import SweepParams
from repro.core.errors import RunError, UserError
from repro.core.paths import Paths
from repro.core.record import read_json, write_json
from repro.runs import cells
from repro.runs.job import build_job
from tests.conftest import ROOT, run_python


def act(name, paths, minutes, began):
    """The work of a step: what its name says. It notes its name and since when rows count."""
    match name:
        case "refuse":
            raise UserError("there is no such thing")
        case "break down":
            raise ZeroDivisionError("division by zero")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "miss a package":
            importlib.import_module("package_of_nobody")
    with open(paths.root / "steps.txt", "a") as file:
        file.write(f"{name},{began}\n")
    return name != "run out of time"


def read_steps(root):
    """The names of the steps that were taken, and since when rows counted for each."""
    return tuple(zip(*(line.split(",") for line in (root / "steps.txt").read_text().splitlines()), strict=True))


def make_steps(*names):
    return tuple(CampaignStep(name, "a test", partial(act, name)) for name in names)


@pytest.fixture
def here(monkeypatch):
    """Steps run in this process, which spares each the start of another; but for one that dies."""
    apart = campaign._run_apart

    def run(step, *given):
        return apart(step, *given) if step.name == "die" else campaign._run(*given, step)[0]

    monkeypatch.setattr(campaign, "_run_apart", run)


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_a_broken_step_costs_itself_alone(tmp_path, capfd):
    """A refusal, an error and a killed process; the step after them runs, and the end says which failed."""
    said = r"3 of 4 steps failed: refuse: there is no such thing; break down: ZeroDivisionError: .*; die: its"
    with pytest.raises(RunError, match=said):
        run_campaign(Paths(tmp_path), steps=make_steps("refuse", "break down", "die", "succeed"))
    assert read_steps(tmp_path)[0] == ("succeed",)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.usefixtures("here")
def test_a_step_that_is_complete_is_not_taken_again_until_all_are(tmp_path, monkeypatch):
    """The second of three runs out of time once; then all is done, and the next call begins anew.

    Rows of both calls of the first count since the same time.
    """
    monkeypatch.setattr(campaign, "SHORTEST_S", 0.0)
    assert not run_campaign(Paths(tmp_path), steps=make_steps("first", "run out of time", "third"))
    steps = make_steps("first", "second", "third")
    assert run_campaign(Paths(tmp_path), steps=steps) and run_campaign(Paths(tmp_path), steps=steps)
    names, began = read_steps(tmp_path)
    assert names == ("first", "run out of time", "third", "second", "first", "second", "third")
    assert len(set(began[:4])) == 1


@pytest.mark.usefixtures("here")
def test_another_device_on_the_same_checkout_takes_all_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "SHORTEST_S", 0.0)
    for device in ("nvidia_a", "nvidia_b", "nvidia_a"):
        monkeypatch.setattr(campaign, "device_slug", lambda _, device=device: device)
        assert not run_campaign(Paths(tmp_path), steps=make_steps("first", "run out of time"))
    assert read_steps(tmp_path)[0] == (*2 * ("first", "run out of time"), "run out of time")


@pytest.mark.slow
def test_a_step_without_its_package_is_named_and_no_failure(tmp_path, capsys):
    assert run_campaign(Paths(tmp_path), steps=make_steps("miss a package"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("done") and "miss a package" in last and "package_of_nobody" in last


def test_the_first_steps_answer_what_the_paper_claims():
    """Vittt and DeiT are raced, eagerly and by graphs, and DeiT is compiled, before all else but a probe and checks."""
    names = [each.name for each in CAMPAIGN]
    assert names[2:5] == ["check of TTT-Linear", "first checks", "1280², batch 64"] and len(names) == len(set(names))
    plans = [SweepParams(**each.run.keywords).with_defaults("cuda").plan("cuda") for each in CAMPAIGN[4:14]]
    found = [{(row.model, row.attention, row.compile) for block in plan for row in block} for plan in plans]
    vittt, deit = "vittt_tiny_patch16_224", "deit_tiny_patch16_224"
    three = [{(vittt, None, how), (deit, "fused", how), (deit, "unfused", how)} for how in (False, "graphs")]
    assert found == [*4 * three, *2 * [{(deit, "fused", True)}]]


def test_no_step_takes_the_time_of_all_others(tmp_path, monkeypatch):
    """Each has its own limit where the call has one, or what is left of the call."""
    given = []
    monkeypatch.setattr(campaign, "_run_apart", lambda step, paths, minutes, began: given.append(minutes) or True)
    steps = [CampaignStep(str(limit), "", run_campaign, limit) for limit in (0.5, 100.0)]
    run_campaign(Paths(tmp_path), 2.0, steps=steps)
    first, second = given
    assert first == 0.5 and 1.0 < second <= 2.0
    run_campaign(Paths(tmp_path), None, steps=steps)
    assert given[2:] == [None, None]


@pytest.mark.usefixtures("here")
def test_it_says_what_is_left(tmp_path, capsys, monkeypatch):
    """A step that runs out of time, and then no time for the next."""
    monkeypatch.setattr(campaign, "SHORTEST_S", 0.0)
    assert not run_campaign(Paths(tmp_path), 1.0, make_steps("run out of time", "succeed"))
    assert "call again for: run out of time\n" in capsys.readouterr().out
    monkeypatch.setattr(campaign, "SHORTEST_S", 3600.0)
    assert not run_campaign(Paths(tmp_path), 1.0, make_steps("another", "run out of time"))
    assert "call again for: another; run out of time\n" in capsys.readouterr().out
    assert read_steps(tmp_path)[0] == ("run out of time", "succeed")
    assert run_campaign(Paths(tmp_path), None, make_steps("another"))
    assert "done: every record is complete" in capsys.readouterr().out


@pytest.fixture
def checkout(bare_checkout):
    return Paths(bare_checkout)


@pytest.mark.usefixtures("here")
def test_without_a_gpu_each_step_that_needs_one_says_so(checkout):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    chosen = tuple(step for step in CAMPAIGN if step.name in ("environment", "check", "compared", "training"))
    with pytest.raises(RunError, match="3 of 4 steps failed") as error:
        run_campaign(checkout, steps=chosen)
    assert str(error.value).count("CUDA device") == 3
    (file,) = checkout.results.glob("replications/*/environment.json")
    metrics = read_json(file)["metrics"]
    assert metrics["backend"] == "numba" and metrics["machine"]


def test_a_training_is_timed(checkout, monkeypatch):
    """What would be trained on an H200 is built here, without it."""
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")

    def train(chosen):
        asked.extend(chosen)
        write_json(chosen[0].record, {})

    monkeypatch.setattr(cells, "train_cells", train)
    assert not campaign.time_training(checkout, 1.9, "") and not asked
    assert campaign.time_training(checkout, None, "")
    (cell,) = asked
    assert not cell.record.exists(), "its speed alone is kept"
    assert (cell.runtime.peak_tflops, len(cell.params.seeds)) == (989.4, 2)
    assert cell.runtime.data_roots == {"digits": "data/digits"}
    digits = "prepare_data/digits"
    shutil.copytree(Paths(ROOT).results / digits, checkout.results / digits)
    job = build_job(dataclasses.replace(cell, runtime=dataclasses.replace(cell.runtime, device="cpu", workers=0)), 0)
    assert len(job.task.train) == 64 and job.precision == "bf16"
    job.close()


def test_the_page_says_what_is_measured_of_a_gpu_and_that_nothing_is(checkout):
    """Records of a CPU are not shown; what a GPU's say stands in a line each."""
    (page, marker, text), _ = campaign.make_passages(checkout)
    assert (page, marker) == ("results/speed.md", "gpu records") and "No GPU is measured" in text
    identity = {"device": "cuda: NVIDIA H200", "parent_commit": "0123456789"}
    measured = {"metrics": {}, "identity": identity | {"device": "cpu: X, 1 thread"}}
    write_json(checkout.replications("cpu_x") / "environment.json", measured)
    metrics = {"model": "vittt_tiny_patch16_224", "throughput_img_per_s": 2345.6, "data_wait_percent": 3.0}
    for device, share in (("nvidia_h200", {"mfu_percent": 2.1}), ("nvidia_k80", {})):
        file = checkout.replications(device) / f"{campaign.TRAINED}.json"
        write_json(file, {"metrics": metrics | share, "identity": identity})
    (_, _, text), _ = campaign.make_passages(checkout)
    first, second = text.splitlines()[2:]
    words = (f"`{campaign.TRAINED}.json`", "2346 img/s", "2 % of the peak", "01234567")
    assert all(word in first for word in words)
    assert "2346 img/s" in second and "not in our table" in second
    lacking = metrics | {"data_wait_percent": None, "data_wait_percent_reason": "one step"}
    write_json(file, {"metrics": lacking, "identity": identity})
    assert "2346 img/s, data_wait_percent null: one step, " in campaign.make_passages(checkout)[0][2]


# typer of the lock file imports pydantic itself, and older ones do not: it is our code that may not
_LACKING = """
import builtins, sys

real = builtins.__import__

def find(name, globals=None, *more, **how):
    ours = (globals or {}).get("__name__", "").partition(".")[0] in ("kernels", "repro", "stages")
    if ours and name.partition(".")[0] in ("annotated_types", "pydantic", "pydantic_core"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return real(name, globals, *more, **how)

builtins.__import__ = find
sys.modules.update(dict.fromkeys("dvc mmcv mmengine mmseg".split()))
"""


@pytest.fixture
def bare_machine(bare_checkout):
    """A checkout whose params.yaml cannot be read, where our code finds none of what a GPU's machine may lack."""
    (bare_checkout / "sitecustomize.py").write_text(_LACKING)
    (bare_checkout / "params.yaml").write_text("runtime: [\n")
    return bare_checkout


_IMPORT_ALL = """
import importlib, pkgutil, kernels, repro.bench, repro.models
for package in (kernels, repro.bench, repro.models):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print("all")
"""


_MEASURE = """
import sys
from repro.bench.speed import RowSpec, measure
from repro.__main__ import main

print(measure(RowSpec(model="vittt_nano_patch16_144", image_size=(32, 32), backend="torch", threads=1))["status"])
for arguments, params in (("measure --help", "runtime: ["), ("prepare-data", "runtime: {data_roots: {}}")):
    sys.argv = ["repro", *arguments.split()]
    open("params.yaml", "w").write(params)
    try:
        main()
    except SystemExit as ended:
        print(arguments, ended.code)
"""


def test_pydantic_dvc_mmseg_and_params_are_not_needed_to_measure(bare_machine):
    """What needs pydantic says so in a line."""
    done = run_python("-c", _MEASURE, cwd=bare_machine)
    assert done.stdout.startswith("ok\n") and "--minutes" in done.stdout, done.stderr
    assert "measure --help 0\n" in done.stdout and done.stdout.endswith("prepare-data 2\n")
    assert " pydantic " in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-c", _IMPORT_ALL), "all"),
        (("-m", "repro", *"efficiency --res 32 --families deit --sizes T --device cpu".split()), "1 rows in"),
    ],
)
def test_nor_to_import_all_and_to_measure_a_sweep(bare_machine, arguments, said):
    done = run_python(*arguments, cwd=bare_machine)
    assert done.returncode == 0 and said in done.stdout, done.stderr
