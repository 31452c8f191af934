"""The start of every parameter of every family: its deviation, its bounds or its value, as the papers and releases say."""

import math
import re

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from repro.models.pyramid import build_pyramid
from tests.models.helpers import nano


def constant(value):
    return lambda p: torch.testing.assert_close(p, torch.as_tensor(value).expand_as(p))


def normal(std):
    """Within five standard errors, as all limits of deviations here."""

    def check(p):
        assert p.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * p.numel()))
        assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel())

    return check


def uniform(bound):
    def check(p):
        assert p.abs().max() <= bound * (1 + 1e-6)
        assert p.std().item() == pytest.approx(bound / 3**0.5, rel=5 / math.sqrt(2 * p.numel()))

    return check


def fan_in(p):
    """PyTorch's default of a weight (outputs, inputs, *kernel): uniform up to one over the root of its inputs."""
    uniform(p[0].numel() ** -0.5)(p)


def fan_out(p):
    normal(math.sqrt(2 / (math.prod(p.shape[2:]) * (p.shape[0] if p.shape[1] > 1 else 1))))(p)


def log_uniform_steps(bias):
    """Softplus of it is log-uniform from 1e-3 to 0.1: half of it below 0.01."""
    step = F.softplus(bias)
    assert 1e-3 * 0.99 <= step.min() < 2e-3 and 0.05 < step.max() <= 0.1 * 1.01
    assert step.log().mean().item() == pytest.approx(math.log(1e-2), abs=0.3)
    assert bias.ndim == 1 or not torch.equal(bias[0], bias[1])


def rates(N):
    """Of a scan, -exp(A_log): -1 to -N in each channel."""
    return constant(torch.arange(1.0, N + 1).log())


# family, options, rules that come before those of the layer's type: pattern of a parameter's name -> its check
CASES = [
    ("vittt", {"pool": "head"}, {"b0$|ln_bias$|token_scale$": constant(0.0), "ln_weight$": constant(1.0)}),
    ("softvittt", {"block": "deit", "pool": "head"}, {}),
    ("vit3", {}, {}),
    ("hvit3", {}, {}),
    ("t5", {"dwc": "qk"}, {}),
    ("study", {"inner_model": "swiglu", "position_std": 0.3}, {"table$": normal(0.3), "shift$": constant(0.0)}),
    ("lact", {}, {r"attn\.w\d$": lambda p: normal(p.shape[-1] ** -0.5)(p)}),
    (
        "vim",
        {},
        {
            "A(_b)?_log$": rates(16),
            r"mixer\.D(_b)?$": constant(1.0),
            r"dt_proj_b\.bias$": constant(0.0),
            r"dt_proj\.bias$": log_uniform_steps,
            r"dt_proj(_b)?\.weight$": uniform(4**-0.5),
            r"out_proj\.weight$": uniform((128 * 4) ** -0.5),  # PyTorch's default, over the root of the depth
            r"(in_proj|x_proj\w*)\.weight$": fan_in,
            r"patch_embed\.weight$": normal(768**-0.5),
            r"patch_embed\.bias$": constant(0.0),
        },
    ),
    ("vrwkv", {"post_norm": True}, {"pos_embed$": constant(0.0), "gamma": constant(1.0), "spatial_": lambda p: None}),
    (
        "vmamba",
        {},
        {
            "x_proj_weight$": lambda p: fan_in(p[0]),
            "dt_projs_weight$": lambda p: uniform(p.shape[-1] ** -0.5)(p),
            "dt_projs_bias$": log_uniform_steps,
            "A_logs$": constant(0.0),
            "Ds$": constant(1.0),
        },
    ),
    ("mambavision", {"layer_scale": 1e-5}, {"A_log$": rates(8), r"mixer\.D$": constant(1.0), "gamma$": constant(1e-5)}),
]
XAVIER = r"(value_proj|output_proj)\.weight$"
ADAPTER = {
    "^backbone|offset_proj": lambda p: None,
    "level_embed": normal(1.0),
    r"gamma$|\.bias$|weight_proj": constant(0.0),
    XAVIER: lambda p: uniform(math.sqrt(6 / sum(p.shape)))(p),
    r"(stages|up|dwconv|projections).*weight$": lambda p: fan_out(p) if p.ndim == 4 else constant(1.0)(p),
}


@torch.no_grad()
def check_start(model, rules):
    types = {f"{name}.": module for name, module in model.named_modules()}
    for name, p in model.named_parameters():
        parent, _, kind = name.rpartition(".")
        module = types.get(f"{parent}.")
        rule = next((check for pattern, check in rules.items() if re.search(pattern, name)), None)
        if rule is None and "Norm" in type(module).__name__:
            rule = constant(float(kind == "weight"))
        if rule is None and isinstance(module, (nn.Conv1d, nn.Conv2d)):
            rule = uniform(module.weight[0].numel() ** -0.5) if kind == "bias" else fan_in
        if rule is None:
            rule = constant(0.0) if kind == "bias" else normal(0.02)
        try:
            rule(p)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize(("family", "options", "rules"), CASES, ids=[case[0] for case in CASES])
def test_the_start_of_every_parameter(family, options, rules):
    check_start(nano(family, **options), rules)


def test_the_start_of_an_adapter():
    torch.manual_seed(0)
    adapter = build_pyramid("vit3_nano_patch16_144")
    check_start(adapter, ADAPTER)


def test_a_start_at_the_identity():
    start = timm.create_model("study_nano_patch16_144", depth=1, inner_start="identity").blocks[0].attn
    assert torch.equal(start.w2, torch.eye(32).expand(2, 32, 32)) and start.w1.std() < 0.03


def test_the_token_scale_begins_at_the_reciprocals():
    scale = nano("vittt").blocks[0].mixer.scale_per_token(16)
    torch.testing.assert_close(scale, (1 / torch.arange(1, 17)).expand(2, 16))
