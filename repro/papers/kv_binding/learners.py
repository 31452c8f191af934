"""One table of all inner learners of the four papers, in the formulation of docs/inner_loops.md."""

from collections.abc import Mapping
from typing import Any

from ...report.claims import Report
from ...report.document import Block, Piece, number, prose, table
from ...report.gallery import describe_origin
from .forms import find_forms

_NORM = "no: the LayerNorm"
_FULL = "yes, of one batch there is nothing to order"
# system -> inner model, loss, step, schedule, read-out, parallel over chunks, closed form as attention, learner of `repro forms`
LEARNERS: dict[str, tuple[str, str, str, str, str, str, str, str | None]] = {
    "Vittt": (
        "x + LN(xW + b)",
        "½‖LN(kW + b) − (v − k)‖²",
        "rate of a token",
        "chunks of 16, both directions",
        "within the chunk",
        _NORM,
        "none",
        "vittt_own",
    ),
    "Vittt, `plain`": (
        "x + xW",
        "½‖kW − (v − k)‖²",
        "rate of a token",
        "chunks of 16",
        "within the chunk",
        "yes: W ← MW + P, composed",
        "the delta rule by chunks",
        "vittt_plain",
    ),
    "Vittt, `dot`": (
        "x + xW",
        "−⟨kW, v − k⟩",
        "rate of a token",
        "chunks of 16",
        "within the chunk",
        "yes: a sum",
        "linear attention",
        "vittt_dot",
    ),
    "ViT³, heads": (
        "(xW₁) ⊙ SiLU(xW₂)",
        "−(s/N) Σ⟨v̂, v⟩",
        "damped, rate 1",
        "all tokens at once",
        "after it",
        _FULL,
        "two linear attentions, one gating the other",
        None,
    ),
    "ViT³, convolution": (
        "depth-wise 3×3",
        "−(s/N) Σ⟨v̂, v⟩",
        "damped, rate 1",
        "all tokens at once",
        "after it",
        _FULL,
        "linear attention of 3×3 windows",
        None,
    ),
    "ViT³'s design study": (
        "twelve models",
        "five losses",
        "rates 0.1 to 10, or of a token",
        "1 to 4 batches, 1 to 4 epochs",
        "after it",
        "with FC, Conv and DWConv and the dot product",
        "by the model, see below",
        None,
    ),
    "T5, DiT5": (
        "gated, 2 or 3 layers, SwiGLU",
        "−(s/N) Σ⟨v̂, v⟩; DiT5 the squared error",
        "rate 1",
        "all tokens at once",
        "after it",
        _FULL,
        "kernels that move, read linearly",
        None,
    ),
    "LaCT": (
        "W₁(SiLU(W₀x) ⊙ (W₂x))",
        "−Σ⟨v̂, v⟩",
        "three rates of a token, momentum, Newton–Schulz, row norms",
        "large chunks",
        "before, after, or at the end",
        "no: W₀ and W₂ move; the row norms",
        "a state, read linearly",
        "lact_own",
    ),
    "LaCT, V1": (
        "the same, W₁ alone learns",
        "−Σ⟨v̂, v⟩",
        "as LaCT",
        "large chunks",
        "as LaCT",
        "no: the row norms",
        "linear attention with a normed state",
        "lact_v1",
    ),
    "LaCT, V2": (
        "the same",
        "−Σ⟨v̂, v⟩",
        "without row norms",
        "large chunks",
        "as LaCT",
        "yes: Λ, then a sum",
        "linear attention, orthogonal steps",
        "lact_v2",
    ),
    "LaCT, V3": ("Sx", "−Σ⟨v̂, v⟩", "as V2", "large chunks", "as LaCT", "yes: Λ, then a sum", "the same without kernel", "lact_v3"),
    "LaCT, V4": ("Sx", "−Σ⟨v̂, v⟩", "rate 1", "large chunks", "as LaCT", "yes: Λ, then a sum", "the same", "lact_v4"),
    "LaCT, V5": ("Sx", "−Σ⟨v̂, v⟩", "no momentum", "large chunks", "as LaCT", "yes: a sum", "the same", "lact_v5"),
    "LaCT, V6": (
        "Sx",
        "−Σ⟨v̂, v⟩",
        "no Newton–Schulz",
        "large chunks",
        "as LaCT",
        "yes: a sum",
        "linear attention, o = q(W + Σ kᵀv)",
        "lact_v6",
    ),
}
TOKENS = 6400  # 1280 x 1280 pixels


def describe_learners(report: Report) -> list[Block]:
    """The table; its last column is the time of a forward pass of both forms at 1280 x 1280 pixels, where it was measured."""
    source = next(iter(find_forms(report)), None)
    header = [
        "system",
        "inner model F(x)",
        "loss",
        "step",
        "schedule",
        "read out",
        "parallel over chunks",
        "as attention",
        "ms, recurrent; parallel",
    ]
    rows: list[list[Piece]] = []
    for system, (*words, learner) in LEARNERS.items():
        rows.append([system, *words, number(_time(source.metrics, learner)) if source and learner else "–"])
    text = "Times are not measured yet: `repro forms`."
    if source is not None:
        row = next(row for row in source.metrics["rows"] if row["setting"] == "vision")
        size = f"{TOKENS:,} tokens (1280²), {row['heads']} heads of {row['head_dim']}, one image and direction, fp32"
        text = f"Times are of the learner alone, forward: {size}; {describe_origin([source], report.named)}."
    return [table(header, rows), prose(text)]


def _time(metrics: Mapping[str, Any], learner: str) -> str:
    wanted = {"setting": "vision", "learner": learner, "mode": "infer", "tokens": TOKENS}
    found = {row["form"]: row for row in metrics["rows"] if all(row[key] == value for key, value in wanted.items())}
    shown = (
        f"{row['latency_ms']:.1f}{' (noisy)' if row['noisy'] else ''}" for row in (found.get("recurrent"), found.get("parallel")) if row
    )
    return "; ".join(shown) or "–"
