"""The ViT-Adapter against its equations, its published parameter counts, and the backbones that it must not change."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from repro.models import adapter as parts
from repro.models.adapter import AdapterSize, DeformableAttention, Extractor, ViTAdapter, reference_points
from repro.models.pyramid import build_pyramid
from tests.models.helpers import DenseModel, count, layer_scales, shaken
from tests.slow import first

FAMILIES = ("vittt", "deit", "vim", "vrwkv", "vit3", "t5")
SIZE = AdapterSize(num_heads=2, prior_channels=4)


def nano(family: str = "vittt", *, options: dict | None = None, **kwargs) -> ViTAdapter:
    torch.manual_seed(0)
    return build_pyramid(f"{family}_nano_patch16_144", options=options, **kwargs).eval()


def block_outputs(adapter: ViTAdapter) -> list:
    """A list that each forward pass fills with the outputs of all blocks."""
    found = []
    for block in adapter.trunk.blocks:
        block.register_forward_hook(lambda module, args, out: found.append(out))
    return found


@pytest.mark.parametrize(
    "size, width, own", first([("tiny", 192, 2_438_192), ("small", 384, 5_830_160), ("base", 768, 13_680_608)])
)
def test_parameters_as_published(size, width, own):
    """Backbone and adapter; for VRWKV and ViT in units of 0.01 M, as Table 2 prints nothing more exact."""
    totals = {}
    for family in FAMILIES:
        with torch.device("meta"):
            shell = f"vit_{size}" if (family, size) == ("t5", "base") else size
            adapter = build_pyramid(f"{family}_{shell}_patch16_224")
        assert adapter.channels == (width,) * 4 and count(adapter) - count(adapter.backbone) == own
        totals[family] = count(adapter)
    published = {"tiny": (9_227_924, 8.40, 7_966_640), "small": (31_809_368, 29.26, 27_503_888)}
    published["base"] = 115_239_152, 106.56, 99_495_392
    vittt, vrwkv, vit = published[size]
    assert (totals["vittt"], round(totals["vrwkv"] / 1e6, 2), totals["deit"]) == (vittt, vrwkv, vit)


CASES = [("vittt", {"pool": "double"}), ("deit", {}), ("vim", {})]


@pytest.mark.parametrize("family, options", CASES)
def test_before_training_the_backbone_is_the_plain_one(family, options):
    """With γ = 0 every block returns what it returns without an adapter, bit for bit."""
    adapter = nano(family, options=options)
    found, image = block_outputs(adapter), torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        adapter(image)
        with_adapter = found[:]
        tokens, grid = adapter.backbone.embed(image)
        for block, other in zip(adapter.backbone.blocks, with_adapter, strict=True):
            tokens = block(tokens, grid)
            assert torch.equal(tokens, other)


@pytest.mark.parametrize("family, options", CASES)
def test_injection_passes_class_tokens_by(family, options):
    adapter = nano(family, options=options)
    nn.init.ones_(adapter.injectors[0].gamma)
    taken = []
    adapter.trunk.blocks[0].register_forward_pre_hook(lambda module, args: taken.append(args[0]))
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        adapter(image)
        before, (h, w) = adapter.backbone.embed(image)
    same = (taken[0] == before).all(-1)[0]
    assert same.nonzero().flatten().tolist() == list(adapter.backbone.prefix_positions(h * w))


def test_order_of_the_interactions():
    adapter, order = nano(), []
    for name in ("injectors", "extractors", "trunk.blocks"):
        modules = adapter.trunk.blocks if name == "trunk.blocks" else getattr(adapter, name)
        for i, module in enumerate(modules):
            module.register_forward_hook(lambda module, args, out, label=f"{name[0]}{i}": order.append(label))
    with torch.no_grad():
        adapter(torch.randn(1, 3, 32, 32))
    assert order == ["i0", "t0", "e0", "i1", "t1", "e1", "i2", "t2", "e2", "i3", "t3", "e3", "e4", "e5"]


def test_reference_points_are_cell_centres_row_by_row():
    points = reference_points([(2, 3), (1, 2)], torch.device("cpu"))
    first, second = [[x / 6, y / 4] for y in (1, 3) for x in (1, 3, 5)], [[1 / 4, 1 / 2], [3 / 4, 1 / 2]]
    assert points.dtype == torch.float32
    torch.testing.assert_close(points, torch.tensor(first + second))


def test_deformable_attention_by_grid_sample():
    torch.manual_seed(0)
    M, P, grids = 2, 4, [(4, 6), (2, 3)]
    layer = shaken(DeformableAttention(8, 2, AdapterSize(num_heads=M, value_ratio=0.5))).double()
    query, value = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(3, 30, 8, dtype=torch.float64)
    points = torch.rand(5, 2)
    offsets = layer.offset_proj(query).view(3, 5, M, 2, P, 2)
    weights = layer.weight_proj(query).view(3, 5, M, 2 * P).exp()
    weights = (weights / weights.sum(-1, keepdim=True)).view(3, 5, M, 2, P)
    start, expected = 0, 0
    for level, (h, w) in enumerate(grids):
        maps = layer.value_proj(value)[:, start : start + h * w].transpose(1, 2).reshape(3 * M, 2, h, w)
        start += h * w
        where = points.double()[None, :, None, None] + offsets[:, :, :, level] / torch.tensor([w, h])
        samples = F.grid_sample(maps, (2 * where - 1).transpose(1, 2).flatten(0, 1), align_corners=False)
        expected = expected + torch.einsum("bmcqp,bqmp->bqmc", samples.view(3, M, 2, 5, P), weights[:, :, :, level])
    torch.testing.assert_close(layer(query, points, value, grids), layer.output_proj(expected.flatten(2)))


def test_deformable_attention_starts_on_rays():
    layer = DeformableAttention(12, 3, AdapterSize(num_heads=6))
    layer.init_weights()
    assert not any(p.any() for p in (layer.offset_proj.weight, layer.weight_proj.weight, layer.weight_proj.bias))
    y = 1 / math.sqrt(3)
    rays = torch.tensor([[1, 0], [y, 1], [-y, 1], [-1, 0], [-y, -1], [y, -1]])
    expected = (rays[:, None, None] * torch.tensor([1, 2, 3, 4])[:, None]).expand(6, 3, 4, 2)
    torch.testing.assert_close(layer.offset_proj.bias.view(6, 3, 4, 2), expected, atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match="6 heads"):
        DeformableAttention(10, 3, AdapterSize(num_heads=6))


def test_spatial_prior_layer_by_layer():
    torch.manual_seed(0)
    prior = shaken(parts.SpatialPrior(8, 4)).eval()
    convs = [m for m in prior.stages.modules() if isinstance(m, nn.Conv2d)]
    norms = [m for m in prior.stages.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)

    def layer(x, i, stride):
        x = F.conv2d(x, convs[i].weight, stride=stride, padding=1)
        statistics = norms[i].running_mean, norms[i].running_var, norms[i].weight, norms[i].bias
        mean, var, gain, shift = (t.view(-1, 1, 1) for t in statistics)
        return ((x - mean) / (var + 1e-5).sqrt() * gain + shift).clamp(min=0)

    image = torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        x = F.max_pool2d(layer(layer(layer(image, 0, 2), 1, 1), 2, 1), 3, 2, 1)
        for i, (found, projection) in enumerate(zip(prior(image), prior.projections, strict=True)):
            x = layer(x, 2 + i, 2) if i else x
            expected = torch.einsum("bchw,dc->bdhw", x, projection.weight[:, :, 0, 0]) + projection.bias.view(-1, 1, 1)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_conv_ffn_splits_tokens_into_their_maps():
    torch.manual_seed(0)
    ffn, c = shaken(parts.ConvFFN(8, 3)).double(), torch.randn(2, 4 * 8 + 8 + 2, 8, dtype=torch.float64)
    hidden = c @ ffn.fc1.weight.T + ffn.fc1.bias
    pieces = []
    for start, (h, w) in zip((0, 32, 40), [(4, 8), (2, 4), (1, 2)], strict=True):
        level = hidden[:, start : start + h * w].reshape(2, h, w, 3).permute(0, 3, 1, 2)
        level = F.conv2d(level, ffn.dwconv.weight, ffn.dwconv.bias, padding=1, groups=3)
        pieces.append(level.permute(0, 2, 3, 1).reshape(2, h * w, 3))
    expected = F.gelu(torch.cat(pieces, 1)) @ ffn.fc2.weight.T + ffn.fc2.bias
    torch.testing.assert_close(ffn(c, [(4, 8), (2, 4), (1, 2)]), expected)


def test_drop_path_is_on_the_ffn_alone():
    torch.manual_seed(0)
    extractor = shaken(Extractor(16, SIZE, drop_path=1.0)).train()
    grids, c, x = [(4, 4), (2, 2), (1, 1)], torch.randn(2, 21, 16), torch.randn(2, 4, 16)
    points = reference_points(grids, c.device)
    attended = c + extractor.attn(extractor.query_norm(c), points, extractor.value_norm(x), [(2, 2)])
    torch.testing.assert_close(extractor(c, points, x, (2, 2), grids), attended)
    assert not torch.allclose(extractor.eval()(c, points, x, (2, 2), grids), attended)


def test_drop_path_rates():
    """The full rate in every extractor, none in an injector, and rising from 0 to it over the backbone's blocks."""
    adapter = nano(drop_path_rate=0.3)
    rates = {name: module.drop_prob for name, module in adapter.named_modules() if hasattr(module, "drop_prob")}
    blocks = {f"backbone.blocks.{i}.drop_path": pytest.approx(0.1 * i) for i in range(1, 4)}
    assert rates == {f"extractors.{i}.drop_path": 0.3 for i in range(6)} | blocks


