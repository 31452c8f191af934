"""`repro ablate --all`: every variant that the paper ablates, one process each, into results/measured/<device>/ablate/<data>/<variant>/.

Nothing here is an output of the graph. A variant that is done is not trained again; a call that was stopped, or asks for more seeds,
continues.
"""

import dataclasses
import difflib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from repro.core.config import load_section, params_hash, section_keys
from repro.core.errors import Interrupted, RunError, UserError
from repro.core.hashing import hash_files, import_closure
from repro.core.paths import Paths
from repro.core.record import read_json
from repro.core.runtime import Runtime, choose_device, device_slug, usable_cores
from repro.core.ui import print_table
from repro.papers.vision_ttt.variants import VARIANTS

from .ablate import SPEED_OPEN, STAGE, AblateParams, add_speed, train_variant
from .prepare_data import PrepareData
from .pretrain import ClassifierParams, PretrainParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of `repro ablate --all`; see there."""

    data: str | None
    seeds: tuple[int, ...]
    epochs: int | None
    jobs: int = 1
    variant: str | None = None
    speed: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the 17: its parameters, its folder, and the seeds that a record there has, with their entries."""

    name: str
    params: AblateParams
    folder: Path
    known: Mapping[int, Mapping[str, Any]]

    @property
    def missing(self) -> list[int]:
        """The seeds still to train."""
        return [seed for seed in self.params.seeds if seed not in self.known]

    @property
    def speed_open(self) -> bool:
        """Trained, and its throughput not measured."""
        return read_json(self.folder / "metrics.json")["metrics"].get("throughput_img_per_s_reason") == SPEED_OPEN

    @property
    def cell(self) -> str:
        """What its runs are named by."""
        return f"{self.params.data}_{self.name}"


def run(asked: Asked, paths: Paths, runtime: Runtime) -> None:
    """Show the plan, train what is missing, then measure the throughputs, one after the other on the quiet machine.

    Raises:
        UserError: unknown data or variant, or a folder that holds a record of other parameters; before anything is trained.
        Interrupted: a signal came; what is finished is kept. RunError: variants failed; the others are done.
    """
    from repro.data.manifest import read_manifest

    device = choose_device(runtime.device)
    names = list(VARIANTS) if asked.variant is None else [asked.variant]
    params = {name: variant_params(name, asked, paths) for name in names}
    read_manifest(_manifest(params[names[0]], paths))
    grid = {name: _variant(name, each, paths, device_slug(device)) for name, each in params.items()}
    if asked.variant is None:
        _show_plan(grid)
        failed = _train_all(grid, asked, paths, runtime, device.type)
    else:
        one, failed = grid[asked.variant], {}
        if one.missing:
            train_variant(one.params, paths, _within(runtime), one.cell, one.folder, known=one.known)
    for name, each in grid.items():
        if asked.speed and name not in failed and each.speed_open:
            add_speed(each.params, runtime, each.folder)
            metrics = read_json(each.folder / "metrics.json")["metrics"]
            print(
                f"{name}: {metrics['throughput_img_per_s'] or float('nan'):.0f} images/s at batch {metrics['throughput_batch']}", flush=True
            )
    if failed:
        raise RunError(
            f"ablate: {len(failed)} of {len(grid)} failed, the others are done: " + "; ".join(f"{n}: {why}" for n, why in failed.items())
        )


def variant_params(name: str, asked: Asked, paths: Paths) -> AblateParams:
    """A variant, trained as `pretrain` trains its first Vittt on this data.

    Where pretrain has none, its first Vittt's recipe holds, without the changes of the image that labels need not survive; `connect` is
    taken at its own size.

    Raises:
        UserError: an unknown variant or data set, or no Vittt in `pretrain`.
    """
    if name not in VARIANTS:
        close = difflib.get_close_matches(name, VARIANTS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(VARIANTS)}"
        raise UserError(f"ablate: --variant {name}: not known; {hint}")
    every = [load_section(PretrainParams, paths.params, "pretrain", cell) for cell in section_keys(paths.params, "pretrain")]
    ours = [params for params in every if params.model.startswith("vittt_")]
    if not ours:
        raise UserError(f"{paths.params}: pretrain: no cell of a Vittt, whose recipe the variants would take")
    data = asked.data or ours[0].data
    if data not in (there := section_keys(paths.params, "prepare_data")):
        raise UserError(f"ablate: --data {data}: no cell of prepare_data in params.yaml; there are {', '.join(there)}")
    recipe = next((params for params in ours if params.data == data), None)
    transform = (recipe or ours[0]).transform
    if recipe is None:
        unchanged = {
            "scale": (1.0, 1.0),
            "ratio": (1.0, 1.0),
            "hflip": 0.0,
            "color_jitter": None,
            "auto_augment": None,
            "re_prob": 0.0,
            "crop_pct": 1.0,
        }
        if written := load_section(PrepareData, paths.params, "prepare_data", data).curves:
            unchanged["image_size"] = written.image_size
        recipe = dataclasses.replace(ours[0], mix=dataclasses.replace(ours[0].mix, mixup=0.0, cutmix=0.0))
        transform = dataclasses.replace(transform, **unchanged)
    shared = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(ClassifierParams)}
    shared |= {
        "data": data,
        "transform": transform,
        "options": {**recipe.options, **VARIANTS[name]},
        "epochs": asked.epochs or recipe.epochs,
    }
    return AblateParams(**shared, seeds=asked.seeds)


