"""The class-free ViT that Study, T5, LaCT and ViT3 share: against timm's, and what holds whatever the mixer is."""

import pytest
import timm
import torch

from repro.bench.build import create
from repro.bench.flops import cost, counted_macs
from repro.training.optim import build_optimizer
from repro.training.params import OptimParams
from tests.models.helpers import nano, nano_name, relative, shaken

FAMILIES = ("study", "t5", "lact", "vit3", "ladder_vit3")
SOFTMAX = [
    ("study", {"mixer": "softmax", "positions": "table"}),
    ("t5", {"inner": "softmax", "key_norm": "none", "dwc": "none"}),
]


@pytest.mark.parametrize(("family", "options"), SOFTMAX)
def test_with_softmax_it_is_timms_vit_without_class_token(family, options):
    ours = shaken(nano(family, **options))
    shape = {"img_size": 144, "embed_dim": 64, "depth": 4, "num_heads": 2, "num_classes": 10}
    theirs = timm.models.VisionTransformer(**shape, class_token=False, global_pool="avg", fc_norm=False).eval()
    theirs.load_state_dict(
        {name.replace("patch_embed.", "patch_embed.proj."): value for name, value in ours.state_dict().items()}
    )
    image = torch.randn(2, 3, 144, 144)
    with torch.no_grad():
        assert relative(ours(image), theirs(image)) < 1e-5


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("study", {}),
        ("study", {"mixer": "softmax", "positions": "table"}),
        ("study", {"inner_model": "conv", "inner_rate": "dynamic", "num_classes": 0}),
        ("t5", {"inner": "softmax", "key_norm": "none", "dwc": "none"}),
        ("t5", {"inner": "projqk", "dwc": "cpe", "layer_scale": True}),
        ("t5", {"inner": "3layer", "dwc": "v", "neighbours": 3, "mlp_ratio": 3.0, "num_classes": 0}),
        ("lact", {"inner_ratio": 2.0}),
        *(("ladder_vit3", {"step": step, "inner_steps": 2}) for step in ("own", "v1", "v3", "v6_as_run")),
    ],
)
@pytest.mark.parametrize("size", [(144, 144), (32, 80)])
def test_its_terms_and_the_mixers_add_up(family, options, size):
    """To the parameters of the model and to the products that a counter sees, on square and other grids."""
    name = nano_name(family)
    counted, model = cost(name, options, size), create(name, options, size, fused=False, device="meta")
    assert counted.method == "analytic" and counted.num_params == sum(p.numel() for p in model.parameters())
    assert counted_macs(model, size) == counted.macs


@pytest.mark.parametrize(
    ("family", "options"), [*((family, {}) for family in FAMILIES), ("study", {"inner_rate": "dynamic"})]
)
def test_weight_decay_falls_on_matrices_and_inner_weights_alone(family, options):
    model = nano(family, **options)
    groups = build_optimizer(model, OptimParams(lr=1e-3), 512).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in model.named_parameters():
        expected = parameter.ndim > 1 and not name.endswith(("pos_embed", "positions.table"))
        assert (id(parameter) in decayed) == expected, name


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_that_do_not_divide_the_width_are_refused(family):
    with pytest.raises(ValueError, match="embed_dim 64 is not a multiple of num_heads 3"):
        nano(family, num_heads=3)
