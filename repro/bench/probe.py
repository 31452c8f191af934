"""The first measurements on a GPU: correctness of frozen models, the host's share of a pass, time by kernel, and the
gain of compilation.

All sections run in one process, and each line is written as soon as it is measured. Each section has its own time
limit. A section that fails or exceeds its limit leaves a line with the reason, and the next one begins.
"""

import contextlib
import dataclasses
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ..core.csvfile import read_typed_csv, write_csv
from ..core.paths import Paths
from ..core.record import installed_version, label_commit
from ..core.runtime import device_label, device_slug
from . import build
from .unfinished import read_clock

COLUMNS = tuple(
    "section model image_size batch_size mode measure kernel calls value reason device commit torch triton measured".split()
)
TYPES = {"image_size": int, "batch_size": int, "calls": int, "value": float}
KERNELS = 16  # how many of a pass's slowest kernels are listed
SAMPLES, FEWEST, SAMPLING_S = 50, 5, 2.0  # at most 50 samples within 2 s, at least 5
Corner = tuple[int, int]  # (side of the images in pixels, batch size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a probe: models, corners (image size, batch), and the dtype of inference and of autocast.

    The corner with the most work must be the first one: `time_plain` takes it alone, and `time_reduced` leaves it out.
    """

    model: str = "vittt_tiny_patch16_224"
    baseline: str = "deit_tiny_patch16_224"
    corners: tuple[Corner, ...] = ((1280, 64), (1280, 1), (224, 64), (224, 1))
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"


class ProbeLines:
    """The lines of a probe in a CSV file; of those in the file, the ones that were measured since `began` stay.

    Args:
        plan: models and corners, see `Plan`.
        path: the CSV file.
        root: the root of the work tree, whose commit is written in each line.
        began: the start of the series, see `unfinished.read_clock`.
    """

    def __init__(self, plan: Plan, path: Path, root: Path, began: str):
        self.plan, self._path, self._section = plan, path, ""
        self.lines = [line for line in read_typed_csv(path, TYPES) if (line["measured"] or "") >= began]
        here = {"device": device_label(plan.device), "commit": label_commit(root)}
        self._here = here | {name: installed_version(name) for name in ("torch", "triton")}

    def say(self, measure: str, value: float | None, **about: Any) -> None:
        """Add a line, write the file and print the line; with a value of None, `about` gives the `reason`."""
        found = {"section": self._section, "measure": measure, "value": value, **about}
        self.lines.append(found | self._here | {"measured": read_clock()})
        write_csv(self._path, self.lines, COLUMNS)
        what = " ".join(str(each) for name, each in found.items() if name != "value" and each is not None)
        print(f"  {what}: {'null' if value is None else f'{value:.5g}'}", flush=True)

    def is_complete(self, name: str) -> bool:
        """Tell whether a section has ended, by itself, by an error or at its own limit."""
        return any(line["section"] == name and line["measure"] == "complete" for line in self.lines)

    @contextlib.contextmanager
    def section(self, name: str, limit_s: float, *, is_cut: bool = False) -> Iterator[None]:
        """Open a section with a time limit in seconds; an error in it, or the limit, becomes a line of the file.

        With `is_cut` the limit is that of the call, and a section that exceeds it is not complete. Lines of the section
        from a call that was cut are replaced.
        """
        self._section = name
        self.lines = [line for line in self.lines if line["section"] != name]
        print(f"{name} (at most {limit_s:.0f} s)", flush=True)

        over, is_late = f"over its limit of {limit_s:g} s", False

        def stop(*_: Any) -> None:
            nonlocal is_late
            is_late = True  # torch.compile raises an error of its own in place of this one
            raise TimeoutError(over)

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            yield
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.say("complete", 1.0)
        except Exception as error:
            said = next(iter(str(error).strip().splitlines()), "no message")
            reason = over if is_late else f"{type(error).__name__}: {said[:200]}"
            self.say("cut" if is_cut and is_late else "complete", None, reason=reason)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def probe_device(paths: Paths, minutes: float | None, began: str, plan: Plan | None = None) -> bool:
    """Write results/speed/probe/<device>.csv, and return whether all sections are complete.

    `minutes` is the limit of this call; None: no limit. Sections that are complete since `began` are not repeated.
    """
    plan = plan or Plan()
    probe = ProbeLines(plan, paths.speed / "probe" / f"{device_slug(plan.device)}.csv", paths.root, began)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    for name, limit_s, run in PROBES:
        if probe.is_complete(name):
            continue
        left_s = limit_s if end is None else min(limit_s, end - time.monotonic())
        if left_s <= 0:
            return False
        with probe.section(name, left_s, is_cut=left_s < limit_s):
            run(probe)
    return all(probe.is_complete(name) for name, *_ in PROBES)


def check_frozen(probe: ProbeLines) -> None:
    """Compare a frozen model with the plain path: in repeated calls, after another image size, and as a CUDA graph."""
    for side in sorted({side for side, _ in probe.plan.corners}):
        corner = side, 2
        plain, model, x = _build(probe, side, plain=True), _build(probe, side), _draw(probe, corner)
        with torch.inference_mode():
            expected = plain(x).float()
            model.freeze(graphs=0)
            outs = [model(x).float() for _ in range(3)]
            # another image size in between must not spoil buffers that the model keeps for the first one
            model(x[..., model.patch_size :].contiguous())
            outs.append(model(x).float())
            if probe.plan.device == "cuda":
                replay, out = _capture(model, x)
                out.zero_()  # so that only a replay can fill it
                replay()
                outs.append(out.float())
        _say(probe, "relative_error", max(_error(out, expected) for out in outs), probe.plan.model, corner)
        _say(probe, "equal_bits", float(all(torch.equal(out, outs[0]) for out in outs)), probe.plan.model, corner)


def time_inference(probe: ProbeLines) -> None:
    """Time both models at each corner: eager, with the host's share and the slowest kernels, and as a CUDA graph."""
    for corner in probe.plan.corners:
        for name in (probe.plan.model, probe.plan.baseline):
            _time_inference(probe, name, corner, "eager")


