"""What holds for every family: timm's interface, PlainBackbone or four maps, independent images, and torch.compile."""

import os
import re
import sys

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from repro.models.backbone import is_plain, remove_tokens
from repro.models.hierarchy import Hierarchy
from repro.training.optim import build_optimizer
from repro.training.params import OptimParams
from tests.models import helpers
from tests.models.helpers import DENOISERS, HIERARCHICAL, OWN, gradients, nano, nano_name, relative, shaken
from tests.slow import first

DEIT = ("deit", {"dynamic_img_size": True})  # with which timm's class takes images of any size
FAMILIES = [*((family, {}) for family in OWN), DEIT]
DEEP = [(family, {}) for family in HIERARCHICAL]
EVERY_FAMILY = [*FAMILIES, *DEEP]
PLAIN_VARIANTS = [
    *FAMILIES,
    *(("vittt", {"pool": pool}) for pool in ("max", "head", "mid")),
    ("vittt", {"pool": "double", "w0": "shared"}),
    ("vittt", {"design": "ttt_layer"}),
    ("vittt", {"w0": "frozen", "chunk_size": 0}),
    ("vrwkv", {"post_norm": True}),
    ("study", {"positions": "table", "inner_model": "dwconv", "inner_loss": "mse", "inner_rate": "dynamic"}),
    ("study", {"positions": "table", "mixer": "softmax"}),
    ("lact", {"step": "v2", "order": "after", "inner_steps": 2}),
    ("lact", {"step": "v6", "norm": None, "order": "before", "chunk_size": 5}),
    ("ladder_vit3", {"step": "v3", "inner_steps": 2}),
    ("ladder_vittt", {"step": "plain"}),
    ("ladder_vittt", {"step": "q_is_k"}),
    ("softvittt", {"block": "deit", "pool": "head"}),
    ("t5", {"inner": "softmax", "key_norm": "none", "dwc": "none"}),
    ("t5", {"inner": "projqk", "key_norm": "rms", "dwc": "v"}),
    ("t5", {"inner": "3layer", "key_norm": "layer", "dwc": "cpe", "neighbours": 3, "layer_scale": True}),
]
VARIANTS = [*PLAIN_VARIANTS, *DEEP]


def named(cases):
    names = ["-".join(map(str, (family, *options.values()))) for family, options in cases]
    return [pytest.param(*case, id=name) for case, name in zip(cases, names, strict=True)]


each_hierarchy = pytest.mark.parametrize("family", HIERARCHICAL)
each_family = pytest.mark.parametrize(("family", "options"), named(EVERY_FAMILY))
each_variant_and_denoiser = pytest.mark.parametrize(("family", "options"), named([*VARIANTS, *DENOISERS]))


def prepare(family, options, *size, batch=2):
    """A model, and what it takes: images of this size, or what a denoiser takes beside its images."""
    if (family, options) in DENOISERS:
        return helpers.denoiser(family, **options), helpers.draw_noisy(batch)
    return shaken(nano(family, **options)), (torch.randn(batch, 3, *size),)


@pytest.mark.parametrize(("family", "options"), named([case for case in PLAIN_VARIANTS if case is not DEIT]))
def test_any_grid_and_the_protocol(family, options):
    """Running the parts one by one equals running the model, and intermediates are the tokens between its blocks."""
    model, grid = shaken(nano(family, **options)), (4, 7)
    image = torch.randn(2, 3, 64, 112)
    assert is_plain(model)
    positions = model.prefix_positions(28)
    with torch.no_grad():
        assert model(image[..., :16, :16]).isfinite().all()  # a single patch
        tokens, found = model.embed(image)
        assert found == grid and tokens.shape[1] == grid[0] * grid[1] + len(positions)
        for block in model.blocks:
            tokens = block(tokens, grid)
        final, maps = model.forward_intermediates(image, indices=[0, 3], norm=True)
        torch.testing.assert_close(model.norm(tokens), final)
        torch.testing.assert_close(model.forward_features(image), final)
        torch.testing.assert_close(model.forward_head(final), model(image))
    assert [m.shape for m in maps] == [(2, 64, *grid)] * 2 and model(image).shape == (2, 10)
    torch.testing.assert_close(maps[-1].flatten(2).mT, remove_tokens(final, positions))


