"""What cannot be built is one line that names the option: for every family, pyramid, inner learner and reading."""

import itertools

import pytest
import torch

from repro.models.fast_weights import LACT_STEPS, choose_form
from repro.models.inner import InnerLoop
from repro.models.muon import newton_schulz
from repro.models.pyramid import build_pyramid
from repro.models.registry import build_denoiser, build_model
from tests.models.helpers import OWN, nano

VITTT, SWIN = "vittt_nano_patch16_144", "swin_tiny_patch4_window7_224"
ALL_POOLS = ("vittt", "ladder_vittt", "softvittt")  # families that choose how they pool
NANOS = [
    ("vittt", {"design": "conv3d"}, "design"),
    ("vittt", {"pool": "avg"}, "pool"),
    ("vittt", {"w0": "learned"}, "w0"),
    ("vittt", {"chunk_size": -1}, "chunk_size"),
    ("vittt", {"chunksize": 4}, "chunksize.*chunk_size"),
    *((family, {"num_heads": 3}, "embed_dim 64 is not a multiple of num_heads 3") for family in ("study", "lact")),
    *((family, {"pool": "max"}, "(argument|option) '?pool") for family in OWN if family not in ALL_POOLS),
    ("hvit3", {"widths": (16, 32, 64, 98)}, "width 98 is not a multiple of 4"),
    ("hvit3", {"num_heads": (1, 2, 4)}, r"num_heads \[1, 2, 4\]: expected one for each of the 4 stages"),
    ("hvit3", {"num_heads": (1, 2, 5, 6)}, "embed_dim 64 is not a multiple of num_heads 5"),
    ("hvit3", {"global_pool": "token"}, "pool"),
    ("hvit3", {"depths": (1, 1, 1)}, "4 widths and 3 depths, expected 4 of each"),
    ("mambavision", {"windows": (9,)}, r"num_heads \[2, 4\] and windows \[9\]: expected one of each for the last two"),
    ("mambavision", {"windows": (9, 0)}, r"windows \[9, 0\]: a side is 0, expected at least 1"),
    ("mambavision", {"num_heads": (3, 4)}, "width 64 is not a multiple of 2 and of its 3 heads"),
    ("study", {"mixer": "softmx"}, "mixer 'softmx': not known; did you mean 'softmax'?"),
    ("study", {"positions": "tables"}, "positions 'tables': not known; did you mean 'table'?"),
    ("study", {"inner_start": "eye"}, "inner_start 'eye': not known"),
    ("study", {"mixer": "softmax", "inner_lr": 2.0}, "mixer softmax: has no inner learner"),
    ("study", {"inner_model": "dwconv", "inner_start": "identity"}, "last weight of dwconv at width 1 is no square"),
    ("study", {"inner_width": 2, "inner_start": "identity"}, "last weight of mlp at width 2 is no square matrix"),
    ("study", {"inner_rate": "per_weight"}, "inner_rate per_weight: this mixer gives no rate for each weight"),
    ("study", {"inner_model": "gru"}, "inner model 'gru': not known"),
    ("t5", {"inner": "3layers"}, "inner '3layers': not known; did you mean '3layer'?"),
    ("t5", {"key_norm": "kin"}, "key_norm 'kin': not known"),
    ("t5", {"dwc": "k"}, "dwc 'k': not known"),
    ("t5", {"neighbours": 4}, "neighbours 4: expected an odd side of a window, or 0 for none"),
    ("t5", {"inner": "softmax"}, "inner softmax: .* goes with key_norm none, dwc none and neighbours 0"),
    ("ladder_vit3", {"step": "v2"}, "step 'v2': not known; known: own, ascent, q_is_k, v1, v3"),
    ("ladder_vit3", {"inner_steps": 0}, "inner epochs 0: expected 1 or more"),
    ("ladder_vittt", {"step": "plane"}, "step 'plane': not known; did you mean 'plain'?"),
    ("lact", {"step": "v7"}, "step 'v7': not known; known: own, ascent"),
    ("lact", {"chunk_size": -1}, "chunk_size -1: expected 1 or more tokens, or 0 for all of them"),
    ("lact", {"num_heads": 64}, "a head of width 1 has vectors; use step v6 or fewer heads"),
    ("lact", {"order": "later"}, "order 'later': not known"),
    ("lact", {"inner_steps": 0}, "steps 0: expected 1 or more"),
    ("lact", {"order": "before", "chunk_size": 0}, "order before: all 81 tokens are one chunk"),
    ("lact", {"order": "before", "img_size": 64}, "order before: all 16 tokens are one chunk"),
]
PYRAMIDS = [
    (VITTT, {"embed_dim": 128, "num_heads": 2}, {}, "width 128"),
    (VITTT, {"depth": 3}, {}, "patches of 16 pixels and 3 blocks"),
    (VITTT, {"patch_size": 8}, {}, "patches of 8 pixels and 4 blocks"),
    (VITTT, {}, {"features": "every"}, "'every'"),
    ("deit_nano_patch16_144", {"reg_tokens": 2}, {}, "register tokens"),
    ("vit_base_patch16_rpn_224", {"embed_dim": 64, "num_heads": 1, "depth": 4}, {}, "ResPostBlock"),
    ("vit_tiny_patch16_224", {"global_pool": "avg"}, {"final_norm": True}, "no final norm; leave out final_norm"),
    (SWIN, {}, {"final_norm": True}, "its maps have norms of their own; leave out final_norm"),
    ("xcit_nano_12_p16_224", {}, {}, "its maps have the strides 16; a pyramid also needs 4"),
    ("hrnet_w18_small", {}, {}, "neither a plain backbone nor one with timm's forward_intermediates"),
    ("swin_tiny_patch4_window7_22", {}, {}, "did you mean 'swin_tiny_patch4_window7_224'"),
    (SWIN, {"embed_dim": 9, "num_heads": 4}, {}, "swin_tiny_patch4_window7_224: cannot be built with"),
]
LEARNERS = [
    ({"model": "mpl"}, "inner model 'mpl': not known; did you mean 'mlp'?"),
    ({"loss": "l1"}, "inner loss 'l1': not known"),
    ({"direction": "up"}, "inner direction 'up': not known"),
    ({"rate": "token"}, "inner rate 'token': not known"),
    ({"epochs": 0}, "inner epochs 0: expected 1 or more"),
    ({"width": 0}, "inner width 0"),
    ({"order": "after", "epochs": 2}, "inner order after"),
    ({"model": "glu", "width": 2}, "inner width 2: the inner model glu has width 1"),
    ({"model": "fc", "depth": 3}, "inner depth 3: the inner model fc has no choice of depth"),
    ({"depth": 1}, "inner depth 1: an mlp has 2 layers or more; one layer is the inner model fc"),
    ({"model": "mlp_identity", "width": 2}, "inner width 2"),
    ({"model": "glu", "only": (2,)}, r"inner only \(2,\): expected places"),
    ({"only": ()}, r"inner only \(\): expected places"),
]
READINGS = [
    ("gate=sigmoid", "gate: no such switch"),
    ("gate_activation=tanh", "gate_activation=tanh: expected one of gelu, sigmoid"),
    ("gate_bias=yes", "gate_bias=yes: expected one of false, true"),
    ("conv1d_kernel=5", "conv1d_kernel=5: expected one of 4, 3"),
    ("w0_std=0", "w0_std=0.0: expected a number above 0"),
    ("eta_base=much", "eta_base=much: expected a number above 0"),
    ("post_norm", "'post_norm': expected switch=value"),
]
DENOISERS = [
    ("dit3_smal_patch2", {}, "no such denoiser; did you mean 'dit3_small_patch2'"),
    ("vit3_nano_patch16_144", {}, "not a denoiser"),
    ("dit3_nano_patch4", {"mixer": "tt"}, "mixer 'tt': not known; did you mean 'ttt'?"),
    ("dit_nano_patch4", {"embed_dim": 50}, "embed_dim 50 is not a multiple of num_heads 2 and of 4"),
]
SIZED = [VITTT, "study_nano_patch16_144", "vim_nano_patch16_144", "deit_nano_patch16_144", "dit_nano_patch4"]
SIZES = [("depth", 0), ("depth", -1), ("num_heads", 0), ("patch_size", 0), ("embed_dim", -64), ("mlp_ratio", -1.0)]
OTHERS = [
    (lambda: build_model("lact_nano_patch16_144", inner_ratio=0.001), "cannot be built with"),
    (lambda: build_model("dit_nano_patch4", img_size=32, drop_path_rate=0.1), "cannot be built with .*drop_path_rate"),
    (lambda: newton_schulz(torch.randn(5), "lact"), "is a vector; use muon none"),
    (lambda: newton_schulz(torch.randn(2, 1, 5), "lact"), "is a vector; use muon none"),
    (lambda: choose_form(InnerLoop(**LACT_STEPS["own"]), "paralel", torch.device("cpu")), "did you mean 'parallel'"),
]


def cases():
    for family, options, message in NANOS:
        yield lambda family=family, options=options: nano(family, **options), message
    for name, options, others, message in PYRAMIDS:
        yield lambda name=name, options=options, others=others: build_pyramid(name, options=options, **others), message
    for options, message in LEARNERS:
        yield lambda options=options: InnerLoop(**options), message
    for reading, message in READINGS:
        yield lambda reading=reading: build_model(VITTT, reading=reading), message
    for name, options, message in DENOISERS:
        yield lambda name=name, options=options: build_denoiser(name, **options), message
    for name, (option, value) in itertools.product(SIZED, SIZES):
        yield lambda name=name, given={option: value}: build_model(name, **given), f"{name}: .*: {option} {value}: "
    yield from OTHERS


@pytest.mark.parametrize(("make", "message"), [pytest.param(*case, id=case[1]) for case in cases()])
def test_what_cannot_be_built_is_one_line(make, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
