"""Attention maps: the softmax of a ViT, or the implicit attention of a linearised ViT.

They are the work of `repro explain --map attention`.

The implicit attention is A(i, j) = ‖∂o_i/∂v_j‖_F / √d of a head with values v_j and outputs o_i of d dimensions, before
the output projection. For softmax attention, o_i = Σ_j a_ij v_j, it equals the weight a_ij; it is also defined for
mixers without such weights.

Shape suffixes: L layers, B images, h heads, n query tokens, N patch tokens, C = h·d channels.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from ..core.errors import UserError
from ..core.paths import Paths
from ..core.record import make_identity, write_record
from ..core.runtime import Runtime, choose_device, device_label, device_slug, seed_everything
from ..core.ui import print_table
from ..data.cells import DataCell
from ..models.backbone import Grid
from ..models.checkpoints import open_weights
from ..models.inner_mixer import InnerMixer
from ..models.linearize import inherit, read_shell
from ..models.registry import build_model
from ..models.shell import ClassFreeViT
from ..models.t5 import T5
from .classifier import Classifier, subsample
from .draw import draw_attention

SIDE = 5  # of the lattice of query tokens; odd, because figures show the one nearest to the middle


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """Attention of some query tokens in some images, layer by layer.

    Args:
        share: (L, B, h, n, N) share of a query's attention on each patch; a row adds up to 1.
        shift_ratio: (L,) ‖mean of the keys‖ / mean of ‖key‖ over an image's patches, all heads together, averaged over
            the images.
        grid: (h, w) of the patches.
    """

    share: Tensor
    shift_ratio: Tensor
    grid: Grid


def choose_tokens(grid: Grid) -> list[int]:
    """Choose the query tokens: a lattice of at most 5x5 places over the whole grid (h, w), in row-major order."""
    rows, columns = (torch.linspace(0, side - 1, min(SIDE, side)).round().long().tolist() for side in grid)
    return [row * grid[1] + column for row in rows for column in columns]


def observe_attention(model: nn.Module, images: Tensor, batch_size: int = 16) -> Look:
    """Compute the attention of the tokens of `choose_tokens` for inputs (N,3,H,W), and the shift of the keys, see `measure_shift_ratio`.

    Class tokens and registers are excluded, and the patches' shares are normalised without them.

    Args:
        model: in eval mode; a t5 or a study, or a ViT of timm with attention softmax(qkᵀ d^-½).

    Raises:
        ValueError: any other model, or one whose inner learner has a dynamic rate, which follows from the tokens and
            not from q, k and v alone.
    """
    layers = _find_layers(model)
    prefix = 0 if isinstance(model, ClassFreeViT) else model.num_prefix_tokens
    grid = _find_grid(model, images)
    chosen = choose_tokens(grid)
    shares, ratios = [], []
    for part in images.split(batch_size):
        with torch.no_grad():
            projections = _project(model, layers, part)
        # the projections are constants: only the path from values to outputs is differentiated
        with torch.enable_grad():
            found = [
                _look(layer, *qkv, grid, [prefix + i for i in chosen])
                for layer, qkv in zip(layers, projections, strict=True)
            ]
        share = torch.stack(found)[..., prefix:]
        shares.append(share / share.sum(-1, keepdim=True))
        ratios.append(torch.stack([measure_shift_ratio(k[:, prefix:]) for _, k, _ in projections]))
    return Look(share=torch.cat(shares, 1), shift_ratio=torch.cat(ratios, 1).mean(1), grid=grid)


def _find_grid(model: nn.Module, images: Tensor) -> Grid:
    """Return the grid (h, w) of the patches of a model of `observe_attention` for images (N,3,H,W)."""
    size = tuple(images.shape[-2:])
    return model.grid_of(*size) if isinstance(model, ClassFreeViT) else model.patch_embed.dynamic_feat_size(size)


def measure_shift_ratio(k_BNC: Tensor) -> Tensor:
    """Compute ‖mean of k‖ / mean of ‖k‖ over the tokens of keys (B, N, C): how much of the keys all tokens share.

    Softmax ignores this part and a learner at test time does not, which is the paper's reason for its instance norm.

    Returns:
        (B,): 1 for equal keys, about 1/√N for random ones.
    """
    return k_BNC.mean(1).norm(dim=-1) / k_BNC.norm(dim=-1).mean(1)


def measure_implicit_attention(
    mix: Callable[[Tensor, Tensor, Tensor], Tensor],
    q_BNC: Tensor,
    k_BNC: Tensor,
    v_BNC: Tensor,
    num_heads: int,
    tokens: Sequence[int],
) -> Tensor:
    """Compute A(i, j) of the query tokens i by autograd: (B, h, n, N).

    `mix` maps q, k and v (B, N, C) to outputs (B, N, C). An output must depend on no other image, and on no other
    head's v.
    """
    v = v_BNC.detach().requires_grad_()
    out = mix(q_BNC, k_BNC, v).unflatten(2, (num_heads, -1))
    d = out.shape[-1]
    # one vjp for each of the d channels, batched; images and heads are independent and share them
    units = torch.eye(d, dtype=out.dtype, device=out.device)[:, None, None].expand(d, len(v), num_heads, d)
    rows = []
    for token in tokens:
        (slopes,) = torch.autograd.grad(out[:, token], v, units, retain_graph=True, is_grads_batched=True)
        # Frobenius norm over the channels of the output (0) and of the values (4)
        rows.append((slopes.unflatten(3, (num_heads, d)).square().sum((0, 4)) / d).sqrt())  # (B, N, h)
    return torch.stack(rows, 1).permute(0, 3, 1, 2)


def summarise_looks(looks: Mapping[str, Look], reference: str | None) -> dict[str, dict[str, list[float]]]:
    """Summarise each look in numbers by layer, averaged over images, heads and tokens.

    `shift_ratio` is that of `Look`; `reach_patches` is the attention-weighted mean distance from the query;
    `peak_percent` is the largest share of a patch. For looks other than the reference, `overlap_percent` is Σ_j
    min(share, share of the reference). `even` has the values of uniform attention.
    """
    first = next(iter(looks.values()))
    distance = _distances(first.grid, first.share)
    even = torch.full_like(first.share, 1 / first.share.shape[-1])
    found = {}
    for name, share in {**{name: look.share for name, look in looks.items()}, "even": even}.items():
        numbers = {"shift_ratio": looks[name].shift_ratio} if name in looks else {}
        numbers["reach_patches"] = (share * distance).sum(-1).mean((1, 2, 3))
        numbers["peak_percent"] = 100 * share.amax(-1).mean((1, 2, 3))
        if reference is not None and name != reference:
            numbers["overlap_percent"] = 100 * torch.minimum(share, looks[reference].share).sum(-1).mean((1, 2, 3))
        found[name] = {key: values.tolist() for key, values in numbers.items()}
    return found


def _find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the attention or mixer of each block; ValueError for others, or with norms of queries and keys."""
    layers = [getattr(block, "attn", None) for block in getattr(model, "blocks", ())]
    known = all(isinstance(layer, InnerMixer | Attention) for layer in layers)
    plain = known and all(
        isinstance(getattr(layer, name, None), nn.Identity | None) for layer in layers for name in ("q_norm", "k_norm")
    )
    if not layers or not plain:
        raise ValueError(
            f"{type(model).__name__} has no softmax attention, and nothing that was put in the place of one"
        )
    return layers


