"""The recurrent and the parallel form of inner learners: time and memory over the tokens. What `repro forms` writes.

Both forms of a learner run in turn, so that a drifting clock or a busy machine affects both alike, and each ratio is of
one turn.
"""

import dataclasses
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kernels import ttt_linear
from kernels.ttt_linear.plain import ttt_linear_plain

from ..core.errors import RunError
from ..core.noise import find_noise
from ..core.paths import Paths
from ..core.record import make_identity, write_record
from ..core.runtime import Runtime, choose_device, device_label, device_slug
from ..models.fast_weights import LADDER, find_obstacle, learn
from ..models.inner import InnerLoop
from ..models.registry import family_module
from .memory import measure_peak_mib
from .speed import SLOW_STEP_S, SLOW_STEPS, STEP_TIMERS, RowSpec, measure, median_interval

Form = Literal["recurrent", "parallel"]
TURNS = 11
TURN_MS = 5.0  # a form runs so often in a turn that it takes about as long, or once
BACKBONE = "ladder_vittt_tiny_patch16_224"
# (step, backend) of Vittt-T as a whole
BACKBONES = (("own", "auto"), ("plain", "recurrent"), ("plain", "parallel"), ("dot", "recurrent"), ("dot", "parallel"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured alike.

    Args:
        name: `vision` or `paper`.
        tokens: the lengths of the sequence.
        heads, head_dim: of every learner; LaCT has as many hidden units.
        lact_chunk, vittt_chunk: tokens of a chunk.
        vittt: whether Vittt's learners are measured beside LaCT's.
        modes: `infer` for a forward pass, `train` for forward and backward.
    """

    name: str
    tokens: tuple[int, ...]
    heads: int
    head_dim: int
    lact_chunk: int
    vittt_chunk: int = 16
    vittt: bool = False
    modes: tuple[Literal["infer", "train"], ...] = ("infer",)


SETTINGS = (
    # the width and heads of a backbone of size T, from 224 x 224 pixels to 2048 x 2048
    Setting(
        name="vision",
        tokens=(196, 784, 1600, 3136, 6400, 16384),
        heads=3,
        head_dim=64,
        lact_chunk=256,
        vittt=True,
        modes=("infer", "train"),
    ),
    # that of the authors' own benchmark (JunchenLiu77/flame@8765ce0), which is in bf16
    Setting(name="paper", tokens=(32768,), heads=4, head_dim=384, lact_chunk=2048),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormsParams:
    """What a record answers: the settings, and the sides of the square images in pixels at which whole backbones run."""

    settings: tuple[Setting, ...] = SETTINGS
    image_sizes: tuple[int, ...] = (224, 1280)


def run_forms(paths: Paths, runtime: Runtime, params: FormsParams = FormsParams()) -> None:
    """Measure both forms on this machine's device and write results/measured/<device>/forms.json.

    metrics: `rows`, one for each setting, learner, form, mode and number of tokens, {setting, learner, form, mode,
    tokens, heads, head_dim, chunk_size, latency_ms, latency_ms_ci95, samples_ms, tokens_m_per_s, peak_memory_mib,
    noisy}, where tokens per second count a token once for each head, as the paper does; `ratios`, one for each that has
    both forms, {setting, learner, mode, tokens, ratio, ratio_ci95}, recurrent over parallel time; `backbones`, rows of
    `repro.bench.speed.measure` of Vittt-T with each learner.

    Raises:
        RunError: a measuring process broke.
    """
    started = time.monotonic()
    device = choose_device(runtime.device)
    if runtime.threads and device.type == "cpu":
        torch.set_num_threads(runtime.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, ratios = [], []
    for setting, tokens in ((each, tokens) for each in params.settings for tokens in each.tokens):
        learners = _make_learners(setting, tokens, device.type)
        for mode, (name, forms) in itertools.product(setting.modes, learners.items()):
            measured = _measure_forms(forms, mode, device.type)
            about = {"setting": setting.name, "learner": name, "mode": mode, "tokens": tokens}
            rows += [_make_row(about, setting, form, found) for form, found in measured.items()]
            if len(measured) == 2:
                ratios.append(about | _compare(measured))
            print(_describe(about, measured), flush=True)
    backbones = [
        _measure_backbone(step, backend, side, device.type, runtime)
        for side in params.image_sizes
        for step, backend in BACKBONES
    ]
    shown = {"device": device_label(device, runtime.threads), "dtype": "fp32", "backend": "torch"}
    code = ["repro.bench.forms", "repro.bench.speed", family_module(BACKBONE)]
    identity = make_identity(paths.root, code, params, **shown)
    metrics = {"rows": rows, "ratios": ratios, "backbones": backbones}
    folder = paths.measured(device_slug(device))
    write_record(folder, metrics, identity, time.monotonic() - started, name="forms")
    print(f"written: {(folder / 'forms.json').relative_to(paths.root)}")


def _make_learners(setting: Setting, tokens: int, device: str) -> dict[str, dict[Form, Callable[[], Tensor]]]:
    """Learner -> form -> a forward pass. Those with one form are there to be compared with."""
    generator = torch.Generator().manual_seed(0)
    h, d = setting.heads, setting.head_dim

    def draw(*shape: int, uniform: bool = False) -> Tensor:
        make = torch.rand if uniform else torch.randn
        return make(*shape, generator=generator).to(device)

    q, k, v = (draw(1, h, tokens, d) for _ in range(3))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    rates, momentum = draw(1, h, tokens, 3, uniform=True) / 100, draw(1, h, tokens, uniform=True)
    for x in (q, k, v, rates, momentum):
        x.requires_grad_()
    found: dict[str, dict[Form, Callable[[], Tensor]]] = {}
    for step in ("own", "v1", "v2", "v3", "v4", "v5", "v6"):
        loop = InnerLoop(**LADDER[step], order="before", chunk_size=setting.lact_chunk)
        weights = [(draw(h, *shape) / shape[0] ** 0.5).requires_grad_() for shape in loop.shapes(d)]
        given = (None if loop.rate == "fixed" else rates[..., : len(loop.learned)], momentum if loop.momentum else None)
        forms: tuple[Form, ...] = ("recurrent",) if find_obstacle(loop) else ("recurrent", "parallel")

        def run(form: Form, loop: InnerLoop = loop, weights: list = weights, given: tuple = given) -> Tensor:
            return learn(loop, weights, q, k, v, (1, tokens), *given, form)

        found[f"lact_{step}"] = {form: (lambda form=form, run=run: run(form)) for form in forms}
    if setting.vittt:
        tokens_first = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
        lr = (draw(1, tokens, h, uniform=True) / d).requires_grad_()
        scale = 1 / torch.arange(1.0, setting.vittt_chunk + 1, device=device)
        W0 = (draw(h, d, d) / d**0.5).requires_grad_()
        b0 = torch.zeros(h, d, device=device)
        bias = torch.zeros(h, d, device=device)
        weight = torch.ones(h, d, device=device)
        chunk = {"chunk_size": setting.vittt_chunk}
        found["vittt_own"] = {"recurrent": lambda: ttt_linear(*tokens_first, lr, scale, W0, b0, weight, bias, **chunk)}
        for name, loss in (("plain", "mse"), ("dot", "dot")):
            found[f"vittt_{name}"] = {
                form: (
                    lambda form=form, loss=loss: ttt_linear_plain(
                        *tokens_first, lr, scale, W0, loss=loss, form=form, **chunk
                    )
                )
                for form in ("recurrent", "parallel")
            }
    return found


def _measure_forms(forms: dict[Form, Callable[[], Tensor]], mode: str, device: str) -> dict[Form, dict[str, Any]]:
    """Form -> {samples_ms, peak_memory_mib, threads, cores, load_average}, the samples of both forms taken in turn."""

    def infer(forward: Callable[[], Tensor]) -> None:
        with torch.no_grad():
            forward()

    def train(forward: Callable[[], Tensor]) -> None:
        forward().square().mean().backward()

    run = infer if mode == "infer" else train
    load = {"load_average": round(os.getloadavg()[0], 2)} if hasattr(os, "getloadavg") else {}
    steps = {form: (lambda forward=forward: run(forward)) for form, forward in forms.items()}
    samples: dict[Form, list[float]] = {form: [] for form in forms}
    timer = STEP_TIMERS[device]
    first_ms = {form: min(timer(step) for _ in range(2)) for form, step in steps.items()}
    counts = {form: math.ceil(TURN_MS / time_ms) for form, time_ms in first_ms.items()}
    for _ in range(SLOW_STEPS if sum(first_ms.values()) > SLOW_STEP_S * 1e3 else TURNS):
        for form, step in steps.items():
            samples[form].append(
                timer(lambda step=step, count=counts[form]: [step() for _ in range(count)]) / counts[form]
            )
    machine = {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "device": device, **load}
    return {
        form: {"samples_ms": samples[form], "peak_memory_mib": measure_peak_mib(step, device), **machine}
        for form, step in steps.items()
    }


def _make_row(about: dict[str, Any], setting: Setting, form: Form, found: dict[str, Any]) -> dict[str, Any]:
    samples = found["samples_ms"]
    latency = statistics.median(samples)
    chunk = setting.vittt_chunk if about["learner"].startswith("vittt") else setting.lact_chunk
    row = {
        **about,
        "form": form,
        "heads": setting.heads,
        "head_dim": setting.head_dim,
        "chunk_size": chunk,
        **found,
        "status": "ok",
    }
    row |= {
        "latency_ms": latency,
        "latency_ms_ci95": median_interval(samples),
        "samples_ms": [round(sample, 3) for sample in samples],
    }
    row["tokens_m_per_s"] = about["tokens"] * setting.heads / latency / 1e3
    if row["latency_ms_ci95"] is None:
        row["latency_ms_ci95_reason"] = _too_few(samples)
    return row | {"noisy": find_noise(row)}


def _compare(measured: dict[Form, dict[str, Any]]) -> dict[str, Any]:
    """How many times as fast the parallel form is."""
    pairs = zip(measured["recurrent"]["samples_ms"], measured["parallel"]["samples_ms"], strict=True)
    turns = [recurrent / parallel for recurrent, parallel in pairs]
    interval = median_interval(turns)
    return {"ratio": statistics.median(turns), "ratio_ci95": interval} | (
        {} if interval else {"ratio_ci95_reason": _too_few(turns)}
    )


def _too_few(samples: Sequence[float]) -> str:
    return f"a turn over {SLOW_STEP_S:g} s leaves {len(samples)} turns, too few for a 95 % interval"


def _describe(about: dict[str, Any], measured: dict[Form, dict[str, Any]]) -> str:
    shown = (
        f"{form} {statistics.median(found['samples_ms']):.2f} ms, {found['peak_memory_mib']:.1f} MiB"
        for form, found in measured.items()
    )
    return f"{about['setting']}, {about['learner']}, {about['mode']}, {about['tokens']:,} tokens: {'; '.join(shown)}"


def _measure_backbone(step: str, backend: str, side: int, device: str, runtime: Runtime) -> dict[str, Any]:
    options = {} if step == "own" else {"step": step}
    spec = RowSpec(
        model=BACKBONE,
        options=options,
        image_size=(side, side),
        backend=backend,
        device=device,
        threads=runtime.threads,
        budget_s=300.0,
    )
    try:
        row = measure(spec)
    except RuntimeError as error:
        raise RunError(f"forms: {error}") from None
    row["noisy"] = find_noise(row)
    print(
        f"{spec.row_id}, {backend}: {row['status']}" + (f", {row['latency_ms']:.1f} ms" if row["latency_ms"] else ""),
        flush=True,
    )
    return row
