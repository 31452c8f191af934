"""Linearisation: a student with a mixer of linear cost inherits the weights of a pretrained softmax ViT.

`read_shell` takes from a ViT of timm, or from a `t5_softmax_*` model, the parts that the student (`repro.models.t5.T5`)
keeps: patches, positions, projections, MLPs, norms and head. Other parts, such as a class token, are dropped and
reported as left behind.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from timm.layers import LayerScale, Mlp, PatchEmbed
from timm.models.vision_transformer import Attention, VisionTransformer
from timm.models.vision_transformer import Block as TimmBlock
from torch import Tensor, nn

from ..core.errors import UserError
from .backbone import rename_prefixes, resample_positions
from .image_model import Grid
from .t5 import SHELLS, T5
from .weights import load_state

# fates of a ViT's parts besides `used`, as the report of a linearisation lists them
CLASS_TOKEN = "left behind: the student averages the patches"
REGISTERS = "left behind: the student has no registers"
SECOND_HEAD = "left behind: the head of the distillation token"
PARTLY = "used, without the rows of the tokens that are no patches"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shell:
    """The part of a softmax ViT that a student inherits.

    Args:
        options: the arguments that build a `T5` with the same shell.
        state: the tensors under the names of `T5`; the positions lack the rows of class tokens and registers.
        grid: the (h, w) patch grid of the positions.
        fates: the status of every key of the ViT, in the words of `repro.models.weights.load_state`.
        num_classes: outputs of the head; 0 without a head.
    """

    options: Mapping[str, Any]
    state: Mapping[str, Tensor]
    grid: Grid
    fates: Mapping[str, str]
    num_classes: int


def read_shell(model: nn.Module, where: str) -> Shell:
    """Extract the shell of a softmax ViT, with its weights.

    Args:
        model: a `VisionTransformer` of timm, DeiT included, or a `T5` with `inner="softmax"`.
        where: the name of the weights in error messages.

    Raises:
        UserError: another kind of model, or one with a part that no student has, such as gated attention.
    """
    if isinstance(model, T5):
        return _read_t5(model, where)
    if not isinstance(model, VisionTransformer):
        raise UserError(f"{where}: is a {type(model).__name__}; expected a ViT or DeiT of timm, or a t5_softmax model")
    if (why := _find_obstacle(model)) is not None:
        raise UserError(f"{where}: {why}, which no linearised model has")
    return _read_timm(model)


def choose_student(shell: Shell) -> tuple[str, dict[str, Any]]:
    """Return the registered T5 closest to a shell, and the options that differ; without image size and classes."""
    asked = {key: value for key, value in shell.options.items() if key != "img_size"}
    # must be the defaults of `ClassFreeViT` and `Backbone`: an option that is equal to them is not passed to the
    # student, and a wrong `norm_eps` changes no shape, so that the weights would load
    defaults = {"patch_size": 16, "depth": 12, "mlp_ratio": 4.0, "layer_scale": False, "norm_eps": 1e-6, "in_chans": 3}
    differing = {
        f"t5_{name}": {key: value for key, value in asked.items() if (defaults | built)[key] != value}
        for name, built in SHELLS.items()
    }
    return min(differing.items(), key=lambda item: len(item[1]))  # the first of equally close ones


def inherit(student: T5, shell: Shell, where: str) -> dict[str, str]:
    """Fill a freshly built student with the inherited tensors, bit for bit; positions are resampled to its grid.

    The head is inherited if both have the same number of classes.

    Returns:
        The status of every key of the pretrained model, and `expected: new` for the student's own keys.

    Raises:
        UserError: a shell that does not fit; the student is then unchanged.
    """
    head = _find_new_head(student, shell)
    state = {key: value for key, value in shell.state.items() if key not in head}
    fates = dict(shell.fates) | dict.fromkeys(head & shell.fates.keys(), "left behind: other classes")
    new = student.new_parameters() | head
    state["pos_embed"] = resample_positions(state["pos_embed"], shell.grid, student.grid_size)
    load_state(student, state, f"{where}: does not fit the student", new=lambda key: key in new)
    return fates | {key: "expected: new" for key in student.state_dict() if key in new}


def freeze_inherited(student: T5, shell: Shell) -> None:
    """Switch off the gradients of all inherited parameters; a new head is trained.

    Raises:
        ValueError: no parameter is left to train.
    """
    new = student.new_parameters() | _find_new_head(student, shell)
    if not new:
        raise ValueError(
            f"freeze: inner {student.inner} with dwc {student.dwc} has no parameters of its own, so nothing would learn"
        )
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(name in new)


def _find_new_head(student: T5, shell: Shell) -> set[str]:
    """Return the names of a head that the student does not inherit, because the numbers of classes differ; otherwise no name."""
    return {"head.weight", "head.bias"} if shell.num_classes != student.num_classes else set()


def _read_t5(model: T5, where: str) -> Shell:
    """Extract the shell of a `t5_softmax_*` model, whose names are already those of the student.

    Raises:
        UserError: a linearised model, or one with other positions than a table.
    """
    if model.inner != "softmax":
        raise UserError(
            f"{where}: is a linearised model already (inner {model.inner}); expected one with softmax attention"
        )
    if model.positions != "table":
        raise UserError(
            f"{where}: its positions are {model.positions}, which no linearised model has; expected a table"
        )
    options = {
        "img_size": model.img_size,
        "patch_size": model.patch_size,
        "in_chans": model.patch_embed.in_channels,
        "embed_dim": model.embed_dim,
        "depth": model.depth,
        "num_heads": model.num_heads,
        "mlp_ratio": model.hidden / model.embed_dim,
        "layer_scale": model.layer_scale,
        "norm_eps": model.norm_eps,
    }
    state = model.state_dict()
    return Shell(
        options=options,
        state=state,
        grid=model.grid_size,
        fates=dict.fromkeys(state, "used"),
        num_classes=model.num_classes,
    )


def _find_obstacle(model: VisionTransformer) -> str | None:
    """Return in words the first part of a ViT of timm that no student has, or None.

    All conditions are evaluated, so none may raise an error for a model that an earlier one refuses.
    """
    block, patches = model.blocks[0], model.patch_embed
    if type(block) is not TimmBlock:
        return f"its blocks are {type(block).__name__}"
    attention, mlp = block.attn, block.mlp
    if type(attention) is not Attention:
        return f"its attention is a {type(attention).__name__}"
    final = model.norm if isinstance(model.norm, nn.LayerNorm) else model.fc_norm  # timm has the norm at either place
    norms = (block.norm1, block.norm2, final)

    def exist(*layers: nn.Module | None) -> bool:
        """Return whether timm built any of these optional layers."""
        return not all(isinstance(layer, nn.Identity | None) for layer in layers)

    checks = {
        "it has a norm of queries and keys": exist(attention.q_norm, attention.k_norm),
        "its attention is gated": getattr(attention, "gate", None) is not None,
        "it has a norm in its attention": exist(getattr(attention, "norm", None)),
        "its projections have no bias": attention.qkv is None
        or attention.qkv.bias is None
        or attention.proj.bias is None,
        "its heads do not divide its width": attention.num_heads * attention.head_dim != model.embed_dim,
        f"its MLPs are {type(mlp).__name__}": type(mlp) is not Mlp or exist(mlp.norm) or mlp.fc1.bias is None,
        f"its activation is {type(getattr(mlp, 'act', None)).__name__}": not isinstance(
            getattr(mlp, "act", None), nn.GELU
        ),
        "it has a norm before its blocks": exist(model.norm_pre),
        "its patches are cut otherwise": type(patches) is not PatchEmbed
        or patches.proj.bias is None
        or patches.proj.kernel_size != patches.proj.stride
        or len(set(patches.proj.kernel_size)) > 1
        or exist(patches.norm),
        "it has no table of positions": model.pos_embed is None,
        "it pools by attention": model.attn_pool is not None,
        "its norms are no LayerNorms": not all(
            isinstance(norm, nn.LayerNorm) and norm.bias is not None for norm in norms
        ),
        "its head is no linear layer": not isinstance(model.head, nn.Linear | nn.Identity),
    }
    return next((why for why, found in checks.items() if found), None)


def _read_timm(model: VisionTransformer) -> Shell:
    """Extract the shell of a ViT of timm in which `_find_obstacle` found nothing."""
    block = model.blocks[0]
    prefix = 0 if model.no_embed_class else model.num_prefix_tokens  # rows of the positions that belong to no patch
    options = {
        "img_size": tuple(model.patch_embed.img_size),
        "patch_size": model.patch_embed.proj.kernel_size[0],
        "in_chans": model.patch_embed.proj.in_channels,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "num_heads": block.attn.num_heads,
        "mlp_ratio": block.mlp.fc1.out_features / model.embed_dim,
        "layer_scale": isinstance(block.ls1, LayerScale),
        "norm_eps": block.norm1.eps,
    }
    state: dict[str, Tensor] = {}
    fates: dict[str, str] = {}
    for key, value in model.state_dict().items():
        if key in ("cls_token", "dist_token"):
            fates[key] = CLASS_TOKEN
        elif key == "reg_token":
            fates[key] = REGISTERS
        elif key.startswith("head_dist."):
            fates[key] = SECOND_HEAD
        else:
            fates[key] = PARTLY if key == "pos_embed" and prefix else "used"
            state[key] = value[:, prefix:] if key == "pos_embed" else value
    # timm's fc_norm follows the pooling; the student normalises each token before its mean
    state = rename_prefixes(state, {"patch_embed.proj.": "patch_embed.", "fc_norm.": "norm."})
    grid = tuple(model.patch_embed.grid_size)
    classes = model.head.out_features if isinstance(model.head, nn.Linear) else 0
    return Shell(options=options, state=state, grid=grid, fates=fates, num_classes=classes)