def _project(model: nn.Module, layers: Sequence[nn.Module], images: Tensor) -> list[tuple[Tensor, ...]]:
    """Return q, k and v (B, N, C) of each layer, including tokens that are not patches."""
    found: list[tuple[Tensor, ...]] = []
    hooks = [
        layer.qkv.register_forward_hook(lambda module, args, out: found.append(out.chunk(3, dim=-1)))
        for layer in layers
    ]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _look(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, grid: Grid, tokens: Sequence[int]) -> Tensor:
    """Compute the attention (B, h, n, N) of the `tokens` in one layer, not normalised over the patches."""
    if isinstance(layer, InnerMixer):
        return measure_implicit_attention(lambda *qkv: layer.mix(*qkv, grid), q, k, v, layer.num_heads, tokens).detach()
    heads_q, heads_k = (each.unflatten(2, (layer.num_heads, -1)).transpose(1, 2) for each in (q[:, tokens], k))
    return (heads_q @ heads_k.mT * layer.scale).softmax(-1)


def _distances(grid: Grid, like: Tensor) -> Tensor:
    """Return the distances (n, N), in patches, between the query tokens and all patches."""
    places = torch.cartesian_prod(*(torch.arange(side) for side in grid)).to(like)
    return torch.cdist(places[choose_tokens(grid)], places)


_IMAGES, _SHOWN = 32, 3  # images of a data set that are measured, and images in a figure
_SEED = 0  # of the choice of images, and of the student before its training
_CHOICES = ("inner", "key_norm", "dwc", "neighbours")  # options of a linearised model that go into the record
TEACHER, BEFORE, AFTER = "teacher", "before", "after"  # states of the weights, as the record and the figure name them


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionParams:
    """The parameters that determine an attention record besides the data; their hash is in its identity."""

    model: str
    weights_hash: str
    teacher_hash: str | None
    images: int
    seed: int


