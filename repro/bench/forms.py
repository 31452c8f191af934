"""Time and memory of the recurrent and the parallel form of inner learners over the tokens: `repro kernels forms`.

Both forms of a learner are timed in turn, and each speed ratio is taken within one turn, so that drift cancels.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kernels import ttt_linear
from kernels.ttt_linear.plain import ttt_linear_plain

from ..core.csvfile import read_typed_csv, write_csv
from ..core.errors import RunError
from ..core.paths import Paths
from ..core.record import installed_version, label_commit
from ..core.runtime import Runtime, choose_device, device_label, device_slug
from ..models.fast_weights import LACT_STEPS, find_obstacle, learn
from ..models.inner import InnerLoop
from .memory import measure_peak_mib
from .pooling import median_interval
from .speed import SLOW_STEPS, RowSpec, measure, time_in_turn
from .unfinished import Unfinished, read_clock

Form = Literal["recurrent", "parallel"]
_FORMS: tuple[Form, ...] = ("recurrent", "parallel")
_TURNS = 11  # at least 6, for the interval of a median of ratios
_TURN_MS = 5.0
BACKBONE = "vittt_tiny"  # also the value of `setting` in its rows
# (step of the ablation chain, backend) of each measured whole backbone
BACKBONES = (("own", "auto"), ("plain", "recurrent"), ("plain", "parallel"), ("dot", "recurrent"), ("dot", "parallel"))
_ROW_KEY = ("setting", "learner", "mode", "tokens", "form")
COLUMNS = (
    *_ROW_KEY,
    *"heads head_dim chunk_size backend status latency_ms tokens_m_per_s peak_memory_mib".split(),
    *"samples_ms device commit torch_version measured".split(),
)
TYPES: dict[str, Callable[[str], Any]] = dict.fromkeys(("tokens", "heads", "head_dim", "chunk_size"), int)
TYPES |= dict.fromkeys(("latency_ms", "tokens_m_per_s", "peak_memory_mib"), float)
TYPES |= {"samples_ms": lambda text: [float(each) for each in text.split()]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of the measurement.

    Args:
        name: `vision` or `paper`, by which `papers.kv_binding.forms` finds the rows.
        tokens: the lengths of the sequence.
        heads, head_dim: heads of every learner, and their width; LaCT has `head_dim` hidden units.
        chunks: measured learner, `lact` or `vittt` -> tokens of a chunk.
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
    # the setting of the authors' own benchmark (JunchenLiu77/flame@8765ce0), which runs in bf16
    Setting(name="paper", tokens=(32768,), heads=4, head_dim=384, chunks={"lact": 2048}),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormsParams:
    """The parameters of the measurement: its settings, and the image sides in pixels at which whole backbones run."""

    settings: tuple[Setting, ...] = SETTINGS
    image_sizes: tuple[int, ...] = (224, 1280)


def run_forms(paths: Paths, runtime: Runtime, params: FormsParams = FormsParams()) -> None:
    """Measure both forms on this machine's device and write results/speed/forms/<device>.csv, see `COLUMNS`.

    A row has one setting, learner, form, mode and number of tokens. `tokens_m_per_s` counts a token once for each head,
    as the paper does. Rows with the setting `BACKBONE` measure the whole Vittt-T with a learner, on an image of so many
    tokens. The next call continues an interrupted measurement, with the same number of threads.

    Raises:
        RunError: a measuring process failed.
    """
    device = choose_device(runtime.device)
    if runtime.threads and device.type == "cpu":
        torch.set_num_threads(runtime.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    name = f"forms/{device_slug(device)}"
    file, state = paths.speed / f"{name}.csv", Unfinished(paths, name)
    state.save()
    here = {"device": device_label(device, runtime.threads), "torch_version": installed_version("torch")}
    here["commit"] = label_commit(paths.root)
    found = (row for row in read_forms(file) if row["device"] == here["device"])
    rows = {_identify(row): row for row in found if (row["measured"] or "") >= state.began}

    def add(new: Sequence[Mapping[str, Any]]) -> None:
        rows.update({_identify(row): {**row, **here, "measured": read_clock()} for row in new})
        table = [{**row, "samples_ms": " ".join(f"{each:g}" for each in row["samples_ms"])} for row in rows.values()]
        write_csv(file, table, COLUMNS)

    for setting, tokens in ((each, tokens) for each in params.settings for tokens in each.tokens):
        learners = _make_learners(setting, tokens, device.type)
        for mode, (learner, forms) in itertools.product(setting.modes, learners.items()):
            about = {"setting": setting.name, "learner": learner, "mode": mode, "tokens": tokens}
            # both forms again, even if one is there: `compare_forms` takes ratios within the turns of one measurement
            if not all(_identify(about | {"form": form}) in rows for form in forms):
                add(_measure_learner(about, setting, forms, device.type))
    for side, (step, backend) in itertools.product(params.image_sizes, BACKBONES):
        about = {"setting": BACKBONE, "learner": step, "mode": "infer", "tokens": (side // 16) ** 2, "form": backend}
        if _identify(about) not in rows:
            add([about | _measure_backbone(step, backend, side, device.type, runtime)])
    state.finish()
    print(f"written: {file.relative_to(paths.root)}")


def read_forms(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file that `run_forms` wrote."""
    return [{**row, "samples_ms": row["samples_ms"] or []} for row in read_typed_csv(path, TYPES)]


def _identify(row: Mapping[str, Any]) -> tuple:
    """Return the key of a row's measurement."""
    return tuple(row[name] for name in _ROW_KEY)


