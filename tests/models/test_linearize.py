"""What a linearised model inherits from ViTs of timm and of this project, bit by bit, and which models are refused."""

import pytest
import timm
import torch
from torch import Tensor, nn

from repro.core.errors import UserError
from repro.models import linearize
from repro.models.linearize import choose_student, freeze_inherited, inherit, read_shell
from repro.models.registry import build_model
from repro.models.t5 import SHELLS
from tests.models.helpers import relative, shaken

SMALL = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
NEW = {"attn.w1", "attn.w2", "attn.w3", *(f"attn.dwc_{x}.{part}" for x in "qk" for part in ("weight", "bias"))}
# what of a teacher is left, and why
TOKEN = {"cls_token": linearize.CLASS_TOKEN}
TOKENS = TOKEN | {"reg_token": linearize.REGISTERS}
DISTILLED = dict.fromkeys(("cls_token", "dist_token"), linearize.CLASS_TOKEN)
DISTILLED |= dict.fromkeys(("head_dist.weight", "head_dist.bias"), linearize.SECOND_HEAD)


def vit(name: str = "vit_tiny_patch16_224", **options) -> nn.Module:
    torch.manual_seed(0)
    return shaken(timm.create_model(name, **SMALL | options)).eval()


def student_of(teacher: nn.Module, **options) -> tuple[nn.Module, dict[str, str], dict[str, Tensor]]:
    """A student with random weights of its own, what became of the keys, and the state before it inherited."""
    shell = read_shell(teacher, "vit")
    name, of_shell = choose_student(shell)
    student = build_model(name, **{"img_size": 64, "num_classes": 5} | of_shell | options).eval()
    before = {key: value.clone() for key, value in student.state_dict().items()}
    return student, inherit(student, shell, "vit"), before


def same_place(key: str) -> str:
    """The student's name of a tensor of timm's ViT."""
    return key.replace("patch_embed.proj.", "patch_embed.").replace("fc_norm.", "norm.")


@pytest.mark.parametrize(
    ("name", "options", "left"),
    [
        ("vit_tiny_patch16_224", {}, TOKEN),
        ("deit_tiny_distilled_patch16_224", {}, DISTILLED),
        ("vit_tiny_patch16_224", {"reg_tokens": 3}, TOKENS),
        ("vit_tiny_patch16_224", {"reg_tokens": 2, "no_embed_class": True, "init_values": 1e-5}, TOKENS),
        ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg", "mlp_ratio": 3}, {}),
        ("vit_small_patch16_36x1_224", {"patch_size": 8}, TOKEN),
    ],
)
def test_what_is_inherited_is_equal_bit_by_bit(name, options, left):
    teacher = vit(name, **options)
    student, fates, before = student_of(teacher)
    after = student.state_dict()
    assert set(fates) == set(teacher.state_dict()) | {key for key in after if key.split(".", 2)[-1] in NEW}
    for key, value in teacher.state_dict().items():
        if key in left:
            assert fates[key] == left[key]
            continue
        if key == "pos_embed":
            value = value[:, value.shape[1] - student.pos_embed.shape[1] :]
        assert fates[key] in ("used", linearize.PARTLY) and torch.equal(after[same_place(key)], value), key
    new = {key for key, fate in fates.items() if fate == "expected: new"}
    assert new == student.new_parameters() and {key.split(".", 2)[-1] for key in new} == NEW
    assert all(torch.equal(after[key], before[key]) for key in new)
    assert student(torch.randn(2, 3, 64, 64)).isfinite().all()


@pytest.mark.parametrize("fc_norm", [True, False])
def test_without_a_class_token_only_the_mixer_is_another(fc_norm):
    """With softmax put back into its place, a student of a class-free ViT is that ViT."""
    teacher = vit(class_token=False, global_pool="avg", fc_norm=fc_norm)
    shell = read_shell(teacher, "vit")
    plain = {"inner": "softmax", "key_norm": "none", "dwc": "none"}
    twin = build_model("t5_tiny_patch16_224", **shell.options, num_classes=5, **plain).eval()
    twin.load_state_dict(shell.state)
    x = torch.randn(2, 3, 64, 64)
    how = {"norm": False, "output_fmt": "NLC", "intermediates_only": True}
    tokens = [model.forward_intermediates(x, **how)[-1] for model in (twin, teacher)]
    assert relative(*tokens) < 1e-5
    if not fc_norm:  # a norm after the mean and one before it are two things
        assert relative(twin(x), teacher(x)) < 1e-5


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "vit_small_patch16_224"])
def test_the_registered_student_has_the_shell_of_the_standard_sizes(name):
    with torch.device("meta"):
        shell = read_shell(timm.create_model(name), name)
    assert choose_student(shell) == (f"t5_{name.split('_', 1)[1]}", {})


