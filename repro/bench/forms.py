"""The recurrent and the parallel form of inner learners: time and memory over the tokens. What `repro kernels forms` writes.

Both forms of a learner run in turn, and each ratio is of one turn.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kernels import ttt_linear
from kernels.ttt_linear.plain import ttt_linear_plain

from ..core.errors import RunError
from ..core.paths import Paths
from ..core.record import find_commit, installed_version, make_identity, read_json, write_record
from ..core.runtime import Runtime, choose_device, device_label, device_slug
from ..models.fast_weights import LADDER, find_obstacle, learn
from ..models.inner import InnerLoop
from .memory import measure_peak_mib
from .rows import RowStore
from .speed import SLOW_STEPS, RowSpec, describe_samples, measure, median_interval, read_load, time_in_turn

Form = Literal["recurrent", "parallel"]
BOTH: tuple[Form, ...] = ("recurrent", "parallel")
TURNS = 11
TURN_MS = 5.0
BACKBONE = "ladder_vittt_tiny_patch16_224"
# (step, backend) of the backbone as a whole
BACKBONES = (("own", "auto"), ("plain", "recurrent"), ("plain", "parallel"), ("dot", "recurrent"), ("dot", "parallel"))
_ROW_KEY = ("setting", "learner", "mode", "tokens", "form")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured alike.

    Args:
        name: `vision` or `paper`.
        tokens: the lengths of the sequence.
        heads, head_dim: of every learner; LaCT has as many hidden units.
        chunks: the learners that are measured, `lact` and `vittt` -> tokens of a chunk.
        modes: `infer` for a forward pass, `train` for forward and backward.
    """

    name: str
    tokens: tuple[int, ...]
    heads: int
    head_dim: int
    chunks: Mapping[str, int]
    modes: tuple[Literal["infer", "train"], ...] = ("infer",)


