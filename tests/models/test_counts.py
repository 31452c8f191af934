"""Counts of every family with a closed form: published parameters, and the products that a counter sees."""

import pytest

from repro.bench.build import build_eval_model
from repro.bench.counter import counted_macs
from repro.bench.flops import cost
from repro.models.fast_weights import LACT_STEPS
from repro.models.inner import LOSSES, MODELS
from tests.models.helpers import count, nano_name

# VRWKV's and Vim's stand with their multiply-adds in their own tests, Vittt's in tests/bench/test_flops.py
PUBLISHED = {
    "hvit3_tiny_224": (28_703_560, 4.9033),
    "hvit3_small_224": (54_362_056, 8.7320),
    "hvit3_base_224": (94_369_304, 16.6821),
    "vit3_tiny_patch16_224": (6_149_416, None),
    "vit3_small_patch16_224": (23_799_400, None),
    "vit3_base_patch16_224": (90_055_912, None),
    "t5_small_patch16_224": (23_026_792, None),
    "t5_base_patch16_224": (79_270_376, None),
}
SQUARE, PADDED = [(144, 144), (32, 80)], [(224, 224), (70, 102)]
CHUNKED = {"inner_steps": 2, "chunk_size": 6, "depth": 1}  # of 10 tokens
CLOSED_FORMS = [
    ("study", {}, SQUARE),
    ("study", {"mixer": "softmax", "positions": "table"}, SQUARE),
    ("study", {"inner_model": "conv", "inner_rate": "dynamic", "num_classes": 0}, SQUARE),
    *(("study", {"inner_model": model}, SQUARE[:1]) for model in MODELS),
    *(("study", {"inner_loss": loss, "inner_width": 2, "inner_batches": 3}, SQUARE[:1]) for loss in LOSSES),
    ("study", {"inner_depth": 3, "inner_epochs": 3}, SQUARE[:1]),
    *(("t5", {"inner": inner}, SQUARE[:1]) for inner in ("linear", "gate", "2layer", "swiglu")),
    ("t5", {"inner": "softmax", "key_norm": "none", "dwc": "none"}, SQUARE),
    ("t5", {"inner": "projqk", "dwc": "cpe", "layer_scale": True}, SQUARE),
    ("t5", {"inner": "3layer", "dwc": "v", "neighbours": 3, "mlp_ratio": 3.0, "num_classes": 0}, SQUARE),
    ("lact", {"inner_ratio": 2.0, "depth": 1}, SQUARE),
    *(("lact", {"step": step, **CHUNKED}, SQUARE[1:]) for step in LACT_STEPS),
    *(("lact", {"order": order, **CHUNKED}, SQUARE[1:]) for order in ("before", "after")),
    ("softvittt", {"num_heads": 4}, SQUARE),
    ("softvittt", {"block": "deit", "pool": "head", "num_classes": 0}, SQUARE),
    *(("ladder_vit3", {"step": step, "inner_steps": 2}, SQUARE) for step in ("own", "v1", "v3", "v6_as_run")),
    ("hvit3", {}, PADDED),
    ("hvit3", {"num_classes": 0}, PADDED),
    ("vmamba", {"expand": 2}, PADDED),
    ("mambavision", {"windows": (4, 3)}, PADDED),
    ("mambavision", {"windows": (14, 7), "layer_scale": 1e-5}, PADDED),
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name):
    """The papers' counter does not see the convolution's inner gradient, a product of elements there."""
    params, giga = PUBLISHED[name]
    counted = cost(name, {}, (224, 224))
    assert counted.num_params == params
    assert giga is None or round((counted.macs - counted.mac_terms["inner_conv"] / 2) / 1e9, 4) == giga


@pytest.mark.parametrize(
    ("family", "options", "sizes"),
    CLOSED_FORMS,
    ids=["-".join(map(str, (case[0], *case[1].values()))) for case in CLOSED_FORMS],
)
def test_closed_forms_add_up(family, options, sizes):
    """To the parameters of the model and to the products that a counter sees, on square and other grids."""
    for size in sizes:
        counted = cost(nano_name(family), options, size)
        model = build_eval_model(nano_name(family), options, size, fused=False, device="meta")
        assert counted.method == "analytic" and counted.num_params == count(model)
        assert counted_macs(model, size) == counted.macs
