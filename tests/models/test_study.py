"""The shell of the design study: counts by hand, and what its parts do."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from repro.bench.flops import cost
from repro.models.inner import learn
from tests.models.helpers import count, nano, relative, shaken

SMALL = "study_small_patch16_224"


def test_parameters_by_hand():
    """DeiT-S without its class token and positions, a table of 197 rows in each block, and 12·6 heads of inner weights."""
    deit = 768 * 384 + 384 + 12 * (4 * 384**2 + 4 * 384 + 8 * 384**2 + 5 * 384 + 4 * 384) + 2 * 384 + 1000 * 384 + 1000
    assert deit == 21_974_632 and deit + 12 * 197 * 384 == 22_882_408
    for options, weights in ({}, 2), ({"inner_model": "fc"}, 1), ({"inner_width": 4}, 8), ({"inner_model": "conv"}, 9):
        assert cost(SMALL, options, (224, 224)).num_params == 22_882_408 + weights * 294_912
    assert cost(SMALL, {"inner_model": "dwconv"}, (224, 224)).num_params == 22_882_408 + 41_472
    counted = cost(SMALL, {"inner_rate": "dynamic", "positions": "none"}, (224, 224))
    assert counted.num_params == deit + 2 * 294_912 + 12 * 384 * 6
    # timm's DeiT-S has a class token, its position and 196 others
    assert count(timm.create_model("deit_small_patch16_224")) == deit + 384 + 197 * 384
    assert cost(SMALL, {"mixer": "softmax", "positions": "table"}, (224, 224)).num_params == deit + 196 * 384


@pytest.mark.parametrize(
    "options", [{}, {"inner_model": "glu", "inner_damping": True}, {"inner_model": "dwconv", "inner_rate": "dynamic"}]
)
def test_a_block_by_its_equations(options):
    model = shaken(nano("study", **options)).double()
    block, grid, C = model.blocks[1], (3, 5), 64
    x = torch.randn(2, 15, C, dtype=torch.float64)

    def split(tokens: Tensor) -> Tensor:
        return tokens.unflatten(-1, (2, 32)).transpose(1, 2)

    normed = block.norm1(x)
    q, k, v = (split(part) for part in block.attn.qkv(normed).split(C, dim=-1))
    weights = [parameter for name, parameter in block.attn.named_parameters() if name in ("w1", "w2", "w3")]
    rates = torch.sigmoid(normed @ block.attn.rate.weight.T).mT if "inner_rate" in options else None
    mixed = learn(block.attn.loop, weights, q, k, v, grid, rates).transpose(1, 2).flatten(2)
    expected = x + block.attn.proj(mixed)
    expected = expected + block.mlp(block.norm2(expected))
    block.positions = None
    assert relative(block(x, grid), expected) < 1e-12


@torch.no_grad()
def test_positions_are_added_where_they_should_be_and_resampled():
    image = torch.randn(1, 3, 144, 144)
    models = {kind: shaken(nano("study", positions=kind)) for kind in ("table", "block_table", "none")}
    bare = {kind: model.patches(image)[0] for kind, model in models.items()}
    assert torch.equal(models["none"].embed(image)[0], bare["none"])
    assert torch.equal(models["table"].embed(image)[0], bare["table"] + models["table"].pos_embed)
    tokens, grid = models["block_table"].embed(image)
    positions = models["block_table"].blocks[0].positions
    assert torch.equal(tokens, bare["block_table"])
    assert torch.equal(positions(tokens, grid), tokens + positions.table + positions.shift)
    table = positions.table.mT.reshape(1, 64, 9, 9)
    resampled = F.interpolate(table, size=(2, 3), mode="bicubic", antialias=False).flatten(2).mT
    torch.testing.assert_close(positions(torch.zeros(1, 6, 64), (2, 3)), resampled + positions.shift)
