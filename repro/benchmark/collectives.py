"""Whether the GPUs of this machine can talk to each other, and how fast: all-reduce by NCCL, under torchrun as a training has it."""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from ..core.errors import RunError
from ..core.paths import Paths
from ..core.record import make_identity, read_json, write_record
from ..core.runtime import device_label, device_slug

REPEATS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectivesParams:
    """What the record answers: the sizes of the fp32 messages in MiB. The gradients of Vittt-T have 27, those of Vittt-B 390."""

    mib: tuple[int, ...] = (1, 27, 390)


def run_collectives(
    paths: Paths, params: CollectivesParams = CollectivesParams(), device: str = "cuda", processes: int | None = None
) -> bool:
    """Write results/measured/<device>/collectives.json, unless it is there and of this code.

    metrics: `backend`, `world_size`, and `rows`, {mib, correct, median_ms, bus_gb_per_s} each, where the bus carries 2 (n − 1)/n of
    the message.

    Raises:
        RunError: the processes failed, or a sum is wrong.
    """
    started = time.monotonic()
    if device == "cuda" and not torch.cuda.is_available():
        raise RunError("PyTorch sees no CUDA device")
    world_size = processes or torch.cuda.device_count()
    shown = {"device": device_label(device), "dtype": "fp32", "backend": "nccl" if device == "cuda" else "gloo"}
    identity = make_identity(paths.root, ["repro.benchmark.collectives"], params, **shown)
    file = paths.measured(device_slug(device)) / "collectives.json"
    if file.is_file() and read_json(file)["identity"].get("code_hash") == identity.get("code_hash"):
        return True
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", "-m", __name__, device]
    done = subprocess.run([*command, *map(str, params.mib)], cwd=paths.root, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RunError(f"torchrun: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    metrics = json.loads(lines[-1])
    for row in metrics["rows"]:
        if world_size == 1:
            row["bus_gb_per_s_reason"] = "one process has nobody to talk to"
    write_record(file.parent, metrics, identity, time.monotonic() - started, name="collectives")
    if not all(row["correct"] for row in metrics["rows"]):
        raise RunError("an all-reduce gave a wrong sum, see collectives.json")
    return True


def _measure(device: str, sizes: list[int]) -> dict[str, Any]:
    """In a process of torchrun: all-reduce each size, and time it."""
    rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    world, where = dist.get_world_size(), torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    rows = []
    for mib in sizes:
        x = torch.full((mib * 2**18,), float(rank + 1), device=where)
        dist.all_reduce(x)
        correct = bool((x == world * (world + 1) / 2).all())
        taken = []
        for _ in range(REPEATS):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(x.fill_(1.0))
            if device == "cuda":
                torch.cuda.synchronize(where)
            taken.append(time.perf_counter() - began)
        seconds = statistics.median(taken)
        rate = 2 * (world - 1) / world * mib * 2**20 / seconds / 1e9 if world > 1 else None
        rows.append({"mib": mib, "correct": correct, "median_ms": 1e3 * seconds, "bus_gb_per_s": rate})
    dist.destroy_process_group()
    return {"world_size": world, "rows": rows}


if __name__ == "__main__":
    found = _measure(sys.argv[1], [int(size) for size in sys.argv[2:]])
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)
