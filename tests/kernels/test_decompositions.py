"""The operators as scans of plain operations, against their references in fp64."""

import pytest
import torch

from kernels.bi_wkv import bi_wkv
from kernels.decompositions import DECOMPOSITIONS, bi_wkv_by_scan
from kernels.tools.bi_wkv_cases import CASES, Sizes
from kernels.tools.operators import OPERATORS

OPS = torch.ops.vision_ttt
SCANS = {name: cases for name, cases in OPERATORS.items() if getattr(OPS, name).default in DECOMPOSITIONS}


EVERY_SIZE = [
    pytest.param(name, sizes, id=f"{name}-{i}")
    for name, cases in SCANS.items()
    for i, sizes in enumerate([*cases.ragged(True), *(sizes for _, sizes in cases.variants())])
]


def test_every_operator_with_a_scan_is_here():
    assert set(SCANS) == {"ttt_linear", "selective_scan", "bi_wkv"}


@pytest.mark.parametrize(("name", "sizes"), EVERY_SIZE)
def test_a_decomposition_gives_the_output_of_the_reference(name, sizes):
    cases, decomposition = SCANS[name], DECOMPOSITIONS[getattr(torch.ops.vision_ttt, name).default]
    inputs = cases.draw(0, sizes)[:-1]
    out, _ = decomposition(*cases.arguments(inputs, sizes), "auto", False)
    torch.testing.assert_close(out, cases.bind(sizes)(*inputs, backend="reference"), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tokens", [1, 2, 13])
def test_bi_wkv_with_keys_whose_powers_would_overflow(tokens):
    inputs = CASES.draw(0, Sizes(batch=3, tokens=tokens, channels=9), decay=1.0, keys=400.0)[:-1]
    out, _ = bi_wkv_by_scan(*inputs, "auto", False)
    torch.testing.assert_close(out, bi_wkv(*inputs, backend="reference"), rtol=1e-10, atol=1e-10)