def _make_learners(setting: Setting, tokens: int, device: str) -> dict[str, dict[Form, Callable[[], Tensor]]]:
    """Return learner -> form -> forward pass on one random image; a learner may have the recurrent form only.

    `lact_<step>` are the steps of `LACT_STEPS`; of Vittt, `own` runs the kernel with LayerNorm and bias, and `plain`
    and `dot` run without them. `papers.kv_binding.forms` has a name for each; the part of a learner before `_` is its key
    in `Setting.chunks`. Vittt's operator takes tokens before heads, (B, T, h, d), and LaCT's (B, h, T, d).
    """
    generator = torch.Generator().manual_seed(0)
    h, d = setting.heads, setting.head_dim

    def draw(*shape: int, uniform: bool = False) -> Tensor:
        """Draw on the CPU, so all devices get the same values."""
        make = torch.rand if uniform else torch.randn
        return make(*shape, generator=generator).to(device)

    q, k, v = (draw(1, h, tokens, d) for _ in range(3))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    rates, momentum = draw(1, h, tokens, 3, uniform=True) / 100, draw(1, h, tokens, uniform=True)
    for x in (q, k, v, rates, momentum):
        x.requires_grad_()  # for the mode `train`
    found: dict[str, dict[Form, Callable[[], Tensor]]] = {}
    for step in ("own", "v1", "v2", "v3", "v4", "v5", "v6"):
        loop = InnerLoop(**LACT_STEPS[step], order="before", chunk_size=setting.chunks["lact"])
        weights = [(draw(h, *shape) / shape[0] ** 0.5).requires_grad_() for shape in loop.shapes(d)]
        given = (None if loop.rate == "fixed" else rates[..., : len(loop.learned)], momentum if loop.momentum else None)
        run = partial(learn, loop, weights, q, k, v, (1, tokens), *given)
        found[f"lact_{step}"] = {form: partial(run, form) for form in (_FORMS[:1] if find_obstacle(loop) else _FORMS)}
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
            found[f"vittt_{name}"] = {form: partial(run, form=form) for form in _FORMS}
    return found


def _measure_learner(
    about: dict[str, Any], setting: Setting, forms: dict[Form, Callable[[], Tensor]], device: str
) -> list[dict[str, Any]]:
    """Measure a row for each form of a learner, with the samples taken in turn."""

    def run(forward: Callable[[], Tensor]) -> None:
        with torch.set_grad_enabled(about["mode"] == "train"):
            out = forward()
        if out.requires_grad:
            out.square().mean().backward()

    steps = {form: partial(run, forward) for form, forward in forms.items()}
    samples = time_in_turn(steps, device, _TURNS, turn_ms=_TURN_MS, fewest=SLOW_STEPS)
    rows, said = [], []
    for form, step in steps.items():
        latency_ms = statistics.median(samples[form])
        # after the timing: the forms share their leaves, and the first step of all allocates the leaves' gradients
        peak_mib = measure_peak_mib(step, device)
        row = {
            "form": form,
            "heads": setting.heads,
            "head_dim": setting.head_dim,
            "chunk_size": setting.chunks[about["learner"].partition("_")[0]],
            "status": "ok",
            "latency_ms": latency_ms,
            "samples_ms": [round(each, 4) for each in samples[form]],
            "tokens_m_per_s": about["tokens"] * setting.heads / latency_ms / 1e3,
            "peak_memory_mib": peak_mib,
        }
        rows.append(about | row)
        said.append(f"{form} {latency_ms:.2f} ms, {peak_mib:.1f} MiB")
    what = f"{about['setting']}, {about['learner']}, {about['mode']}, {about['tokens']:,} tokens"
    print(f"{what}: {'; '.join(said)}", flush=True)
    return rows


def compare_forms(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compute the speed-up of the parallel form for each learner with both forms.

    Returns:
        A list of {setting, learner, mode, tokens, ratio, ratio_ci95}. The ratio is the median over the turns of
        recurrent over parallel time; its interval is that of the median (`median_interval`), None for few turns.
    """
    by_key = {_identify(row): row for row in rows if row["setting"] != BACKBONE}
    ratios = []
    for key, parallel in by_key.items():
        recurrent = by_key.get((*key[:-1], "recurrent"))
        if key[-1] != "parallel" or recurrent is None or len(recurrent["samples_ms"]) != len(parallel["samples_ms"]):
            continue
        turns = [a / b for a, b in zip(recurrent["samples_ms"], parallel["samples_ms"], strict=True)]
        found = {"ratio": statistics.median(turns), "ratio_ci95": median_interval(turns)}
        ratios.append(dict(zip(_ROW_KEY[:-1], key[:-1], strict=True)) | found)
    return ratios


def _measure_backbone(step: str, backend: str, side: int, device: str, runtime: Runtime) -> dict[str, Any]:
    """Measure Vittt-T with a learner, `own` for its default one, at side² pixels in a fresh process.

    A row that exceeds the memory or the time has a status and no latency.

    Raises:
        RunError: the model failed for another reason.
    """
    options = {} if step == "own" else {"step": step}
    spec = RowSpec(
        model=f"ladder_{BACKBONE}_patch16_224",
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
    took = f", {row['latency_ms']:.1f} ms" if row["latency_ms"] else ""
    print(f"{spec.row_id}, {backend}: {row['status']}{took}", flush=True)
    return {name: row[name] for name in ("backend", "status", "latency_ms", "samples_ms", "peak_memory_mib")}