def time_plain(probe: ProbeLines) -> None:
    """Time the model without the fused kernels, at the largest corner."""
    _time_inference(probe, probe.plan.model, probe.plan.corners[0], "plain")


def time_reduced(probe: ProbeLines) -> None:
    """Time inference under `torch.compile(mode="reduce-overhead")` at every corner but the first.

    The first one has the most work, behind which the host's time is hidden: a CUDA graph can gain nothing there.
    """
    for corner in probe.plan.corners[1:]:
        for name in (probe.plan.model, probe.plan.baseline):
            model, x = _build(probe, corner[0], name), _draw(probe, corner)
            if name == probe.plan.model:
                model.freeze(graphs=0)
            torch.compiler.reset()
            fast = torch.compile(model, mode="reduce-overhead", fullgraph=True)
            with torch.inference_mode():
                _say(
                    probe, "latency_ms", _time(probe, lambda run=fast, x=x: run(x))[0], name, corner, "reduce-overhead"
                )


def time_steps(probe: ProbeLines, *, compiled: bool = False) -> None:
    """Time a training step in autocast at the smallest image size and the largest batch: host, memory, kernels."""
    corner = min(side for side, _ in probe.plan.corners), max(batch for _, batch in probe.plan.corners)
    mode = "train, compiled" if compiled else "train"
    for name in (probe.plan.model, probe.plan.baseline):
        model, x = _build(probe, corner[0], name, dtype=torch.float32).train(), _draw(probe, corner, torch.float32)
        labels = torch.arange(len(x), device=x.device) % model.num_classes
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
        torch.compiler.reset()
        network = torch.compile(model) if compiled else model

        def step(network=network, x=x, labels=labels, optimizer=optimizer) -> None:
            with torch.autocast(x.device.type, probe.plan.dtype):
                out = network(x)
            F.cross_entropy(out.float(), labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        _say_times(probe, step, name, corner, mode)
        if x.device.type == "cuda":  # the peak since `_time`, within `_say_times`, has reset it after its warm-up
            _say(probe, "peak_memory_mib", torch.cuda.max_memory_allocated() / 2**20, name, corner, mode)


# (name, limit in seconds, function), the most important first, since a limit of the whole probe cuts the last ones
PROBES: tuple[tuple[str, float, Callable[[ProbeLines], None]], ...] = (
    ("right", 90, check_frozen),
    ("inference", 90, time_inference),
    ("plain block", 30, time_plain),
    ("training", 60, time_steps),
    ("training, compiled", 100, partial(time_steps, compiled=True)),
    ("reduce-overhead", 100, time_reduced),
)


def _time_inference(probe: ProbeLines, name: str, corner: Corner, mode: str) -> None:
    """Time a model's forward pass as it is and as a CUDA graph; `mode` is `eager`, or `plain` without fused kernels."""
    model, x = _build(probe, corner[0], name, plain=mode == "plain"), _draw(probe, corner)
    if name == probe.plan.model and mode != "plain":
        model.freeze(graphs=0)
    with torch.inference_mode():
        _say_times(probe, lambda: model(x), name, corner, mode)
        graph = "graph" if mode == "eager" else f"{mode}, graph"
        if probe.plan.device == "cuda":
            _say(probe, "latency_ms", _time(probe, _capture(model, x)[0])[0], name, corner, graph)
        else:
            _say(probe, "latency_ms", None, name, corner, graph, reason="a CPU has no CUDA graphs")


def _say_times(probe: ProbeLines, step: Callable[[], Any], name: str, corner: Corner, mode: str) -> None:
    """Write the time of a step, the host's time to launch it, and its slowest kernels."""
    latency_ms, host_ms = _time(probe, step)
    _say(probe, "latency_ms", latency_ms, name, corner, mode)
    _say(probe, "host_ms", host_ms, name, corner, mode)
    for kernel, calls, ms in _find_kernels(probe, step):
        _say(probe, "kernel_ms", ms, name, corner, mode, kernel=kernel, calls=calls)


def _say(
    probe: ProbeLines, measure: str, value: float | None, name: str, corner: Corner, mode: str = "", **more: Any
) -> None:
    """Write a line about a model at a corner; an empty `mode` writes none."""
    side, batch_size = corner
    probe.say(measure, value, model=name, image_size=side, batch_size=batch_size, mode=mode or None, **more)


def _build(
    probe: ProbeLines, side: int, name: str = "", *, plain: bool = False, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build a model, by default the plan's own, with the same weights each time; `plain` is without fused kernels."""
    torch.manual_seed(0)
    model = build.build_eval_model(name or probe.plan.model, {}, (side, side), fused=True)
    for block in model.blocks if plain else ():
        block.is_fusible = False
    return model.to(probe.plan.device, dtype or probe.plan.dtype).eval()


def _draw(probe: ProbeLines, corner: Corner, dtype: torch.dtype | None = None) -> Tensor:
    """Draw the images of a corner; like `_build`, in the plan's dtype by default."""
    side, batch_size = corner
    dtype = dtype or probe.plan.dtype
    return torch.randn(batch_size, 3, side, side, device=probe.plan.device, dtype=dtype)


def _time(probe: ProbeLines, step: Callable[[], Any]) -> tuple[float, float]:
    """Return the median milliseconds of a step, and of the host's part, until the step is launched."""
    wait = torch.cuda.synchronize if probe.plan.device == "cuda" else lambda: None
    for _ in range(2):
        step()
    if probe.plan.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    host, taken, end = [], [], time.monotonic() + SAMPLING_S
    while len(taken) < FEWEST or (time.monotonic() < end and len(taken) < SAMPLES):
        wait()
        began = time.perf_counter()
        step()
        launched = time.perf_counter()
        wait()
        host.append(launched - began)
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken), 1e3 * statistics.median(host)


def _find_kernels(probe: ProbeLines, step: Callable[[], Any]) -> list[tuple[str, int, float]]:
    """Return (name, calls, milliseconds) of the slowest kernels of a step; on a CPU, of its operators."""
    on_gpu = probe.plan.device == "cuda"
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[kind]) as seen:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    found = [
        (each.key[:80], each.count, (each.self_device_time_total if on_gpu else each.self_cpu_time_total) / 1e3)
        for each in seen.key_averages()
    ]
    return sorted(found, key=lambda each: -each[2])[:KERNELS]


