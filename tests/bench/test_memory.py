"""Peak memory against storages that are counted by hand."""

import torch

from repro.bench.memory import measure_peak_mib

MIB = 2**18  # fp32 numbers


def test_storages_count_while_they_are_alive():
    given = torch.ones(MIB)

    def step():
        first = given + 1  # 1
        second = first * 2  # 2 at once
        view = second.view(2, -1).mT  # no storage of its own
        del first, second  # 1, which the view keeps
        return view + 1, view.sum()  # 2

    assert measure_peak_mib(step, "cpu") == 2.0 + 4 / 2**20


def test_what_exists_before_does_not_count():
    given = torch.ones(4 * MIB)
    assert measure_peak_mib(lambda: given.add_(1), "cpu") == 0
    assert measure_peak_mib(lambda: given[:MIB].clone(), "cpu") == 1


def test_a_backward_pass_counts_what_is_kept_for_it():
    weight = torch.ones(MIB, requires_grad=True)
    weight.grad = torch.zeros(MIB)

    def step():
        hidden = (weight * 2).exp()  # the product is freed, exp is kept for its own gradient
        hidden.sum().backward()  # at the peak: hidden, the gradient of exp, and then that of the product

    assert 2 <= measure_peak_mib(step, "cpu") <= 4
