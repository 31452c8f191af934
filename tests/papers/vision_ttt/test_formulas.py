"""The formulas of the ledger against by-hand counts, the models' own counts, and the numbers of an audit by hand."""

from fractions import Fraction

import pytest
import torch

from repro.bench.flops import cost
from repro.models.registry import build_model
from repro.models.ttt_mixer import DESIGNS as BUILT
from repro.models.ttt_mixer import TTTMixer
from repro.papers.vision_ttt import formulas
from repro.papers.vision_ttt.formulas import (
    PRINTED_DESIGNS,
    model_constant,
    padded_tokens,
    score_tensors_gb,
    table3_step_g,
    table3_weights,
    vim_blocks_g,
    vim_trivial_g,
    vit_g,
    vittt_design_g,
    vittt_g,
    vittt_trivial_g,
)
from repro.papers.vision_ttt.paper import PAPER as VISION_TTT
from repro.report.arithmetic import agreement


@pytest.mark.parametrize(("class_tokens", "audited"), [(0, "1.4448"), (1, "1.4520"), (2, "1.4592")])
def test_eq_13_of_class_tokens_is_the_number_of_an_audit(class_tokens, audited):
    assert agreement(vittt_design_g("conv2d", class_tokens), audited)


@pytest.mark.parametrize("design", PRINTED_DESIGNS)
def test_the_terms_that_it_leaves_out_are_the_rest_of_our_count(design):
    """Conv1d, DWConv and the learning rates."""
    convolutions = table3_weights(design) - 12 * PRINTED_DESIGNS[design][0] * 192**2
    rest = Fraction(196 * (convolutions + 12 * 192 * 3), 10**9)
    counted = cost("vittt_tiny_patch16_224", {"design": design}, (224, 224))
    assert counted.macs_g == pytest.approx(float(vittt_design_g(design) + rest), rel=1e-12)
    assert design != "conv2d" or vittt_trivial_g(192, 196) == rest


@pytest.mark.parametrize(("size", "width"), [("tiny", 192), ("small", 384), ("base", 768)])
def test_our_vim_is_eq_13_with_a_scan_of_8_and_what_eq_13_leaves_out(size, width):
    """Our scan has 4 multiply-adds per state and direction, where Eq. 13 has 18 for both."""
    counted = vim_blocks_g(width, 197, 8) + vim_trivial_g(width, 197)
    assert round(counted * 10**9) == cost(f"vim_{size}_patch16_224", {}, (224, 224)).macs


def test_multiply_adds_by_hand():
    expected = {
        # Vittt-T at 224: 12·196·(6·36864 + 6·192·64 + 4·16·192 + 3·192·512) + 196·768·192 + 192000
        vittt_g(192, 196): 12 * 196 * 602_112 + 28_901_376 + 192_000,
        # DeiT-T has 197 tokens: 12·(12·197·36864 + 2·197²·192) + 196·768·192 + 192000
        vit_g(192, 197): 12 * (87_146_496 + 14_902_656) + 28_901_376 + 192_000,
        # Vim-T: 24·197·(6·36864 + 18·384·16), the number that the paper cuts to 1.5
        vim_blocks_g(192, 197, 18): 24 * 197 * (221_184 + 110_592),
        table3_step_g("share_qk"): -12 * 36_864 * 196,
        table3_step_g("gating"): 12 * (36_864 + 4 * 192) * 196,
    }
    assert [giga * 10**9 for giga in expected] == list(expected.values())


def test_memory_and_tokens_by_hand():
    # DeiT-B at 1280x1280 and batch 64: 64·12 maps of 6400² fp16 scores
    assert score_tensors_gb(12, 6400) * 10**9 == 64 * 12 * 40_960_000 * 2 == 62_914_560_000
    assert score_tensors_gb(12, 6400, 2) == 2 * score_tensors_gb(12, 6400)
    assert padded_tokens(1333, 800) == (1344 // 16) * (800 // 16) == 4200
    assert padded_tokens(512, 512) == 1024


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_the_constants_are_those_of_the_built_models(size):
    """What the ledger declares of the models: read from models that are built, without memory for their weights."""
    with torch.device("meta"):
        vittt, vim = (build_model(f"{family}_{size}_patch16_224") for family in ("vittt", "vim"))
    mixers = [module for module in vittt.modules() if isinstance(module, TTTMixer)]
    assert len(mixers) == model_constant("layers")
    assert {mixer.head_dim for mixer in mixers} == {model_constant("head_dim")}
    assert {mixer.chunk_size for mixer in mixers} == {vittt.chunk_size} == {model_constant("chunk_size")}
    states = {tuple(value.shape)[-1] for name, value in vim.named_parameters() if "A_log" in name}
    assert states == {model_constant("vim_state")}


def test_the_ledger_may_call_them_and_the_first_design_has_no_step():
    assert tuple(PRINTED_DESIGNS) == BUILT
    own = {name for name, value in vars(formulas).items() if name.endswith(("_g", "_gb", "_tokens"))}
    assert own <= set(VISION_TTT.formulas())
    with pytest.raises(ValueError, match="ttt_layer is the first design"):
        table3_step_g("ttt_layer")