def _capture(model: nn.Module, x: Tensor) -> tuple[Callable[[], None], Tensor]:
    """Capture a forward pass as a CUDA graph; return a function that replays it, and its output tensor."""
    for _ in range(3):  # compilation and autotuning are not allowed during a capture
        model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x)
    return graph.replay, out


def _error(found: Tensor, expected: Tensor) -> float:
    """Return the Euclidean norm of the difference over that of the expected tensor."""
    return float((found - expected).norm() / expected.norm())


def describe_probes(folder: Path) -> str:
    """Tabulate the times of all probes in a folder as Markdown; the row of a CUDA graph shows the GPU's time alone."""
    table = ["| device, commit | model, image size, batch | mode | ms | of these the host's | slowest kernel |"]
    table.append("|---|---|---|---:|---:|---|")
    for file in sorted(folder.glob("*.csv")):
        cases: dict[tuple, dict[str, Any]] = {}
        for line in read_typed_csv(file, TYPES):
            if line["measure"] == "complete" and line["value"] is not None:
                continue
            where = f"{line['device']}, {line['commit']}", line["section"], line["model"], line["image_size"]
            known = cases.setdefault((*where, line["batch_size"], line["mode"]), {})
            known.setdefault(line["measure"], line)  # kernels are sorted, so the first is the slowest
        for (device, section, model, side, batch_size, mode), found in cases.items():
            case = f"{model} {side}², {batch_size}" if model else section
            if (time_ms := found.get("latency_ms")) is not None:
                host, kernel = found.get("host_ms"), found.get("kernel_ms")
                slowest = f"`{kernel['kernel']}` {kernel['value']:.3g} ms, {kernel['calls']} calls" if kernel else "–"
                said = _show(time_ms), _show(host) if host else "–", slowest
            else:
                said = ", ".join(f"{name} {_show(each)}" for name, each in found.items()), "–", "–"
            table.append(f"| {device} | {case} | {mode or section} | {' | '.join(said)} |")
    return "\n".join(table) if len(table) > 2 else "**No GPU is probed**: `make measure-gpu` does it first."


def _show(line: dict[str, Any]) -> str:
    """Show the value of a probe's line, or the reason why there is none."""
    return f"null: {line['reason']}" if line["value"] is None else f"{line['value']:.4g}"