def _manifest(params: AblateParams, paths: Paths) -> Path:
    return paths.cell("prepare_data", params.data) / "manifest.json"


def _variant(name: str, params: AblateParams, paths: Paths, device: str) -> Variant:
    folder = paths.measured(device) / STAGE / params.data / name
    return Variant(name=name, params=params, folder=folder, known=_known(params, paths, folder))


def _known(params: AblateParams, paths: Paths, folder: Path) -> dict[int, Mapping[str, Any]]:
    """The entries of the seeds that an earlier call finished, of the same parameters and data."""
    file = folder / "metrics.json"
    if not file.is_file():
        return {}
    from repro.models.registry import family_module

    record = read_json(file)
    known = {entry["seed"]: entry for entry in record["metrics"]["seeds"]}
    data = hashlib.sha256(_manifest(params, paths).read_bytes()).hexdigest()[:16]
    now = {"params": params_hash(dataclasses.replace(params, seeds=tuple(known))), "data_manifest": data}
    if set(params.seeds) - set(known):  # one record names one code
        now["code"] = hash_files(paths.root, import_closure(paths.root, [f"stages.{STAGE}", family_module(params.model)]))
    for what, value in now.items():
        if record["identity"][what] != value:
            epochs = f"{record['metrics']['epochs']} epochs, seeds {', '.join(map(str, known))}"
            raise UserError(f"{file}: holds a run of other {what} ({epochs}); ask for the same, or move the folder away")
    return known


def _show_plan(grid: Mapping[str, Variant]) -> None:
    rows = []
    for name, each in grid.items():
        changes = ", ".join(f"{key} {value}" for key, value in VARIANTS[name].items()) or "Vittt itself"
        todo = f"train seeds {', '.join(map(str, each.missing))}" if each.missing else "measure its speed" if each.speed_open else "done"
        rows.append([name, changes, todo])
    print_table(["variant", "what it changes", "to do"], rows)
    one = next(iter(grid.values())).params
    waiting = sum(len(each.missing) for each in grid.values())
    print(
        f"{len(grid)} variants of {one.model} on {one.data}, {one.epochs} epochs, {len(one.seeds)} seed(s): {waiting} trainings to do",
        flush=True,
    )


def _train_all(grid: Mapping[str, Variant], asked: Asked, paths: Paths, runtime: Runtime, device: str) -> dict[str, str]:
    """Train what is missing in `asked.jobs` processes at once; variant -> last line of its output, for those that failed."""
    from repro.engine.loop import catch_signals

    waiting = [each for each in grid.values() if each.missing]
    slots = [_environment(slot, asked.jobs, runtime, device) for slot in range(asked.jobs)]
    running: dict[int, tuple[Variant, subprocess.Popen, Path, float]] = {}
    total, finished, failed, told, began = len(waiting), 0, {}, False, time.monotonic()
    with catch_signals(all_of_them=True) as received:
        while running or (waiting and not received):
            for slot in [slot for slot in range(asked.jobs) if slot not in running and waiting and not received]:
                each = waiting.pop(0)
                log = paths.logs(STAGE, each.cell) / "output.txt"
                running[slot] = (each, _start(each, slots[slot], log), log, time.monotonic())
                print(f"{each.name}: training, output in {log.relative_to(paths.root)}", flush=True)
            if received and not told:  # once: a second signal ends a process without its state saved
                told = True
                for _, process, _, _ in running.values():
                    process.send_signal(signal.SIGTERM)
            time.sleep(1.0 if received else 0.1)
            for slot, (each, process, log, started) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[slot]
                finished += 1
                said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
                # an error may stand in front of what the process still had to write when it ended
                last = next((line for line in reversed(said) if line.startswith("repro: ")), said[-1]).removeprefix("repro: ")
                if process.returncode and not received:
                    failed[each.name] = last
                left = (time.monotonic() - began) / finished * (total - finished) / 60
                print(f"[{finished} of {total}, about {left:.0f} min left] {last} ({time.monotonic() - started:.0f} s)", flush=True)
    if received:
        raise Interrupted(received[0], f"{finished} of {total} variants ended, each with its state kept")
    return failed


def _start(each: Variant, environment: Mapping[str, str], log: Path) -> subprocess.Popen:
    log.parent.mkdir(parents=True, exist_ok=True)
    params = each.params
    options = {"--variant": each.name, "--data": params.data, "--seeds": len(params.seeds), "--epochs": params.epochs}
    arguments = [str(part) for pair in options.items() for part in pair]
    with open(log, "w", encoding="utf-8") as stream:
        # a session of its own: a Ctrl-C in the terminal reaches it through us alone, and once
        return subprocess.Popen(
            [sys.executable, "-m", "repro", STAGE, *arguments, "--no-speed"],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _environment(slot: int, jobs: int, runtime: Runtime, device: str) -> dict[str, str]:
    """Of a process: its GPU, or its share of the threads."""
    if device == "cuda":
        import torch

        shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        gpus = shown.split(",")
        return os.environ | {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]}
    threads = runtime.threads or int(os.environ.get("OMP_NUM_THREADS") or usable_cores())
    return os.environ | {"OMP_NUM_THREADS": str(max(1, threads // jobs))}


def _within(runtime: Runtime) -> Runtime:
    """The threads that a process was given go before those of params.yaml, which are of all processes together."""
    given = os.environ.get("OMP_NUM_THREADS")
    return dataclasses.replace(runtime, threads=min(runtime.threads, int(given))) if runtime.threads and given else runtime