def test_the_student_of_our_own_softmax_model_and_other_shells():
    for name in ("nano_patch4_32", "base_patch16_224", "vit_base_patch16_224"):
        with torch.device("meta"):
            assert choose_student(read_shell(build_model(f"t5_softmax_{name}"), name))[0] == f"t5_{name}"
    name, options = choose_student(read_shell(vit(patch_size=8), "vit"))
    shell = SHELLS[name.removeprefix("t5_")] | options
    assert (shell["patch_size"], shell["embed_dim"]) == (8, 48)


def test_positions_for_another_grid_and_a_head_for_other_classes():
    teacher = vit(class_token=False, global_pool="avg")
    student, fates, before = student_of(teacher, img_size=(64, 96), num_classes=7)
    after = student.state_dict()
    assert after["pos_embed"].shape == (1, 24, 48) and fates["pos_embed"] == "used"
    assert torch.equal(after["head.weight"], before["head.weight"])
    # a key that both have is new, as in a fine-tuning
    assert fates["head.weight"] == fates["head.bias"] == "expected: new"
    flat = build_model("t5_tiny_patch16_224", **read_shell(teacher, "vit").options | {"img_size": 32}, num_classes=5)
    constant = read_shell(teacher, "vit")
    constant.state["pos_embed"].fill_(0.25)
    inherit(flat, constant, "vit")
    assert torch.allclose(flat.pos_embed, torch.full((1, 4, 48), 0.25))


def test_freezing_leaves_what_is_new():
    teacher = vit()
    student, _, _ = student_of(teacher)
    freeze_inherited(student, read_shell(teacher, "vit"))
    assert {name for name, p in student.named_parameters() if p.requires_grad} == student.new_parameters()
    other, _, _ = student_of(teacher, num_classes=7)
    freeze_inherited(other, read_shell(teacher, "vit"))
    learning = {name for name, p in other.named_parameters() if p.requires_grad}
    assert learning == other.new_parameters() | {"head.weight", "head.bias"}
    nothing, _, _ = student_of(teacher, inner="linear", dwc="none")
    with pytest.raises(ValueError, match="freeze: inner linear with dwc none has no parameters of its own"):
        freeze_inherited(nothing, read_shell(teacher, "vit"))


LACKING = "which no linearised model has"
OTHER = "expected a ViT or DeiT of timm, or a t5_softmax model"


def gated():
    teacher = vit()
    teacher.blocks[0].attn = type(teacher.blocks[0].attn)(48, 3, qkv_bias=True, gated=True)
    return teacher


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: vit(qk_norm=True), f"it has a norm of queries and keys, {LACKING}"),
        (lambda: vit(scale_attn_norm=True), f"it has a norm in its attention, {LACKING}"),
        (lambda: vit(qkv_bias=False), f"its projections have no bias, {LACKING}"),
        (lambda: vit(pre_norm=True), f"it has a norm before its blocks, {LACKING}"),
        (lambda: vit(pos_embed="none"), f"it has no table of positions, {LACKING}"),
        (lambda: vit(global_pool="map", class_token=False), f"it pools by attention, {LACKING}"),
        (lambda: vit(act_layer="quick_gelu"), f"its activation is QuickGELU, {LACKING}"),
        (lambda: vit(norm_layer="rmsnorm"), f"its norms are no LayerNorms, {LACKING}"),
        (gated, f"its attention is gated, {LACKING}"),
        (lambda: timm.create_model("resnet18"), f"is a ResNet; {OTHER}"),
        (lambda: timm.create_model("swin_tiny_patch4_window7_224"), f"is a SwinTransformer; {OTHER}"),
        (lambda: build_model("vittt_nano_patch16_144"), f"is a Vittt; {OTHER}"),
        (lambda: build_model("t5_nano_patch16_144"), "is a linearised model already"),
        *(
            (lambda each=each: build_model("t5_softmax_nano_patch16_144", positions=each), f"its positions are {each},")
            for each in ("none", "block_table")
        ),
    ],
)
def test_what_is_no_teacher_is_named(make, line):
    with torch.device("meta"):
        teacher = make()
    with pytest.raises(UserError, match=f"^w.pth: {line}"):
        read_shell(teacher, "w.pth")
