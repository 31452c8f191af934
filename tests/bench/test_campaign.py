"""`repro measure`: its steps run apart, stop in time, are continued, outlive one that breaks; a CPU's records."""

import dataclasses
import importlib
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from repro.bench import campaign
from repro.bench.campaign import CAMPAIGN, CampaignStep, run_campaign
from repro.bench.params import SweepParams
from repro.core.errors import RunError, UserError
from repro.core.paths import Paths, find_root
from repro.core.record import read_json, write_json
from repro.runs import cells
from repro.runs.job import build_job
from tests.conftest import run_python


def act(name, paths, minutes, began):
    """The work of a step: what its name says."""
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
        file.write(f"{name}\n")
    return name != "run out of time"


def make_steps(*names):
    return tuple(CampaignStep(name, "a test", partial(act, name)) for name in names)


def test_a_broken_step_costs_itself_alone(tmp_path, capfd):
    """A refusal, an error and a killed process; the step after them runs, and the end says which failed."""
    said = r"3 of 4 steps failed: refuse: there is no such thing; break down: ZeroDivisionError: .*; die: its"
    with pytest.raises(RunError, match=said):
        run_campaign(Paths(tmp_path), steps=make_steps("refuse", "break down", "die", "succeed"))
    assert (tmp_path / "steps.txt").read_text() == "succeed\n"
    assert "Traceback" not in capfd.readouterr().err


@pytest.fixture
def here(monkeypatch):
    """Steps run in this process, which spares each the start of another."""
    monkeypatch.setattr(campaign, "_run_apart", lambda step, *given: campaign._run(*given, step)[0])


@pytest.mark.usefixtures("here")
def test_a_step_that_is_complete_is_not_taken_again_until_all_are(tmp_path, monkeypatch):
    """The second of three runs out of time once; then all is done, and the next call begins anew."""
    monkeypatch.setattr(campaign, "SHORTEST_S", 0.0)
    assert not run_campaign(Paths(tmp_path), steps=make_steps("first", "run out of time", "third"))
    steps = make_steps("first", "second", "third")
    assert run_campaign(Paths(tmp_path), steps=steps) and run_campaign(Paths(tmp_path), steps=steps)
    taken = (tmp_path / "steps.txt").read_text().split("\n")
    assert taken == ["first", "run out of time", "third", "second", "first", "second", "third", ""]


def note(folder, paths, minutes, began):
    """Note since when rows count; the first two calls are not complete."""
    with open(folder / "began.txt", "a") as file:
        file.write(f"{began}\n")
    return len((folder / "began.txt").read_text().splitlines()) > 2


@pytest.mark.usefixtures("here")
def test_all_calls_of_a_campaign_are_told_one_time_since_which_rows_count(tmp_path):
    steps = tuple(CampaignStep(name, "a test", partial(note, tmp_path)) for name in ("one", "another"))
    assert not run_campaign(Paths(tmp_path), steps=steps)
    assert run_campaign(Paths(tmp_path), steps=steps)
    told = (tmp_path / "began.txt").read_text().splitlines()
    assert len(told) == 4 and len(set(told)) == 1


def test_a_step_without_its_package_is_named_and_no_failure(tmp_path, capsys):
    assert run_campaign(Paths(tmp_path), steps=make_steps("miss a package"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("done") and "miss a package" in last and "package_of_nobody" in last


def test_the_first_steps_answer_what_the_paper_claims():
    """After a probe and checks, Vittt and DeiT are raced, eagerly and by graphs, and DeiT is compiled, before all else."""
    names = [each.name for each in CAMPAIGN]
    assert names[:4] == ["environment", "probe", "check of TTT-Linear", "first checks"]
    assert names[4:6] == ["1280², batch 64", "1280², batch 64, graphs"] and len(names) == len(set(names))
    for each, side in zip(CAMPAIGN[12:14], (1280, 224), strict=True):
        params = SweepParams(**each.run.keywords).with_defaults("cuda")
        ((row,),) = params.plan("cuda")
        assert (row.model, row.attention, row.compile, row.image_size[0]) == (
            "deit_tiny_patch16_224",
            "fused",
            True,
            side,
        )
    for place, each in enumerate(CAMPAIGN[4:12]):
        params = SweepParams(**each.run.keywords).with_defaults("cuda")
        rows = {(row.model, row.attention, row.compile) for block in params.plan("cuda") for row in block}
        vittt, deit = "vittt_tiny_patch16_224", "deit_tiny_patch16_224"
        three = ((vittt, None), (deit, "fused"), (deit, "unfused"))
        assert rows == {(name, kind, "graphs" if place % 2 else False) for name, kind in three}


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


@pytest.mark.slow
def test_it_says_what_is_left(tmp_path, capsys, monkeypatch):
    """A step that runs out of time, and then no time for the next."""
    monkeypatch.setattr(campaign, "SHORTEST_S", 0.0)
    assert not run_campaign(Paths(tmp_path), 1.0, make_steps("run out of time", "succeed"))
    assert "call again for: run out of time\n" in capsys.readouterr().out
    monkeypatch.setattr(campaign, "SHORTEST_S", 3600.0)
    assert not run_campaign(Paths(tmp_path), 1.0, make_steps("succeed", "run out of time"))
    assert "call again for: succeed; run out of time\n" in capsys.readouterr().out
    assert (tmp_path / "steps.txt").read_text() == "run out of time\nsucceed\n"
    assert run_campaign(Paths(tmp_path), None, make_steps("succeed"))
    assert "done: every record is complete" in capsys.readouterr().out


@pytest.fixture
def checkout(bare_checkout):
    return Paths(bare_checkout)


@pytest.mark.slow
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
    assert campaign.time_training(checkout, None, "")
    (cell,) = asked
    assert not cell.record.exists(), "its speed alone is kept"
    assert (cell.runtime.peak_tflops, len(cell.params.seeds)) == (989.4, 2)
    assert cell.runtime.data_roots == {"digits": "data/digits"}
    digits = "prepare_data/digits"
    shutil.copytree(find_root(Path(__file__).parent).results / digits, checkout.results / digits)
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


_MEASURE_ROW = """
from repro.bench.speed import RowSpec, measure
print(measure(RowSpec(model="vittt_nano_patch16_144", image_size=(32, 32), backend="torch", threads=1))["status"])
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-c", _MEASURE_ROW), "ok"),
        pytest.param(("-c", _IMPORT_ALL), "all", marks=pytest.mark.slow),
        (("-m", "repro", "measure", "--help"), "--minutes"),
        pytest.param(
            ("-m", "repro", *"efficiency --res 32 --families deit --sizes T --device cpu".split()),
            "1 rows in",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_pydantic_dvc_mmseg_and_params_are_not_needed_to_measure(bare_machine, arguments, said):
    done = run_python(*arguments, cwd=bare_machine)
    assert done.returncode == 0 and said in done.stdout, done.stderr


def test_what_needs_pydantic_says_so_in_a_line(bare_machine):
    (bare_machine / "params.yaml").write_text("runtime: {data_roots: {}}\n")
    done = run_python("-m", "repro", "prepare-data", cwd=bare_machine)
    assert done.returncode == 2 and " pydantic " in done.stderr and done.stderr.count("\n") == 1
