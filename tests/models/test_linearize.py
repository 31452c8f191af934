"""What a linearised model inherits from ViTs of timm and of this project, bit by bit, and which models are refused."""

import pytest
import timm
import torch
from torch import Tensor, nn

from repro.core.errors import UserError
from repro.models.adapter import AdapterSize
from repro.models.checkpoints import open_weights
from repro.models.linearize import (
    CLASS_TOKEN,
    PARTLY,
    REGISTERS,
    SECOND_HEAD,
    choose_student,
    freeze_inherited,
    inherit,
    read_shell,
)
from repro.models.pyramid import build_pyramid, load_backbone
from repro.models.registry import build_model
from repro.models.t5 import SHELLS
from repro.models.weights import save_weights
from repro.tasks.detection.mask_rcnn import MaskRcnn
from repro.tasks.detection.params import MaskRcnnParams
from repro.tasks.segmentation.params import UperNetParams
from repro.tasks.segmentation.upernet import build_upernet
from tests.models.helpers import relative, shaken

SMALL = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
NEW = {"attn.w1", "attn.w2", "attn.w3", *(f"attn.dwc_{x}.{part}" for x in "qk" for part in ("weight", "bias"))}


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
        ("vit_tiny_patch16_224", {}, {"cls_token": CLASS_TOKEN}),
        ("deit_tiny_patch16_224", {}, {"cls_token": CLASS_TOKEN}),
        (
            "deit_tiny_distilled_patch16_224",
            {},
            {
                "cls_token": CLASS_TOKEN,
                "dist_token": CLASS_TOKEN,
                "head_dist.weight": SECOND_HEAD,
                "head_dist.bias": SECOND_HEAD,
            },
        ),
        ("vit_tiny_patch16_224", {"reg_tokens": 3}, {"cls_token": CLASS_TOKEN, "reg_token": REGISTERS}),
        (
            "vit_tiny_patch16_224",
            {"reg_tokens": 2, "no_embed_class": True, "init_values": 1e-5},
            {"cls_token": CLASS_TOKEN, "reg_token": REGISTERS},
        ),
        ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg", "mlp_ratio": 3}, {}),
        ("vit_tiny_patch16_224", {"patch_size": 8}, {"cls_token": CLASS_TOKEN}),
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
        assert fates[key] in ("used", PARTLY) and torch.equal(after[same_place(key)], value), key
    new = {key for key, fate in fates.items() if fate == "expected: new"}
    assert new == student.new_parameters() and {key.split(".", 2)[-1] for key in new} == NEW
    assert all(torch.equal(after[key], before[key]) for key in new)
    assert student(torch.randn(2, 3, 64, 64)).isfinite().all()


@pytest.mark.parametrize("fc_norm", [True, False])
def test_without_a_class_token_only_the_mixer_is_another(fc_norm):
    """With softmax put back into its place, a student of a class-free ViT is that ViT."""
    teacher = vit(class_token=False, global_pool="avg", fc_norm=fc_norm)
    shell = read_shell(teacher, "vit")
    twin = build_model(
        "t5_tiny_patch16_224", **shell.options, num_classes=5, inner="softmax", key_norm="none", dwc="none"
    ).eval()
    twin.load_state_dict(shell.state)
    x = torch.randn(2, 3, 64, 64)
    tokens = [
        model.forward_intermediates(x, norm=False, output_fmt="NLC", intermediates_only=True)[-1]
        for model in (twin, teacher)
    ]
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
    assert SHELLS[name.removeprefix("t5_")] | options == SHELLS[name.removeprefix("t5_")] | {
        **options,
        "patch_size": 8,
        "embed_dim": 48,
    }


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
    assert {name for name, p in other.named_parameters() if p.requires_grad} == other.new_parameters() | {
        "head.weight",
        "head.bias",
    }
    nothing, _, _ = student_of(teacher, inner="linear", dwc="none")
    with pytest.raises(
        ValueError, match="freeze: inner linear with dwc none has no parameters of its own, so nothing would learn"
    ):
        freeze_inherited(nothing, read_shell(teacher, "vit"))


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("vit_tiny_patch16_224", {"qk_norm": True}, "it has a norm of queries and keys"),
        ("vit_tiny_patch16_224", {"scale_attn_norm": True}, "it has a norm in its attention"),
        ("vit_tiny_patch16_224", {"qkv_bias": False}, "its projections have no bias"),
        ("vit_tiny_patch16_224", {"pre_norm": True}, "it has a norm before its blocks"),
        ("vit_tiny_patch16_224", {"pos_embed": "none"}, "it has no table of positions"),
        ("vit_tiny_patch16_224", {"global_pool": "map", "class_token": False}, "it pools by attention"),
        ("vit_tiny_patch16_224", {"act_layer": "quick_gelu"}, "its activation is QuickGELU"),
        ("vit_tiny_patch16_224", {"norm_layer": "rmsnorm"}, "its norms are no LayerNorms"),
        ("vit_small_patch16_36x1_224", {"depth": 2}, None),
        ("vit_base_patch16_plus_clip_240", {}, "it has a norm before its blocks"),
    ],
)
def test_a_part_that_no_student_has_is_named(name, options, why):
    teacher = vit(name, **options)
    if why is None:
        read_shell(teacher, "w.pth")
        return
    with pytest.raises(UserError) as found:
        read_shell(teacher, "w.pth")
    assert str(found.value) == f"w.pth: {why}, which no linearised model has"


