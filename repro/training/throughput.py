"""The inference throughput of a trained variant, in a record beside its own: speed.json."""

import time

from ..core.errors import RunError
from ..core.record import make_identity, read_json, write_record
from ..core.runtime import choose_device, device_label
from ..measure.speed import RowSpec, measure
from .job import Cell

BATCH = 64  # of Fig. 6 of Vision-TTT
DTYPE = {"cpu": "fp32", "cuda": "fp16"}
NAME = "speed"


def has_throughput(cell: Cell) -> bool:
    """Whether the cell's folder has a speed.json of the weights that lie there."""
    file = cell.folder / f"{NAME}.json"
    trained = read_json(cell.folder / "metrics.json")["metrics"]["weights_hash"]
    return file.is_file() and read_json(file)["metrics"]["weights_hash"] == trained


def measure_throughput(cell: Cell) -> float | None:
    """Measure a trained classifier and write speed.json into the cell's folder; images per second, or None with the reason there.

    The batch is 64, or the largest power of two below that for which memory suffices; weights and inputs are fp32 on a CPU and fp16
    on a GPU.

    Raises:
        RunError: the measuring process broke.
    """
    started, params, runtime = time.monotonic(), cell.params, cell.runtime
    device, side, batch_size = choose_device(runtime.device), params.transform.image_size, BATCH
    while True:
        spec = RowSpec(
            model=params.model,
            options=params.options,
            image_size=(side, side),
            batch_size=batch_size,
            dtype=DTYPE[device.type],
            device=device.type,
            threads=runtime.threads,
        )
        try:
            row = measure(spec)
        except RuntimeError as error:
            raise RunError(f"{cell.where}: {error}") from None
        if row["status"] != "oom" or batch_size == 1:
            break
        batch_size //= 2
    label = device_label(device, runtime.threads)  # the training may have had fewer threads
    metrics = {name: row[name] for name in ("throughput_img_per_s", "latency_ms", "macs_g", "backend")}
    metrics |= {"batch_size": batch_size, "dtype": spec.dtype, "device": label}
    metrics["weights_hash"] = read_json(cell.folder / "metrics.json")["metrics"]["weights_hash"]
    if row["status"] != "ok":
        metrics |= {f"{name}_reason": row["reason"] for name in ("throughput_img_per_s", "latency_ms")}
    identity = make_identity(cell.paths.root, [f"stages.{cell.stage}"], params, device=label, dtype=spec.dtype, backend=str(row["backend"]))
    write_record(cell.folder, metrics, identity, time.monotonic() - started, name=NAME)
    return row["throughput_img_per_s"]