def explain_attention(
    classifier: Classifier, images: Tensor, teacher: Path | None, output: Path, caption: str
) -> dict[str, Any]:
    """Draw the attention in images uint8 (N,3,S,S), print its numbers by layer, and return them.

    With the weights of the `teacher` from which the classifier was linearised, the numbers are compared with the
    teacher's, and with those of the student before its training: with the inherited weights, and new ones drawn with
    seed 0.

    Raises:
        UserError: a model without attention, or a teacher that does not match this student.
    """
    inputs = classifier.to_inputs(images)
    models = {AFTER if teacher else classifier.name: classifier.model}
    if teacher is not None:
        models = _find_earlier(classifier, teacher) | models
    looks: dict[str, Look] = {}
    for state, model in models.items():
        try:
            looks[state] = observe_attention(model.requires_grad_(False), inputs)
        except ValueError as error:
            raise UserError(f"{classifier.checkpoint.where}: {error}; use --map erf") from None
    numbers = summarise_looks(looks, TEACHER if teacher else None)
    # evenly spaced, since images of a data set are sorted by class
    shown = torch.linspace(0, len(images) - 1, min(_SHOWN, len(images))).round().long()
    pictures = list(images[shown].permute(0, 2, 3, 1).numpy())
    shares = {state: look.share.cpu()[:, shown] for state, look in looks.items()}
    grid = next(iter(looks.values())).grid
    draw_attention(output, pictures, shares, numbers, grid, choose_tokens(grid), caption)
    _print(numbers)
    return numbers


def measure_on_data(
    classifier: Classifier, cell: DataCell, teacher: Path | None, output: Path, paths: Paths, runtime: Runtime
) -> None:
    """Run `explain_attention` on 32 images of the reported split.

    The record is attention/<model>_<data>_<weights>.json in the folder of `DataCell.records`, without a teacher
    <model>_<data>_<weights>_no_teacher.json. The report finds it by `by_layer` with a `teacher_hash`; records of
    `distributions` have `by_layer`, too.
    """
    started, device = time.monotonic(), choose_device(runtime.device)
    tree = cell.open_tree()
    images = classifier.read_images(subsample(tree, _IMAGES, _SEED))
    caption = f"{classifier.name}, {len(images)} images of {cell.name}; {device_label(device)}"
    numbers = explain_attention(classifier, images, teacher, output, caption)
    teacher_hash = open_weights(teacher).hash if teacher else None
    params = AttentionParams(
        model=classifier.name,
        weights_hash=classifier.checkpoint.hash,
        teacher_hash=teacher_hash,
        images=len(images),
        seed=_SEED,
    )
    options = classifier.checkpoint.options
    metrics = {
        "data": cell.name,
        "split": tree.kind.reported_split,
        **dataclasses.asdict(params),
        "tokens": len(choose_tokens(_find_grid(classifier.model, images))),
        "options": {key: options[key] for key in _CHOICES if key in options},
        "by_layer": numbers,
    }
    if teacher is None:
        metrics["teacher_hash_reason"] = "no teacher was named"
    identity = make_identity(
        paths.root, params, data_manifest=cell.manifest_path, device=device_label(device), dtype="fp32", backend="torch"
    )
    # the teacher is that of the linearisation, so the weights determine it where it is given
    parts = [classifier.name, cell.name, classifier.checkpoint.hash[:8], *([] if teacher else ["no_teacher"])]
    file = cell.records(paths, device_slug(device)) / "attention" / f"{'_'.join(parts)}.json"
    write_record(file, metrics, identity, time.monotonic() - started)
    print(
        f"{output}: {min(_SHOWN, len(images))} of {len(images)} images; the numbers are in {file.relative_to(paths.root)}"
    )


def _find_earlier(classifier: Classifier, teacher: Path) -> dict[str, nn.Module]:
    """Build the teacher, and the student before its training, both for the classifier's image size.

    Raises:
        UserError: the classifier is not linearised, or the teacher's file does not fit it.
    """
    student, checkpoint = classifier.model, open_weights(teacher).require_classifier()
    if not isinstance(student, T5) or student.inner == "softmax":
        raise UserError(
            f"explain: --teacher: {classifier.checkpoint.where} is no linearised model; leave the teacher out"
        )
    model = checkpoint.build(classifier.transform.image_size).to(classifier.device)
    shell = read_shell(model, str(teacher))
    seed_everything(_SEED)  # after the teacher, whose building draws random numbers, too
    before = build_model(classifier.checkpoint.model, **classifier.checkpoint.options)
    inherit(before, shell, f"{teacher} as {classifier.checkpoint.model}")
    return {TEACHER: model, BEFORE: before.to(classifier.device).eval()}


def _print(numbers: Mapping[str, Mapping[str, list[float]]]) -> None:
    """Print the result of `summarise_looks` as a table, with a row for each layer and state."""
    columns = {
        "shift_ratio": "shift of keys",
        "reach_patches": "reach (patches)",
        "peak_percent": "peak (%)",
        "overlap_percent": "overlap (%)",
    }
    layers = len(next(iter(numbers.values()))["reach_patches"])
    rows = [
        [f"layer {layer + 1}", state, *(f"{own[key][layer]:.3g}" if key in own else "–" for key in columns)]
        for layer in range(layers)
        for state, own in numbers.items()
    ]
    print_table(["", "", *columns.values()], rows)