@pytest.mark.parametrize("family", ["vittt", "vit3"])
@pytest.mark.parametrize("size", [(143, 144), (8, 144), (144, 150)])
def test_sizes_off_the_patch_grid_are_refused(family, size):
    with pytest.raises(ValueError, match="multiples of the patch size 16"):
        shaken(nano(family, depth=1))(torch.randn(1, 3, *size))


def test_parts_that_are_modules_count_as_parts():
    """As in Python 3.12 and newer, where `isinstance` of a protocol looks into a module's __dict__ alone."""
    plain = nano("vittt")
    assert not {"blocks", "norm"} & vars(plain).keys() and is_plain(plain)
    del plain.norm
    assert not is_plain(plain)


@each_hierarchy
@pytest.mark.parametrize("size", [(32, 32), (33, 95)])
def test_any_size_and_the_maps_of_a_hierarchy(family, size):
    """Grids are rounded up; the stages one by one equal the model, and the maps are those before each downsampling."""
    model, image = shaken(nano(family)), torch.randn(2, 3, *size)
    grids = [tuple(-(-side // stride) for side in size) for stride in (4, 8, 16, 32)]
    assert isinstance(model, Hierarchy) and not is_plain(model) and model.grids_of(*size) == grids
    with torch.no_grad():
        final, maps = model.forward_intermediates(image)
        x = model.patch_embed(image)
        for stage, found in zip(model.stages, maps, strict=True):
            x = stage(x)
            torch.testing.assert_close(found, x)
            x = stage.downsample(x) if stage.downsample is not None else x
        torch.testing.assert_close(model.norm(x), final)
        torch.testing.assert_close(model.forward_features(image), final)
        torch.testing.assert_close(model.forward_head(final), model(image))
        torch.testing.assert_close(model.head(final.mean((2, 3))), model(image))
        (last,) = model.forward_intermediates(image, 1, norm=True, intermediates_only=True)
        early, (second,) = model.forward_intermediates(image, [1], stop_early=True)
    assert [m.shape for m in maps] == [(2, width, *grid) for width, grid in zip(model.widths, grids, strict=True)]
    assert model(image).shape == (2, 10) and torch.equal(last, final)
    assert torch.equal(second, early) and torch.equal(second, maps[1])


@pytest.mark.parametrize("family", OWN)
def test_entry_points_are_functions_of_the_familys_module(family):
    module = sys.modules[f"repro.models.{family}"]
    assert set(module.__all__) == set(timm.list_models(f"{family}_*"))
    assert type(getattr(module, f"{family}_nano_patch16_144")(num_classes=2)) is type(nano(family))


@pytest.mark.parametrize(("family", "options"), named([("vittt", {}), ("vim", {}), DEIT, *DEEP]))
def test_features_only_agrees_with_feature_info(family, options):
    whole, deep = nano(family, **options), family in HIERARCHICAL
    widths, strides = (whole.widths, (4, 8, 16, 32)) if deep else ((64,) * 4, (16,) * 4)
    backbone = timm.create_model(nano_name(family), features_only=True, out_indices=(0, 2), **options)
    maps = backbone(torch.randn(1, 3, 96, 64))
    assert [m.shape for m in maps] == [(1, widths[i], 96 // strides[i], 64 // strides[i]) for i in (0, 2)]
    assert backbone.feature_info.channels() == [widths[0], widths[2]]
    assert backbone.feature_info.reduction() == [strides[0], strides[2]]
    every = timm.create_model(nano_name(family), features_only=True, **options)  # all stages, or a ViT's last blocks
    assert every.feature_info.reduction() == list(strides if deep else strides[:3])
    removed = ("stages.2.downsample", "stages.3", "blocks.3", "norm.", "head")
    kept = {f"model.{name}" for name, _ in whole.named_parameters() if not name.startswith(removed)}
    assert {name for name, _ in backbone.named_parameters()} == kept


@each_variant_and_denoiser
def test_every_parameter_gets_a_gradient_and_checkpointing_changes_nothing(family, options):
    model, inputs = prepare(family, options, 64, 80)
    found = helpers.assert_recomputing_changes_nothing(helpers.frozen_statistics(model), *inputs)
    # delta of tokens beyond the longest chunk has no effect
    assert not [name for name, gradient in found.items() if not gradient.any() and "token_scale" not in name]


@each_hierarchy
def test_checkpointing_counts_a_batch_once_in_the_statistics(family):
    plain, recomputing = (nano(family, drop_path_rate=0.0).train() for _ in range(2))
    recomputing.set_grad_checkpointing()
    image = torch.randn(2, 3, 64, 80)
    for model in (plain, recomputing):
        model(image).sum().backward()
    torch.testing.assert_close(dict(recomputing.named_buffers()), dict(plain.named_buffers()))


@each_variant_and_denoiser
def test_every_parameter_has_a_layer(family, options):
    """Which learning rates that decay from layer to layer need."""
    model, _ = prepare(family, options, 64, 80)
    names = [name for name, _ in model.named_parameters()]
    groups = timm.models.group_parameters(model, model.group_matcher())
    assert sorted(name for group in groups.values() for name in group) == sorted(names)
    first = ("cls_token", "cls_pos_embed", "pos_embed", "patch_embed", "time_embed", "class_embed")
    assert set(groups[0]) == {name for name in names if name.startswith(first)}


FAMILIES_OF_OURS = (*OWN, *HIERARCHICAL)


@pytest.mark.parametrize("family", FAMILIES_OF_OURS)
def test_stochastic_depth_grows_over_the_blocks_and_spares_what_is_no_branch(family):
    """From 0 to the rate; at a rate of 1 a block does what it does where its mixer and its MLP return nothing."""
    model, given = shaken(nano(family, drop_path_rate=0.3)), []
    blocks = [block for stage in model.stages for block in stage.blocks] if family in HIERARCHICAL else model.blocks
    expected = [0.3 * i / (len(blocks) - 1) for i in range(len(blocks))]
    assert [getattr(block.drop_path, "drop_prob", 0.0) for block in blocks] == pytest.approx(expected)
    block = blocks[-1]
    block.register_forward_pre_hook(lambda module, inputs: given.append(inputs))
    with torch.no_grad():
        model(torch.randn(2, 3, 96, 64))
        block.train().drop_path.drop_prob = 1.0
        dropped = block(*given[0])
        for name in ("attn", "mixer", "att", "mlp", "ffn"):
            if hasattr(block, name):
                getattr(block, name).register_forward_hook(lambda module, inputs, out: torch.zeros_like(out))
        torch.testing.assert_close(dropped, block.eval()(*given[0]))


# by name, what does not decay though it has more than one dimension
EXEMPT = dict.fromkeys(HIERARCHICAL, "^$") | {"vim": r"^(pos_embed|cls_token)$"}
EXEMPT["vittt"] = r"^(pos_embed|cls_token|cls_pos_embed)$|mixer\.(ln_weight|ln_bias|b0|token_scale)$"
EXEMPT["ladder_vittt"] = EXEMPT["vittt"]


@pytest.mark.parametrize("family", FAMILIES_OF_OURS)
def test_weight_decay_falls_on_matrices_but_for_embeddings_and_inner_norms(family):
    """VRWKV's release spares norms and biases alone. With rates that decay from layer to layer it is the same."""
    model = nano(family, **{"vittt": {"pool": "head"}, "vrwkv": {"post_norm": True}}.get(family, {}))
    for layer_decay in (None, 0.5):
        groups = build_optimizer(model, OptimParams(lr=1e-3, layer_decay=layer_decay), 512).param_groups
        decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
        for name, parameter in model.named_parameters():
            expected = parameter.ndim > 1 and not re.search(EXEMPT.get(family, r"pos_embed$|positions\.table$"), name)
            if family == "vrwkv":
                expected = not re.search(r"(norm|ln\d)\.weight$|\.bias$", name)
            assert (id(parameter) in decayed) == expected, name


@pytest.mark.parametrize(("family", "backend"), [("vittt", "numba"), ("vim", "numba"), ("vrwkv", "numba")])
def test_backend_is_set_and_named(family, backend):
    model = shaken(nano(family))
    assert model.selected_backend(torch.float32) == backend
    image = torch.randn(1, 3, 48, 32)
    with torch.no_grad():
        expected = model(image)
        model.set_backend("reference")
        assert model.selected_backend(torch.float32) == "reference"
        torch.testing.assert_close(model(image), expected)


@each_variant_and_denoiser
def test_an_image_alone_and_in_a_batch(family, options):
    """Each image starts from the initial state, and the model keeps nothing of what it learned."""
    model, inputs = prepare(family, options, 80, 96, batch=3)
    if family == "lact":  # Newton–Schulz makes singular values that are rounding alone a thousand times larger
        model, inputs = model.double(), [inputs[0].double()]
    with torch.no_grad(), helpers.state_unchanged(model):
        together = model(*inputs)
        alone = torch.cat([model(*(part[i, None] for part in inputs)) for i in (2, 1, 0)]).flip(0)
    assert (together - alone).abs().max() <= 4e-6 * together.abs().max()


@each_family
def test_no_gradient_crosses_from_image_to_image(family, options):
    images = torch.randn(3, 3, 64, 80, requires_grad=True)
    shaken(nano(family, **options))(images)[1].sum().backward()
    assert images.grad[1].abs().min(dim=0).values.max() > 0
    assert not images.grad[[0, 2]].any()


@each_family
def test_gradients_of_one_image_are_half_of_those_of_two(family, options):
    """Kernels take other paths at a batch of 1, whose strides are arbitrary; in fp32, where LaCT keeps three digits."""
    model = helpers.frozen_statistics(shaken(nano(family, **options)))
    image = torch.randn(1, 3, 64, 80)
    of_one, of_two = gradients(model, image), gradients(model, torch.cat([image, image]))
    for name, gradient in of_one.items():
        assert relative(gradient, of_two[name] / 2) < 1e-3, name


# of the families with operators of their own the smallest graph
COMPILED = [("vrwkv", {}), *(case for case in EVERY_FAMILY if case[0] != "vrwkv")]


@pytest.mark.parametrize(("family", "options"), [*first(named(COMPILED)), *first(named(DENOISERS), 0)])
def test_compiled_equals_eager(family, options, backend="aot_eager"):
    options = options if family in HIERARCHICAL or (family, options) in DENOISERS else {"depth": 1, **options}
    model, inputs = prepare(family, options, 32, 48)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*inputs), model(*inputs))
    found, plain = (list(gradients(each, *inputs).values()) for each in (compiled, model))
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    "REPRO_TEST_INDUCTOR" not in os.environ, reason="takes a minute of a C++ compiler: set REPRO_TEST_INDUCTOR=1"
)
def test_compiled_by_inductor_equals_eager():
    test_compiled_equals_eager("vittt", {}, "inductor")


@each_family
def test_forward_mode_agrees_with_reverse_mode(family, options):
    torch.manual_seed(0)
    model = helpers.frozen_statistics(shaken(nano(family, **options))).double()
    if hasattr(model, "set_backend"):
        model.set_backend("torch")  # forward mode takes the reference; test_every_op has the loops' gradients
    values = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    values |= {"image": torch.randn(1, 3, 48, 64, dtype=torch.float64).requires_grad_()}
    changes = {name: torch.randn_like(x) for name, x in values.items()}

    def run(values):
        parameters = {name: x for name, x in values.items() if name != "image"}
        return torch.func.functional_call(model, parameters, values["image"])

    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's other attentions have no forward mode, and say so
        _, slopes = torch.func.jvp(run, ({name: x.detach() for name, x in values.items()},), (changes,))
    logits = run(values)[0]
    for i in range(3):
        gradients = torch.autograd.grad(logits[i], list(values.values()), retain_graph=True)
        slope = sum((g * dx).sum() for g, dx in zip(gradients, changes.values(), strict=True))
        torch.testing.assert_close(slopes[0, i], slope, rtol=1e-6, atol=1e-6 * float(slopes.abs().max()))
