"""Bytes and launches, against counts by hand: of single operations, and of a block of Vittt-T at 1280 x 1280 pixels."""

import pytest
import torch

import repro.models  # noqa: F401
from repro.measure.traffic import count_block, count_launches


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


def test_a_plain_block_moves_what_was_counted_by_hand():
    """DWConv with residual and norm 7, projection 7, padding and convolutions 16, scan 8, gate, sum and norm 10, output 5, SwiGLU 29.3
    and some for the rates: 83.5.
    """
    found = count_block("vittt_tiny_patch16_224", batch=64, side=80, fused=False)
    assert found["units"] == pytest.approx(83.5, abs=0.1) and found["launches"] > 35


def test_a_fused_block_moves_half_of_it_in_a_quarter_of_the_launches():
    """Convolution and norm 3, projection 6.3, convolutions 6, scan 8, gate and norm 4, output 3, norm 2, SwiGLU 3.7 and 4.7, rates 0.1."""
    found = count_block("vittt_tiny_patch16_224", batch=64, side=80, fused=True)
    assert found["units"] == pytest.approx(40.9, abs=0.1) and found["units"] <= 51
    assert found["launches"] == 11 <= 15
