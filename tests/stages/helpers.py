"""Cells and untrained models that several stages' tests use."""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from torch import nn

from repro.core.config import load_section
from repro.core.hashing import hash_file
from repro.core.paths import Paths
from repro.core.record import read_record, write_json
from repro.core.runtime import load_runtime
from repro.data.kinds import PrepareData
from repro.data.manifest import read_manifest, write_manifest
from repro.data.prepare import prepare, scan_manifest
from repro.data.settings import TransformSettings
from repro.models.registry import build_denoiser, build_model
from repro.models.weights import save_weights

NANO = "vittt_nano_patch16_144"
DIGITS = [f"digit_{digit}" for digit in range(10)]
# of the cell `nano` of pretrain
WEIGHTS = Path("artifacts/pretrain/nano/weights.safetensors")
RECORD = Path("results/pretrain/nano/metrics.json")


def save_model(path: Path | str, name: str, *, seed: int = 0, **options: Any) -> str:
    """Write an untrained classifier of digits, of 64 pixels unless `img_size` says otherwise; returns the path."""
    torch.manual_seed(seed)
    options = {"num_classes": 10, "img_size": 64, **options}
    preprocessing = TransformSettings(image_size=options["img_size"], crop_pct=1.0).preprocessing()
    described = {"name": name, "options": options, "preprocessing": preprocessing, "classes": DIGITS}
    save_weights(Path(path), build_model(name, **options), **described)
    return str(path)


def save_official(path: Path, name: str) -> nn.Module:
    """Write random weights for ten classes in the form that the authors of ViT3 publish; returns the model."""
    torch.manual_seed(2)
    model = timm.create_model(name, num_classes=10)
    theirs = {key.replace("patch_embed.", "patch_embed.proj."): value for key, value in model.state_dict().items()}
    torch.save({"model": theirs, "epoch": 299, "args": argparse.Namespace(lr=1e-3)}, path)
    return model


def save_denoiser(path: Path, name: str, **more: Any) -> nn.Module:
    """Write an untrained model that draws digits of 16 pixels; returns it."""
    torch.manual_seed(0)
    options = {"depth": 1, "embed_dim": 24, "in_channels": 1, "num_classes": 10}
    described = {"name": name, "options": options, "preprocessing": {"input_size": [1, 16, 16]}, "classes": DIGITS}
    save_weights(path, model := build_denoiser(name, **options), **described, **more)
    return model


def prepare_cell(root: Path, name: str) -> None:
    """Write the data set of a cell of prepare_data, and its manifest."""
    paths = Paths(root)
    prepare(load_section(PrepareData, paths.params, "prepare_data", name), paths, load_runtime(paths), name)


def accept_data() -> None:
    """Write the manifest of the digits anew from their files, like that of a user's data, without expected hashes."""
    file = Path("results/prepare_data/digits/manifest.json")
    write_manifest(file, scan_manifest(Path("data/digits"), "digits", read_manifest(file).generated))


def read_metrics(file: Path) -> dict[str, Any]:
    """Read the metrics of a record."""
    return read_record(file)["metrics"]


def find_record(pattern: str) -> Path:
    """The one record below the folder of a device, of those that are no `run.json`."""
    found = Path("results/replications").glob(f"*/{pattern}.json")
    (file,) = (file for file in found if not file.name.endswith("run.json"))
    return file


def add_params(root: Path, text: str) -> None:
    """Put further sections into params.yaml; a section or a data set that is there gets more entries."""
    file = root / "params.yaml"
    params = yaml.safe_load(file.read_text())
    for name, section in yaml.safe_load(text).items():
        params[name] = {**params.get(name, {}), **section}
    file.write_text(yaml.safe_dump(params, sort_keys=False))


def use_profile(name: str) -> Paths:
    """Make params.yaml that of a profile."""
    Path("params.yaml").write_text((Path("profiles") / f"{name}.yaml").read_text())
    return Paths(Path.cwd())


def edit(*pairs: str) -> None:
    """Replace the first place of each old text in params.yaml by the new text that follows it."""
    path = Path("params.yaml")
    text = path.read_text()
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in text
        text = text.replace(old, new, 1)
    path.write_text(text)


def add_dense(root: Path) -> None:
    """Write scenes, cells that detect and segment in them, and their backbone, of which the record says the hash."""
    add_params(root, DENSE)
    prepare_cell(root, "scenes")
    file = root / WEIGHTS
    save_model(file, NANO, depth=4, img_size=144)
    write_json(root / RECORD, {"metrics": {"weights_hash": hash_file(file)}, "identity": {}})


