"""How fast a short real training is: Vittt-T on digits at 224² in bf16, through `repro pretrain`, with images per second and MFU."""

import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ..core.errors import RunError
from ..core.paths import Paths
from ..core.record import make_identity, read_json, read_record, write_json, write_record
from ..core.runtime import device_label, device_slug
from ..measure.flops import cost
from ..models.registry import family_module

# TFLOP/s of dense bf16 products by the makers' data sheets; a part of torch's name of the GPU -> its peak
PEAK_TFLOPS = {"A100": 312.0, "H100": 989.4, "H200": 989.4, "L40S": 362.05, "RTX 4090": 165.2, "B200": 2250.0}
CELL = "measured"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingParams:
    """What the record answers.

    Args:
        model, image_size, batch_size, precision: of the training.
        steps: after this many the training ends; the first half of them, in which kernels compile and are tuned, does not count.
    """

    model: str = "vittt_tiny_patch16_224"
    image_size: int = 224
    batch_size: int = 64
    precision: str = "bf16"
    steps: int = 96


def run_training(paths: Paths, params: TrainingParams = TrainingParams(), device: str = "cuda") -> bool:
    """Train and write results/measured/<device>/training.json, unless it is there and of this code.

    metrics: `img_per_s` and `step_ms`, medians over the second half of the steps; `first_step_s`; `peak_memory_mib`; `mfu_percent`,
    3 · 2 · MACs · img_per_s over the GPU's peak by its data sheet; `train_loss` at the end; `params`.

    Raises:
        RunError: the training failed, or there is no such device.
    """
    started = time.monotonic()
    if device == "cuda" and not torch.cuda.is_available():
        raise RunError("PyTorch sees no CUDA device")
    if importlib.util.find_spec("sklearn") is None:
        raise RunError("scikit-learn is not installed, which has the digits: python -m pip install scikit-learn")
    code = ["stages.pretrain", "repro.benchmark.training_rate", family_module(params.model)]
    shown = {"device": device_label(device), "dtype": params.precision, "backend": "auto"}
    identity = make_identity(paths.root, code, params, **shown)
    file = paths.measured(device_slug(device)) / "training.json"
    if file.is_file() and read_json(file)["identity"].get("code_hash") == identity.get("code_hash"):
        return True
    with tempfile.TemporaryDirectory(prefix="training_rate_") as folder:
        lines, speed, metrics = _train(Path(folder), paths.root, params, device)
    images, seconds = params.batch_size, [line["seconds"] for line in lines if "seconds" in line]
    late = seconds[len(seconds) // 2 :]
    img_per_s = images / statistics.median(late)
    macs = cost(params.model, {}, (params.image_size, params.image_size)).macs_g * 1e9
    found: dict[str, Any] = {"img_per_s": img_per_s, "step_ms": 1e3 * statistics.median(late), "first_step_s": seconds[0]}
    found |= {"step_ms_samples": [round(1e3 * each, 2) for each in late], "peak_memory_mib": speed["peak_memory_mib"]}
    if found["peak_memory_mib"] is None:
        found["peak_memory_mib_reason"] = speed["peak_memory_mib_reason"]
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    peak = next((tflops for part, tflops in PEAK_TFLOPS.items() if part in name), None)
    found |= {"mfu_percent": 100 * 6 * macs * img_per_s / (peak * 1e12) if peak else None, "peak_tflops": peak}
    if peak is None:
        found |= dict.fromkeys(("mfu_percent_reason", "peak_tflops_reason"), f"the peak of {name} is not in our table")
    found |= {"train_loss": metrics["by_seed"][0]["train_loss"], "steps": len(seconds), "params": dataclasses.asdict(params)}
    write_record(file.parent, found, identity, time.monotonic() - started, name="training")
    print(f"{params.model}, {params.precision}, {params.image_size}²: {img_per_s:.0f} img/s", flush=True)
    return True


def _train(root: Path, source: Path, params: TrainingParams, device: str) -> tuple[list[dict], dict, dict]:
    """A line for each step, the record of the speed, and the metrics of a training in a checkout of its own."""
    for package in ("repro", "kernels", "stages"):
        (root / package).symlink_to(source / package)
    (root / "dvc.yaml").write_text("stages: {}\n")
    write_json(root / "params.yaml", _make_params(params, device))  # JSON is YAML
    for arguments in (["prepare-data", "--cell", "digits"], ["pretrain", "--cell", CELL]):
        done = subprocess.run([sys.executable, "-m", "repro", *arguments], cwd=root, capture_output=True, text=True, env=dict(os.environ))
        if done.returncode:
            raise RunError(f"repro {arguments[0]}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    (log,) = (root / ".runs" / "logs").rglob("train.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    speeds = [read_json(file)["metrics"] for file in (root / "results" / "measured").glob(f"*/pretrain/{CELL}.json")]
    speed = speeds[0] if speeds else {"peak_memory_mib": None, "peak_memory_mib_reason": "PyTorch keeps no peak of memory on a CPU"}
    return lines, speed, read_record(root / "results" / "pretrain" / CELL / "metrics.json")["metrics"]


def _make_params(params: TrainingParams, device: str) -> dict[str, Any]:
    images = 1079  # of the training split
    epochs = max(1, round(params.steps / (images // params.batch_size)))
    cell = {
        "model": params.model,
        "data": "digits",
        "seeds": [0],
        "epochs": epochs,
        "batch_size": params.batch_size,
        "precision": params.precision,
        "drop_path": 0.0,
        "snapshot_epochs": [],
        "optim": {"lr": 0.001, "lr_batch_size": 512, "warmup_epochs": 0},
        "mix": {"mixup": 0.0, "cutmix": 0.0, "label_smoothing": 0.1},
        "transform": {"image_size": params.image_size, "hflip": 0.0, "crop_pct": 1.0},
    }
    generate = {"image_size": params.image_size, "tune_fraction": 0.2, "test_fraction": 0.2, "seed": 0}
    data = {"kind": "digits", "expected": {"classes": 10, "train": images, "tune": 359, "test": 359}, "generate": generate}
    runtime = {"device": device, "data_roots": {"digits": "data/digits"}, "log_every_steps": 1, "jsonl": True}
    runtime["workers"] = min(8, len(os.sched_getaffinity(0)))
    return {"runtime": runtime, "prepare_data": {"digits": data}, "pretrain": {CELL: cell}}
