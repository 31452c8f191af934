"""Bytes and launches, against counts by hand: of single operations, and of a block of Vittt-T at 1280 x 1280 pixels."""

import pytest
import timm
import torch

import repro.models  # noqa: F401
from repro.measure.traffic import count_launches
from repro.models import fused_block

B, SIDE, D = 64, 80, 192
UNIT = B * SIDE * SIDE * D * 2  # a (B,T,D) tensor in bf16


@pytest.mark.parametrize(
    ("function", "launches", "numbers"),
    [
        (lambda x, w: x + x, 1, 2 * 6),  # the same tensor is read once
        (lambda x, w: x + w, 1, 3 * 6 - 4),  # a row of two is broadcast
        (lambda x, w: x.t().reshape(3, 2).unsqueeze(0), 1, 12),  # a copy, and views
        (lambda x, w: x.expand(5, 3, 2).sum(0), 1, 12),  # an expanded axis is read once
        (lambda x, w: x @ torch.empty(2, 5), 1, 6 + 10 + 15),
        (lambda x, w: x.clone().addmm_(x, torch.empty(2, 2)), 2, 2 * 6 + 6 + 4 + 2 * 6),  # a copy; what is added to is read and written
        (lambda x, w: torch.addmm(x, x.clone(), torch.empty(2, 2)), 3, 2 * 6 + 2 * 6 + 6 + 4 + 2 * 6),  # one more copy
        (lambda x, w: torch.addmm(w, x, torch.empty(2, 2)), 1, 2 + 6 + 4 + 6),  # a bias is added by the product
        (lambda x, w: torch.empty(100).new_empty(7), 0, 0),
    ],
)
def test_single_operations(function, launches, numbers):
    found = count_launches(lambda: lambda x=torch.empty(3, 2), w=torch.empty(2): function(x, w))
    assert (len(found), sum(each.bytes for each in found)) == (launches, 4 * numbers)


def count_block(monkeypatch, fused):
    """Launches of a block in inference, its constants made before, and units of bytes."""
    block = timm.create_model("vittt_tiny_patch16_224", depth=1).blocks[0].eval()

    def make():
        for module in block.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(torch.empty(parameter.shape, dtype=torch.bfloat16), requires_grad=False))
        x = torch.empty(B, SIDE * SIDE, D, dtype=torch.bfloat16)
        assert fused_block.can_fuse(block, x) == fused
        with torch.no_grad():
            fused_block.find_constants(block, SIDE * SIDE)
        return lambda: block(x, (SIDE, SIDE))

    if not fused:
        monkeypatch.setattr(fused_block, "can_fuse", lambda block, tokens: False)
    found = count_launches(make)
    return len(found), sum(each.bytes for each in found) / UNIT


def test_a_plain_block_moves_what_was_counted_by_hand(monkeypatch):
    """DWConv with residual and norm 7, projection 7, padding and convolutions 16, scan 8, gate, sum and norm 10, output 5, SwiGLU 29.3
    and some for the rates: 83.5.
    """
    launches, units = count_block(monkeypatch, False)
    assert units == pytest.approx(83.5, abs=0.1) and launches > 35


def test_a_fused_block_moves_half_of_it_in_a_quarter_of_the_launches(monkeypatch):
    """Convolution and norm 3, projection 6.3, convolutions 6, scan 8, gate and norm 4, output 3, norm 2, SwiGLU 3.7 and 4.7, rates 0.1."""
    launches, units = count_block(monkeypatch, True)
    assert units == pytest.approx(40.9, abs=0.1) and units <= 51
    assert launches == 11 <= 15
