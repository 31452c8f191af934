"""All measurements of a device as a series of steps within a time limit: `repro measure`.

Each step runs in its own process, because a failed kernel can leave the GPU unusable to its process. A step writes each
measurement under results at once. If a GPU is free for a few minutes at a time, call the same command again: until
every step is complete, a call continues where the last one ended, and repeats no completed step.
"""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels import selected_backend
from kernels.dispatch import compiler_obstacle

from ..core.csvfile import read_typed_csv
from ..core.errors import RunError, UserError
from ..core.paths import Paths
from ..core.record import make_identity, read_json, write_record
from ..core.runtime import (
    Runtime,
    describe_machine,
    device_label,
    device_slug,
    find_peak,
    gpu_names,
    load_runtime,
    usable_cores,
)
from .kernels import CHECK_TYPES, check_kernels, run_bench
from .lanes import run_in_lanes
from .probe import describe_probes, probe_device
from .sweep import PAIR
from .unfinished import Unfinished

SHORTEST_S = 20.0  # with less time left, no step begins
_TRAINING_MINUTES = 2.0  # with less time left, no training begins
# the cell `TRAINING`; no params file may have one of this name, because `time_training` deletes its record of a device
TRAINED = "speed/pretrain/vittt_tiny_digits"
TRAINING = {
    "model": "vittt_tiny_patch16_224",
    "data": "digits",
    "seeds": [0, 1],
    "epochs": 1,
    "steps_per_epoch": 64,
    "batch_size": 64,
    "drop_path": 0.0,
    "precision": "bf16",
    "optim": {"lr": 0.001, "lr_batch_size": 512, "warmup_epochs": 0},
    "mix": {"mixup": 0.0, "cutmix": 0.0},
    "transform": {"image_size": 224, "hflip": 0.0, "crop_pct": 1.0},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CampaignParams:
    """The parameters of the record of the environment: none, but `make_identity` hashes those of every record."""


@dataclasses.dataclass(frozen=True)
class CampaignStep:
    """One step of the measurements.

    Args:
        name: the step's name, unique in a series: by it a later call knows that the step is complete.
        about: its purpose in words.
        run: (paths, minutes left or None, start of the series) -> whether the step is complete. It is pickled for the
            step's own process, so it cannot be a lambda.
        limit: the most minutes that the step may take in a call with a time limit, so that later steps get their share.
    """

    name: str
    about: str
    run: Callable[..., bool]
    limit: float = 5.0


def _record_environment(paths: Paths, minutes: float | None, began: str) -> bool:
    """Write results/replications/<device>/environment.json: the machine, versions, and obstacles to the kernels.

    It takes a second and is written anew by each series, so `minutes` and `began`, which every step gets, do not count.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    metrics = {
        "machine": describe_machine(),
        "gpus": gpu_names(),
        "backend": selected_backend("auto", device, dtype=torch.bfloat16),
        "compiler_obstacle": compiler_obstacle(),
        "compiler_obstacle_reason": "null: a C compiler and Python.h are there",
    }
    place = {"device": device_label(device), "dtype": "bf16 asked", "backend": metrics["backend"]}
    identity = make_identity(paths.root, CampaignParams(), **place)
    write_record(paths.replications(device_slug(device)) / "environment.json", metrics, identity, 0.0)
    return True


def time_training(paths: Paths, minutes: float | None, began: str) -> bool:
    """Write speed/pretrain/vittt_tiny_digits.json: a training's speed by `record_speed`, with its share of the peak.

    Two seeds are trained, and the speed is that of the second one, whose kernels are compiled. The training's own
    record is deleted.

    Returns:
        Whether it was trained: not with less than `_TRAINING_MINUTES` left, because it cannot be continued. So `began`,
        which every step gets, does not count.

    Raises:
        RunError: PyTorch sees no CUDA device.
    """
    from ..core.config import build
    from ..runs.cells import train_cells
    from ..runs.job import Cell
    from ..tasks.classification.spec import SPEC

    if not torch.cuda.is_available():
        raise RunError("PyTorch sees no CUDA device")
    if minutes is not None and minutes < _TRAINING_MINUTES:
        return False
    _, stage, name = TRAINED.split("/")
    folder = paths.replications(device_slug("cuda"))
    record = folder / stage / f"{name}.json"
    params, given = build(SPEC.params, TRAINING, name), load_runtime(paths)
    roots = {"digits": "data/digits"} | given.data_roots
    peak = find_peak(torch.cuda.get_device_name())
    runtime = dataclasses.replace(
        given, device="cuda", workers=min(8, usable_cores()), peak_tflops=peak, data_roots=roots
    )
    record.unlink(missing_ok=True)  # a training with a record would be skipped
    train_cells([Cell(stage=stage, name=name, params=params, spec=SPEC, paths=paths, runtime=runtime, record=record)])
    record.unlink()  # only its speed is of interest
    return True


def _sweep_rows(paths: Paths, minutes: float | None, began: str, **options: Any) -> bool:
    """Measure the rows of a `SweepParams` with these options into results/speed/<device>.csv, without params.yaml."""
    from .efficiency import run_sweep
    from .params import SweepParams

    return run_sweep(SweepParams(minutes=minutes, **options), paths, Runtime(data_roots={}), began=began)


def _plan_sweep(name: str, about: str, sizes: str, batch_size: int, **options: Any) -> CampaignStep:
    """Make the step that measures a sweep; `sizes` has a letter for each size, and `options` are of `SweepParams`."""
    return CampaignStep(name, about, partial(_sweep_rows, sizes=tuple(sizes), batch_size=batch_size, **options))


_compare = partial(run_bench, compared=True)
# the models of the paper's claims on speed, which are measured at both ends of the range of image sizes
_CLAIMED = {"families": PAIR}
_COMPILED: dict[str, Any] = {"families": ("deit_fused",), "compile": True}  # the baseline's fastest form
# (end of a step's name, its purpose, options of `SweepParams`) of each way to measure them
_WAYS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("", "Vittt-T and DeiT-T, fused and unfused", {}),
    (", graphs", "the same through CUDA graphs, which is the GPU's time", {"compile": "graphs"}),
)

# the order matters where a GPU is free for minutes only: correctness and the host's share first, then the paper's claim
CAMPAIGN = (
    CampaignStep("environment", "the machine and its versions", _record_environment),
    CampaignStep(
        "probe", "whether frozen models are right, and whose time a pass takes: host, kernels, graphs", probe_device
    ),
    CampaignStep(
        "check of TTT-Linear", "its kernels against the fp64 reference", partial(check_kernels, op="ttt_linear"), 1.5
    ),
    CampaignStep(
        "first checks",
        "each other operator as models run it, and its first cases",
        partial(check_kernels, first=4),
        1.5,
    ),
    *(
        _plan_sweep(f"{side}², batch {batch}{how}", about, "T", batch, image_sizes=(side,), **_CLAIMED, **options)
        for side, batch in ((1280, 64), (1280, 1), (224, 64), (224, 1))
        for how, about, options in _WAYS
    ),
    *(
        _plan_sweep(f"{side}², batch 64, compiled", "DeiT-T, compiled", "T", 64, image_sizes=(side,), **_COMPILED)
        for side in (1280, 224)
    ),
    CampaignStep("TTT-Linear", "its speed at the shapes that the goals are about", partial(_compare, op="ttt_linear")),
    CampaignStep("check", "the kernels against the fp64 reference", check_kernels),
    CampaignStep("compared", "the kernels' speed at the shapes that the goals are about", _compare),
    CampaignStep("training", "a short training in bf16", time_training),
    _plan_sweep("batch 1", "every family of size T at batch 1", "T", 1),
    _plan_sweep("batch 1, graphs", "the same through CUDA graphs", "T", 1, compile="graphs"),
    _plan_sweep("batch 64", "every family of size T at batch 64", "T", 64),
    CampaignStep("bench", "the kernels' speed at every shape", run_bench),
    _plan_sweep("batch 64, all sizes", "every family of every size at batch 64", "TSB", 64),
    _plan_sweep("batch 1, all sizes", "every family of every size at batch 1", "TSB", 1),
)


def run_campaign(paths: Paths, minutes: float | None = None, steps: tuple[CampaignStep, ...] = CAMPAIGN) -> bool:
    """Run the steps in order until the time is up, print the steps that are left, and return whether there are none.

    A step that lacks a package is skipped and named. Steps that an unfinished call completed are not repeated.

    Args:
        minutes: the time for all steps; None: no limit.

    Raises:
        RunError: a step failed; the others were run.
    """
    end = None if minutes is None else time.monotonic() + 60 * minutes
    failed, left, lacking = [], [], []
    # several machines may share this checkout
    state = Unfinished(paths, f"measure/{device_slug('cuda' if torch.cuda.is_available() else 'cpu')}")
    state.save()  # a call that is killed in its first step leaves its start to the next one
    done = state.kept.setdefault("done", [])
    for step in steps:
        if step.name in done:
            continue
        remaining = None if end is None else end - time.monotonic()
        if remaining is not None and remaining < SHORTEST_S:
            left.append(step.name)
            continue
        print(f"{step.name}: {step.about}", flush=True)
        try:
            given = None if remaining is None else min(remaining / 60, step.limit)
            if _run_apart(step, paths, given, state.began):
                done.append(step.name)
                state.save()
            else:
                left.append(step.name)
        except ModuleNotFoundError as error:
            lacking.append(f"{step.name}: the package {error.name} is not installed")
            print(lacking[-1], flush=True)
        except (UserError, RunError) as error:
            failed.append(f"{step.name}: {error}")
            print(failed[-1], flush=True)
    if left:
        print(f"time is up; call again for: {'; '.join(left)}")
    if failed:
        raise RunError(f"measure: {len(failed)} of {len(steps)} steps failed: {'; '.join(failed)}")
    if not left:
        state.finish()
        print(f"done: every record is complete{', but ' if lacking else ''}{'; '.join(lacking)}")
    return not left


def make_passages(paths: Paths) -> list[tuple[str, str, str]]:
    """Make the generated blocks (page, marker, text) of results/speed.md: a line for each measurement of a GPU."""
    lines = ["| device | file | what it says | commit |", "|---|---|---|---|"]
    for name, describe in _RECORDS.items():
        for file in sorted(paths.results.glob(f"replications/*/{name}.json")):
            record = read_json(file)
            identity = record["identity"]
            if str(identity["device"]).startswith("cuda"):
                commit = (identity["parent_commit"] or "unknown")[:8]
                lines.append(f"| {identity['device']} | `{name}.json` | {describe(record['metrics'])} | {commit} |")
    for file in sorted(paths.speed.glob("**/*.csv")):
        rows = read_typed_csv(file, CHECK_TYPES)
        if file.parent.name != "probe" and rows and str(rows[0]["device"]).startswith("cuda"):
            commits = ", ".join(dict.fromkeys(row["commit"][:8] for row in rows))
            lines.append(
                f"| {rows[0]['device']} | `{file.relative_to(paths.speed).as_posix()}` | {_describe_rows(rows)} | {commits} |"
            )
    # the header has two lines
    nothing = "**No GPU is measured**: no record is of one. `make measure-gpu` makes them."
    records = "\n".join(lines) if len(lines) > 2 else nothing
    probes = describe_probes(paths.speed / "probe")
    return [("results/speed.md", "gpu records", records), ("results/speed.md", "gpu probe", probes)]


def _describe_rows(rows: list[dict[str, Any]]) -> str:
    """Describe a file of results/speed: its checks by operator, or its number of rows."""
    if "checks" not in rows[0]:
        return f"{len(rows)} rows"
    listed = ", ".join(f"{row['checks']} of `{row['operator']}`" for row in rows)
    return f"checks: {listed}{' alone' * (len(rows) == 1)}; {sum(row['failed'] for row in rows)} failed"


def _describe_training(metrics: dict[str, Any]) -> str:
    """Describe a record of `time_training`: the training, its speed, and its share of the GPU's peak."""
    share, size = metrics.get("mfu_percent"), TRAINING["transform"]["image_size"]
    mfu = "the GPU's peak is not in our table" if share is None else f"{share:.0f} % of the peak"
    what = f"{metrics['model']} at {size}², batch {TRAINING['batch_size']}, {TRAINING['precision']}"
    forms = {"throughput_img_per_s": "{:.0f} img/s", "data_wait_percent": "waited {:.0f} % for data"}
    said = [
        f"{name} null: {metrics.get(f'{name}_reason', 'no reason given')}"
        if metrics[name] is None
        else form.format(metrics[name])
        for name, form in forms.items()
    ]
    return f"{what}: {', '.join([*said, mfu])}"


# name of a record -> function that describes its metrics in a sentence
_RECORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "environment": lambda metrics: (
        f"backend {metrics['backend']}; {metrics['compiler_obstacle'] or 'a C compiler is there'}"
    ),
    TRAINED: _describe_training,
}


def _run_apart(step: CampaignStep, paths: Paths, minutes: float | None, began: str) -> bool:
    """Run a step in its own process; return whether it is complete."""

    def died(_: CampaignStep) -> bool:
        raise RunError("its process was killed; what it had measured is kept")

    ((_, is_complete),) = run_in_lanes([step], partial(_run, paths, minutes, began), 1, died)
    return is_complete


def _run(paths: Paths, minutes: float | None, began: str, step: CampaignStep) -> tuple[bool, bool]:
    """Run a step in this worker, which is used once; return (is complete, True). Any error becomes one line."""
    try:
        return step.run(paths, minutes=minutes, began=began), True
    except (UserError, RunError, ModuleNotFoundError):
        raise
    except Exception as error:
        raise RunError(" ".join(f"{type(error).__name__}: {error}".split())[:500]) from None
