"""The theorems hold by the reference of the kernel but for one printed line, which is computed by hand."""

import torch

from repro.papers.vision_ttt.theorems import ExampleSizes, measure_theorems, reconstruct


def test_the_printed_line_of_a2_by_hand():
    """d = 1, W0 = 0, 2η = 1: the first two outputs are Σ_s x_s·x_s·x_t, or as printed Σ_s x_s·x_s·x_s."""
    x, zero = torch.tensor([[1.0], [2.0]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    assert reconstruct(x, zero, 1.0, as_printed=False).flatten().tolist() == [1.0, 2.0 + 8.0]
    assert reconstruct(x, zero, 1.0, as_printed=True).flatten().tolist() == [1.0, 1.0 + 8.0]


def test_every_equivalence_holds_in_fp64_but_the_printed_line():
    errors = measure_theorems(ExampleSizes(shapes=((2, 4), (21, 8), (40, 16)), seeds=2))
    assert 0.05 < errors.pop("a2_printed_smallest") < errors.pop("a2_printed_largest")
    exact = (
        "c1_linear_attention c2_delta_rule c2_adapted_value_view c2_adapted_value_view_any_w0 primal_plain primal_ln"
    )
    assert set(errors) == {*exact.split(), "a2_corrected"}
    assert max(errors.values()) < 1e-13