@pytest.mark.parametrize(("features", "final_norm"), [("last", False), ("each", True)])
@pytest.mark.parametrize("family", ["vittt", "vim", "deit"])
@torch.no_grad()
def test_maps_are_tokens_prior_and_patches_added(family, features, final_norm):
    """The patches of each of the four blocks or of the last, after the final norm if it is kept, and resized."""
    adapter, image, c = nano(family, features=features, final_norm=final_norm), torch.randn(1, 3, 64, 96), []
    if final_norm:
        nn.init.uniform_(adapter.trunk.norm.weight, 0.5, 1.5)
    adapter.extractors[5].register_forward_hook(lambda module, args, out: c.append(out))
    blocks = block_outputs(adapter)
    maps, finest = adapter(image), adapter.prior(image)[0]
    grids = {0: (8, 12), 96: (4, 6), 120: (2, 3)}
    levels = [c[0][:, start : start + h * w].mT.unflatten(2, (h, w)) for start, (h, w) in grids.items()]
    levels.insert(0, adapter.up(levels[0]) + finest)
    norm, prefix = adapter.trunk.norm, adapter.backbone.prefix_positions(24)
    for i, scale in enumerate((4.0, 2.0, 1.0, 0.5)):
        tokens = blocks[i if features == "each" else 3]
        tokens = tokens[:, [place for place in range(tokens.shape[1]) if place not in prefix]]
        if final_norm:
            centred = tokens if family == "vim" else tokens - tokens.mean(-1, keepdim=True)  # Vim has an RMSNorm
            tokens = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
        patches = tokens.mT.unflatten(2, (4, 6))
        resized = F.interpolate(patches, scale_factor=scale, mode="bilinear", align_corners=False)
        torch.testing.assert_close(maps[i], adapter.norms[i](levels[i] + resized), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deit_tiny_patch16_224", {"global_pool": "avg"}),  # with a norm after the pool
        ("deit_tiny_distilled_patch16_224", {}),  # with a token and a head of its own
        ("vit_base_patch16_siglip_224", {}),  # pools by attention
    ],
)
def test_each_parameter_of_a_vit_has_a_gradient_and_no_removed_key(name, options):
    """Several ranks wait for the gradient of each parameter."""
    adapter = build_pyramid(name, options={**options, "embed_dim": 64, "num_heads": 1, "depth": 4}).train()
    sum(level.square().sum() for level in adapter(torch.randn(1, 3, 64, 64))).backward()
    assert [name for name, weight in adapter.trunk.named_parameters() if weight.grad is None] == []
    assert [key for key in adapter.trunk.state_dict() if adapter.is_removed(key)] == []