def write_student(root: Path, **changes: Any) -> None:
    """Add the cell `student` of linearize, with changes, to params.yaml; it begins from a softmax model, `SOFTMAX`."""
    save_model(root / SOFTMAX, T5, **SHELL, inner="softmax", key_norm="none", dwc="none")
    init = {"weights": str(SOFTMAX), "sha256": hash_file(root / SOFTMAX, digits=64)}
    options = {"embed_dim": 48, "depth": 2, "patch_size": 8}
    optim = _SHORT["optim"] | {"lr": 0.001, "clip_grad_norm": None}
    cell = _SHORT | {"model": T5, "options": options, "init": init, "optim": optim} | changes
    add_params(root, yaml.safe_dump({"linearize": {"student": cell}}))


def stop_at_state(stage: str, cell: str, number: int, seed: int = 0) -> str:
    """Train a cell until this seed's first state is saved, send the process a signal, and return its stderr."""
    command = [sys.executable, "-m", "repro", stage, "--cell", cell]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 1800
    while not list(Path(".runs").glob(f"{stage}/{cell}/seed_{seed}-*/step_*.pt")):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.002)
    process.send_signal(number)
    _, err = process.communicate(timeout=1800)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), err
    return err


PARAMS = """
runtime: {workers: 0, save_every_steps: 3, log_every_steps: 5, data_roots: {digits: data/digits, imagenet: data/imagenet}}
prepare_data:
  digits:
    kind: digits
    expected: {classes: 10, train: 1079, tune: 359, test: 359}
    generate: {image_size: 32, tune_fraction: 0.2, test_fraction: 0.2, seed: 0}
  imagenet:
    kind: imagenet
    expected: {classes: 1000, train: 1281167, val: 50000}
pretrain:
  nano:
    model: vittt_nano_patch16_144
    family: vittt
    options: {depth: 1}
    data: digits
    seeds: [0]
    epochs: 2
    batch_size: 128
    drop_path: 0.1
    snapshot_epochs: [0, 2]
    optim: {lr: 0.003, lr_batch_size: 128, warmup_epochs: 0}
    mix: {mixup: 0.8, cutmix: 1.0, label_smoothing: 0.1}
    transform: {image_size: 32, hflip: 0.0, crop_pct: 1.0, re_prob: 0.25}
"""
_SHORT = yaml.safe_load(PARAMS)["pretrain"]["nano"] | {"epochs": 1, "snapshot_epochs": []}
ABLATE = yaml.safe_dump({"ablate": {"conv1d": _SHORT | {"options": {"depth": 1, "design": "conv1d"}, "seeds": [0, 1]}}})
T5 = "t5_tiny_patch16_224"
SHELL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
SOFTMAX = Path("softmax.safetensors")
GENERATE = """
generate:
  nano:
    model: dit3_nano_patch4
    options: {depth: 1, embed_dim: 24}
    data: digits
    seeds: [0]
    epochs: 2
    steps_per_epoch: 4
    batch_size: 16
    snapshot_epochs: [2]
    ema_decay: 0.9
    optim: {lr: 0.003, lr_batch_size: 16, weight_decay: 0.0, warmup_epochs: 0}
    transform: {image_size: 16, channels: 1, hflip: 0.0}
    sampling: {sampler: ddim, steps: 4, guidance: 2.0}
    judge: {weights: judge.safetensors, samples: 20}
"""
_DENSE = f"""
    model: {NANO}
    options: {{depth: 4}}
    init: {{weights: {WEIGHTS}}}
    data: scenes
    epochs: 2
    batch_size: 4
    drop_path: 0.1
    precision: fp32
"""
_RATES = "lr: 1.0e-3, warmup_lr: 1.0e-4, lr_batch_size: 4, warmup_steps: 2, layer_decay: 0.85, clip_grad_norm: 5.0"
DENSE = f"""
runtime: {{save_every_steps: 1, data_roots: {{digits: data/digits, imagenet: data/imagenet, scenes: data/scenes}}}}
prepare_data:
  scenes:
    kind: scenes
    expected: {{classes: 13, train: 12, tune: 3, test: 4}}
    draw:
      {{image_size: 128, train: 12, tune: 3, test: 4, seed: 0, tune_fraction: 0.2, test_fraction: 0.2, split_seed: 0}}
detect:
  nano: {_DENSE}
    optim: {{{_RATES}, schedule: step, milestones: [1]}}
    mask_rcnn:
      {{fpn_channels: 16, box_channels: 32, mask_channels: 8, mask_layers: 1, train_proposals: 50, test_proposals: 50,
        roi_samples: 16, min_score: 0.0}}
    transform: {{min_size: [96], max_size: 96, hflip: 0.0}}
segment:
  nano: {_DENSE}
    steps_per_epoch: 2
    optim: {{{_RATES}, schedule: poly}}
    upernet: {{channels: 16, aux_channels: 8, pool_scales: [1, 2]}}
    transform: {{scale: [160, 160], ratio: [0.8, 1.25], crop_size: 128, stride: 96, hflip: 0.0}}
"""
