"""The right-hand sides of the theorems by hand and where their answer is known, and that the measured errors are those
of fp64.
"""

import torch

from repro.papers.vision_ttt.theorems import (
    Sizes,
    apply_delta_rule,
    attend_linearly,
    attend_to_adapted_values,
    measure_theorems,
    reconstruct,
)

fp64 = torch.float64


def test_linear_attention_by_hand():
    q = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    k, v = torch.tensor([[1.0, 1.0], [0.0, 2.0]]), torch.tensor([[5.0, 0.0], [1.0, 1.0]])
    # q_1·k_1 = 3; q_2·k_1 = 2, q_2·k_2 = −2
    assert attend_linearly(q, k, v).tolist() == [[15.0, 0.0], [8.0, -2.0]]


def test_the_delta_rule_stores_values_under_orthonormal_keys():
    k = torch.linalg.qr(torch.randn(6, 6, dtype=fp64, generator=torch.Generator().manual_seed(0)))[0]
    v = torch.arange(36, dtype=fp64).view(6, 6)
    assert torch.allclose(apply_delta_rule(k, k, v, torch.ones(6, 6, dtype=fp64)), v, atol=1e-13)


def test_adapted_values_by_hand():
    """One key twice: its second value replaces the first, where linear attention would add them."""
    k = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=fp64)
    v = torch.tensor([[5.0, 0.0], [7.0, 1.0]], dtype=fp64)
    assert attend_to_adapted_values(k, k, v, torch.zeros(2, 2, dtype=fp64)).tolist() == v.tolist()
    assert attend_linearly(k, k, v)[1].tolist() == [12.0, 1.0]


def test_the_printed_line_of_a2_by_hand():
    """d = 1, W0 = 0, 2η = 1: the first two outputs are Σ_s x_s·x_s·x_t, or as printed Σ_s x_s·x_s·x_s."""
    x, zero = torch.tensor([[1.0], [2.0]], dtype=fp64), torch.zeros(1, 1, dtype=fp64)
    assert reconstruct(x, zero, 1.0, as_printed=False).flatten().tolist() == [1.0, 2.0 + 8.0]
    assert reconstruct(x, zero, 1.0, as_printed=True).flatten().tolist() == [1.0, 1.0 + 8.0]


def test_every_equivalence_holds_in_fp64_but_the_printed_line():
    errors = measure_theorems(Sizes(shapes=((2, 4), (21, 8), (40, 16)), seeds=2))
    assert 0.05 < errors.pop("a2_printed_smallest") < errors.pop("a2_printed_largest")
    exact = (
        "c1_linear_attention c2_delta_rule c2_adapted_value_view c2_adapted_value_view_any_w0 primal_plain primal_ln"
    )
    assert set(errors) == {*exact.split(), "a2_corrected"}
    assert max(errors.values()) < 1e-13