@pytest.mark.parametrize(("family", "wrapped"), [("vittt", False), ("vim", True), ("deit", True)])
def test_layer_decay(family, wrapped):
    """Section 2.3: rate^(last - id), where id is 0 for embeddings, i + 1 for block i, and the last for the rest."""
    with torch.device("meta"):
        adapter = build_pyramid(f"{family}_tiny_patch16_224")
    depth = adapter.depth
    assert depth == (24 if family == "vim" else 12)
    scales = layer_scales(DenseModel(adapter) if wrapped else adapter, 0.85)
    for name, scale in scales.items():
        part, _, inside = name.removeprefix("pyramid.").partition("backbone.")
        inside = inside.removeprefix("model.").split(".")
        layer = depth + 1 if part or inside == [""] else int(inside[1]) + 1 if inside[0] == "blocks" else 0
        assert scale == pytest.approx(0.85 ** (depth + 1 - layer)), name


@pytest.mark.parametrize("family", ["vittt", "vrwkv", "deit"])
def test_weight_decay_is_left_out_where_the_recipe_leaves_it_out(family):
    """Vectors and biases, by timm's rule; by name only norms and biases of more dimensions. Embeddings decay."""
    adapter = nano(family)
    exempt = adapter.no_weight_decay()
    assert exempt <= {name for name, _ in adapter.named_parameters()}
    expected = {"ln_weight", "ln_bias", "b0", "token_scale"} if family == "vittt" else set()
    several = {name.rpartition(".")[2] for name, p in adapter.named_parameters() if name in exempt and p.ndim > 1}
    assert several == expected


def test_autocast():
    adapter, image = shaken(nano()), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        exact = adapter(image)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = adapter(image)
    for a, b in zip(rounded, exact, strict=True):
        assert (a - b).norm() < 0.05 * b.norm()


def test_backends_are_chosen_everywhere():
    adapter = nano()
    assert adapter.selected_backend(torch.float32) == "numba+torch"
    adapter.set_backend("reference")
    assert adapter.selected_backend(torch.float32) == "reference"
    adapter.injectors[0].attn.backend = "torch"
    assert adapter.selected_backend(torch.float32) == "reference+torch"