SETTINGS = (
    # the width and heads of a backbone of size T, from 224 x 224 pixels to 2048 x 2048
    Setting(
        name="vision",
        tokens=(196, 784, 1600, 3136, 6400, 16384),
        heads=3,
        head_dim=64,
        chunks={"lact": 256, "vittt": 16},
        modes=("infer", "train"),
    ),
    # that of the authors' own benchmark (JunchenLiu77/flame@8765ce0), which is in bf16
    Setting(name="paper", tokens=(32768,), heads=4, head_dim=384, chunks={"lact": 2048}),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormsParams:
    """What a record answers: the settings, and the sides of the square images in pixels at which whole backbones run."""

    settings: tuple[Setting, ...] = SETTINGS
    image_sizes: tuple[int, ...] = (224, 1280)


def run_forms(paths: Paths, runtime: Runtime, params: FormsParams = FormsParams()) -> None:
    """Measure both forms on this machine's device and write results/replications/<device>/forms.json.

    Rows of an earlier call are reused where the same code measured them. metrics: `rows`, one for each setting,
    learner, form, mode and number of tokens, {setting, learner, form, mode, tokens, heads, head_dim, chunk_size,
    latency_ms, latency_ms_ci95, samples_ms, tokens_m_per_s, peak_memory_mib, noisy}, where tokens per second count a
    token once for each head, as the paper does; `ratios`, one for each that has both forms, {setting, learner, mode,
    tokens, ratio, ratio_ci95}, recurrent over parallel time; `backbones`, rows of `repro.bench.speed.measure` of
    Vittt-T with each learner.

    Raises:
        RunError: a measuring process broke.
    """
    started = time.monotonic()
    device = choose_device(runtime.device)
    if runtime.threads and device.type == "cpu":
        torch.set_num_threads(runtime.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    shown = {"device": device_label(device, runtime.threads), "dtype": "fp32", "backend": "torch"}
    here = {"device": shown["device"], "torch_version": installed_version("torch")}
    here["commit"] = find_commit(paths.root) or "not in Git"
    file = paths.replications(device_slug(device)) / "forms.json"

    def save(store: RowStore) -> None:
        backbones = [row for row in store.rows if "learner" not in row]
        rows = [row for row in store.rows if "learner" in row]
        metrics = {"rows": rows, "ratios": _compare(rows), "backbones": backbones}
        # a record is as old as its oldest row
        identity = before["identity"] if store.list_old() else make_identity(paths.root, params, **shown)
        write_record(file, metrics, identity, time.monotonic() - started)

    before = read_json(file) if file.is_file() else {"metrics": {"rows": [], "backbones": []}}
    kept = {_identify(row): row for name in ("rows", "backbones") for row in before["metrics"][name]}
    with RowStore(kept, lambda what: here, save) as store:
        for setting, tokens in ((each, tokens) for each in params.settings for tokens in each.tokens):
            learners = _make_learners(setting, tokens, device.type)
            for mode, (name, forms) in itertools.product(setting.modes, learners.items()):
                about = {"setting": setting.name, "learner": name, "mode": mode, "tokens": tokens}
                _measure_learner(store, about, setting, forms, device.type)
        for side, (step, backend) in itertools.product(params.image_sizes, BACKBONES):
            _measure_backbone(store, step, backend, side, device.type, runtime)
        store.forget(store.list_old())
    print(f"written: {file.relative_to(paths.root)}")


def _identify(row: Mapping[str, Any]) -> tuple:
    """What a row of a learner, or of a backbone, measures."""
    if "learner" in row:
        return tuple(row[name] for name in _ROW_KEY)
    step = row["options"].get("step", "own")
    return step, "auto" if step == "own" else row["backend"], *row["image_size"]


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
        loop = InnerLoop(**LADDER[step], order="before", chunk_size=setting.chunks["lact"])
        weights = [(draw(h, *shape) / shape[0] ** 0.5).requires_grad_() for shape in loop.shapes(d)]
        given = (None if loop.rate == "fixed" else rates[..., : len(loop.learned)], momentum if loop.momentum else None)
        run = partial(learn, loop, weights, q, k, v, (1, tokens), *given)
        found[f"lact_{step}"] = {form: partial(run, form) for form in (BOTH[:1] if find_obstacle(loop) else BOTH)}
    if "vittt" in setting.chunks:
        tokens_first = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
        chunk = {"chunk_size": setting.chunks["vittt"]}
        lr = (draw(1, tokens, h, uniform=True) / d).requires_grad_()
        scale = 1 / torch.arange(1.0, chunk["chunk_size"] + 1, device=device)
        W0 = (draw(h, d, d) / d**0.5).requires_grad_()
        b0, bias = (torch.zeros(h, d, device=device) for _ in range(2))
        weight = torch.ones(h, d, device=device)
        found["vittt_own"] = {"recurrent": partial(ttt_linear, *tokens_first, lr, scale, W0, b0, weight, bias, **chunk)}
        for name, loss in (("plain", "mse"), ("dot", "dot")):
            run = partial(ttt_linear_plain, *tokens_first, lr, scale, W0, loss=loss, **chunk)
            found[f"vittt_{name}"] = {form: partial(run, form=form) for form in BOTH}
    return found


def _measure_learner(
    store: RowStore, about: dict[str, Any], setting: Setting, forms: dict[Form, Callable[[], Tensor]], device: str
) -> None:
    """Put a row for each form into the store, their samples taken in turn, unless all are there."""
    keys = {form: _identify(about | {"form": form}) for form in forms}
    if all(store.find(key) for key in keys.values()):
        return

    def infer(forward: Callable[[], Tensor]) -> None:
        with torch.no_grad():
            forward()

    def train(forward: Callable[[], Tensor]) -> None:
        forward().square().mean().backward()

    load = read_load()
    steps = {form: partial(infer if about["mode"] == "infer" else train, forward) for form, forward in forms.items()}
    samples = time_in_turn(steps, device, TURNS, turn_ms=TURN_MS, fewest=SLOW_STEPS)
    said = []
    for form, step in steps.items():
        row = about | {"form": form, "heads": setting.heads, "head_dim": setting.head_dim, **load}
        row |= describe_samples(samples[form]) | {"threads": torch.get_num_threads()}
        row["chunk_size"] = setting.chunks[about["learner"].partition("_")[0]]
        row["tokens_m_per_s"] = about["tokens"] * setting.heads / row["latency_ms"] / 1e3
        row["peak_memory_mib"] = measure_peak_mib(step, device)
        store.add(keys[form], row)
        said.append(f"{form} {row['latency_ms']:.2f} ms, {row['peak_memory_mib']:.1f} MiB")
    what = f"{about['setting']}, {about['learner']}, {about['mode']}, {about['tokens']:,} tokens"
    print(f"{what}: {'; '.join(said)}", flush=True)


def _compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times as fast the parallel form is, for each learner with both forms."""
    by_key = {_identify(row): row for row in rows}
    ratios = []
    for key, parallel in by_key.items():
        recurrent = by_key.get((*key[:-1], "recurrent"))
        if key[-1] != "parallel" or recurrent is None or len(recurrent["samples_ms"]) != len(parallel["samples_ms"]):
            continue
        pairs = zip(recurrent["samples_ms"], parallel["samples_ms"], strict=True)
        turns = [each / other for each, other in pairs]
        interval = median_interval(turns)
        ratio = dict(zip(_ROW_KEY[:-1], key[:-1], strict=True))
        ratio |= {"ratio": statistics.median(turns), "ratio_ci95": interval}
        ratios.append(ratio | ({} if interval else {"ratio_ci95_reason": parallel["latency_ms_ci95_reason"]}))
    return ratios


def _measure_backbone(store: RowStore, step: str, backend: str, side: int, device: str, runtime: Runtime) -> None:
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
    key = _identify({"options": options, "backend": backend, "image_size": spec.image_size})
    if store.find(key):
        return
    try:
        row = store.add(key, measure(spec))
    except RuntimeError as error:
        raise RunError(f"forms: {error}") from None
    took = f", {row['latency_ms']:.1f} ms" if row["latency_ms"] else ""
    print(f"{spec.row_id}, {backend}: {row['status']}{took}", flush=True)