def test_gated_attention_is_named():
    teacher = vit()
    teacher.blocks[0].attn = type(teacher.blocks[0].attn)(48, 3, qkv_bias=True, gated=True)
    with pytest.raises(UserError, match="w.pth: its attention is gated, which no linearised model has"):
        read_shell(teacher, "w.pth")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("resnet18", "ResNet"), ("swin_tiny_patch4_window7_224", "SwinTransformer"), ("vittt_nano_patch16_144", "Vittt")],
)
def test_other_models_are_named(name, kind):
    with (
        torch.device("meta"),
        pytest.raises(UserError, match=f"w.pth: is a {kind}; expected a ViT or DeiT of timm, or a t5_softmax model"),
    ):
        read_shell(timm.create_model(name), "w.pth")


def test_a_linearised_model_is_not_linearised_again():
    with pytest.raises(UserError, match="is a linearised model already"):
        read_shell(build_model("t5_nano_patch16_144"), "w.pth")


def test_a_linearised_vit_is_a_backbone_of_detection_and_segmentation(tmp_path):
    """It keeps its grid, so its weights go into a ViT-Adapter, and both heads reach every parameter of it."""
    student, _, _ = student_of(vit(depth=4))
    name, options = student.built_from
    file = tmp_path / "weights.safetensors"
    shown = {
        "input_size": [3, 64, 64],
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
    }
    save_weights(file, student, name=name, options=options, preprocessing=shown, classes=list("abcde"))
    inherited = {key: value for key, value in student.state_dict().items() if not key.startswith(("norm.", "head."))}
    image = torch.randn(3, 64, 64)
    target = {
        "boxes": torch.tensor([[4.0, 4.0, 40.0, 30.0]]),
        "labels": torch.tensor([1]),
        "masks": torch.zeros(1, 64, 64, dtype=torch.uint8),
    }
    target["masks"][:, 4:30, 4:40] = 1
    for task in ("detection", "segmentation"):
        kept = {key: value for key, value in options.items() if key != "num_classes"}
        pyramid = build_pyramid(name, options=kept, size=AdapterSize(num_heads=4, prior_channels=32))
        load_backbone(pyramid, open_weights(file))
        for key, value in inherited.items():
            assert torch.equal(pyramid.trunk.state_dict()[key], value), key
        if task == "detection":
            losses = MaskRcnn(
                pyramid, 3, MaskRcnnParams(fpn_channels=8, box_channels=16, mask_channels=8, mask_layers=1)
            )([image], [target])
        else:
            upernet = build_upernet(
                pyramid, UperNetParams(channels=8, aux_channels=4), num_classes=3, window=64, stride=None
            )
            # of one image, batch norms have no statistics
            losses = {"loss": upernet.eval()(image[None]).square().mean()}
        sum(losses.values()).backward()
        assert all(p.grad is not None for key, p in pyramid.trunk.blocks.named_parameters())
