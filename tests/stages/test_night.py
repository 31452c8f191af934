"""A cell of CIFAR-100 from the published files to the page: it is killed on the way and ends like one that was not."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

CELL = Path("results/pretrain/vittt_tiny_cifar100")
COMMAND = [sys.executable, "-m", "repro", "pretrain", "--cell", CELL.name]


def test_from_the_files_to_the_page(checkout, cifar100_files, repro_cli):
    params = yaml.safe_load(Path("params.yaml").read_text())
    params["runtime"] |= {
        "save_every_steps": 1,
        "data_roots": {"cifar100": "data/c", "torchvision": str(cifar100_files)},
    }
    expected = {"classes": 2, "train": 8, "tune": 4, "test": 4}
    split = {"images_per_class": 2, "seed": 0}
    params["prepare_data"] = {"cifar100": {"kind": "cifar100", "expected": expected, "tune_split": split}}
    cell = params["pretrain"].pop("nano") | {"data": "cifar100", "batch_size": 4, "epochs": 30, "snapshot_epochs": []}
    cell |= {"options": {"depth": 1, "patch_size": 4}, "evaluate_every": 30}
    params |= {"report": {"speed_dtype": "fp16"}}
    params["pretrain"][CELL.name] = cell
    Path("params.yaml").write_text(yaml.safe_dump(params))
    assert repro_cli("prepare-data")[0] == 0
    assert repro_cli("pretrain", "--cell", CELL.name)[0] == 0
    whole = (CELL / "weights.safetensors").read_bytes()
    shutil.rmtree(CELL)
    shutil.rmtree(".runs")
    process = subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not any(Path(".runs").rglob("seed_*/*.pt")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not (CELL / "weights.safetensors").exists()
    code, out, _ = repro_cli("pretrain", "--cell", CELL.name)
    assert code == 0 and "continu" in out
    assert (CELL / "weights.safetensors").read_bytes() == whole
    code, _, err = repro_cli("report")
    assert code == 0, err
    page = Path("results/tables.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| Vittt-T |") and line.endswith("| – |"))
    assert row.count("%") == 1, "the slot of CIFAR-100 is filled, that of ImageNet-100 is not"
