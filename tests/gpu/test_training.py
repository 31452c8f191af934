"""Every nano model trains on this GPU: in fp16 and in bf16, compiled, and on several GPUs at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from repro.core.paths import Paths
from repro.core.record import read_record
from tests.gpu.conftest import PRECISIONS, SIDE


def train(cell):
    """The record of a cell that is trained in this process."""
    from stages.pretrain import command

    command(cell=cell)
    return read_record(Path(f"results/pretrain/{cell}/metrics.json"))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_training_in_low_precision(checkout, device, model, precision):
    record = train(f"{model}_{precision}")
    metrics, identity = record["metrics"], record["identity"]
    (seed,) = metrics["by_seed"]
    # fp16 begins with a scale of the loss that may be too large for some steps
    assert seed["train_loss"] < 3.0 and seed["skipped_steps"] <= 3
    assert identity["dtype"] == precision and identity["device"].startswith(device.type)
    own = ("vittt", "vim", "vrwkv")
    mine = "triton" if device.type == "cuda" else "numba"
    assert identity["backend"] == (mine if model.startswith(own) else "torch")


def test_compiled_is_as_eager(device, model):
    """Output and gradients through torch.compile with inductor, in fp32."""
    from repro.models.registry import build_model

    torch.manual_seed(0)
    network = build_model(model, num_classes=10, img_size=SIDE).to(device)
    images = torch.randn(4, 3, SIDE, SIDE, device=device)

    def step(function):
        out = function(images)
        return out, *torch.autograd.grad(out.square().mean(), [p for p in network.parameters() if p.requires_grad])

    expected = step(network)
    torch.compiler.reset()
    results = step(torch.compile(network))
    for a, b in zip(results, expected, strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm() + 1e-6


def available_gpus():
    return [n for n in (1, 2, 4, 8) if n <= torch.cuda.device_count()]


@pytest.mark.parametrize("gpus", available_gpus() or [1])
def test_a_training_under_torchrun(checkout, device, gpus):
    """`repro pretrain --gpus`, with NCCL: a process for each GPU."""
    cell = "vittt_nano_patch16_144_bf16"
    command = [sys.executable, "-m", "repro", "pretrain", "--cell", cell, "--gpus", str(gpus)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(checkout)}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = read_record(checkout / f"results/pretrain/{cell}/metrics.json")["metrics"]
    assert metrics["by_seed"][0]["train_loss"] < 3.0
    if device.type == "cuda":
        (speed,) = checkout.glob(f"results/replications/*/speed/pretrain/{cell}.json")
        assert json.loads(speed.read_text())["metrics"]["processes"] == gpus


def test_the_campaign_times_a_training(checkout, device):
    """Vittt-T at 224² in bf16: the record has its rate and its share of the GPU's peak."""
    from repro.bench.campaign import TRAINED, time_training
    from repro.core.runtime import find_peak

    assert time_training(Paths(checkout), None)
    (file,) = checkout.glob(f"results/replications/*/{TRAINED}.json")
    metrics = json.loads(file.read_text())["metrics"]
    assert metrics["throughput_img_per_s"] > 0 and metrics["peak_memory_mib"] > 0
    if find_peak(torch.cuda.get_device_name()):
        assert 0 < metrics["mfu_percent"] < 100
