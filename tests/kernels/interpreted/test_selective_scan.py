"""What is the selective scan's own: groups and segments of tokens, small steps, strides that are not copied."""

import functools

import pytest
import torch

from kernels.selective_scan import selective_scan_bidir, triton_fwd
from kernels.tools import check
from kernels.tools.selective_scan_cases import CASES as cases
from kernels.tools.selective_scan_cases import MAMBAVISION, VMAMBA, Sizes
from repro.models import mambavision, ttt_mixer, vim, vmamba
from tests.kernels.helpers import find_errors
from tests.slow import slow

INPUTS, draw = cases.INPUTS, cases.draw


@pytest.mark.parametrize("dtype", ["fp32", slow("fp16")])
@pytest.mark.parametrize(
    ("segment", "batch", "tokens", "channels", "options"),
    [
        # two blocks of channels of which one is short, and one or three groups of tokens
        (None, 1, 5, 33, {}),
        slow(None, 1, 19, 8, {}),
        slow(None, 1, 19, 8, VMAMBA),
        slow(None, 1, 19, 33, VMAMBA),
        # three to five segments, the last full, short or of one token, with two groups each
        (16, 1, 49, 8, {}),
        slow(16, 1, 53, 33, {}),
        slow(16, 2, 48, 8, {}),
        slow(16, 1, 79, 40, VMAMBA),
        slow(16, 2, 49, 8, MAMBAVISION),
    ],
)
def test_groups_and_segments_of_tokens_join(monkeypatch, segment, batch, tokens, channels, options, dtype):
    """Output and every gradient."""
    monkeypatch.setattr(triton_fwd, "GROUP", 8)
    monkeypatch.setattr(triton_fwd, "SEGMENT", segment or triton_fwd.SEGMENT)
    sizes = Sizes(batch=batch, tokens=tokens, channels=channels, **options)
    shape = (batch, tokens, len(sizes.reverse), channels)
    if segment:
        assert triton_fwd.count_segments(shape) == -(-tokens // segment)
    else:
        assert triton_fwd.states_shape(shape, sizes.state_dim, True)[2] == (2 if tokens == 19 else 0)
    row = check.compare(cases, "", sizes, dtype, seeds=[0])
    assert row["passed"], row


@pytest.mark.parametrize("name", ["u", *map(slow, ("delta", "C"))])
def test_nan_passes_from_segment_to_segment(name, monkeypatch):
    """In the order of each direction (C: to its own output), of its own image, and to no token before it."""
    monkeypatch.setattr(triton_fwd, "GROUP", 8)
    monkeypatch.setattr(triton_fwd, "SEGMENT", 16)
    inputs = dict(zip(INPUTS, (x.float() for x in draw(0, Sizes(batch=2, tokens=50, channels=8))[:-1]), strict=True))
    inputs[name][0, 20] = float("nan")
    bad = selective_scan_bidir(*inputs.values(), backend="triton").isnan().all(-1)
    reached = torch.arange(50) == 20 if name == "C" else torch.arange(50) >= 20
    assert not bad[1].any() and torch.equal(bad[0, :, 0], reached)
    assert torch.equal(bad[0, :, 1], reached if name == "C" else torch.arange(50) <= 20)


@pytest.mark.parametrize(
    ("images", "tokens", "segments"),
    [(1, 6400, 25), (21, 6400, 25), (22, 6400, 1), (64, 6400, 1), (1, 1, 1), (1, 767, 1), (1, 768, 3)],
)
def test_one_large_image_fills_a_gpu_and_many_images_are_not_cut(images, tokens, segments):
    """Vim-T, at 1,280 pixels: 2 directions of 12 blocks of channels."""
    assert triton_fwd.count_segments((images, tokens, 2, 384)) == segments


def test_small_steps_keep_their_accuracy():
    """Δ about e^−10 and no skip: log(1 + e) as it stands would have three digits."""
    sizes = Sizes(batch=1, tokens=3, channels=8)
    inputs = dict(zip((*INPUTS, "dout"), draw(0, sizes), strict=True))
    inputs |= {"delta": 0.1 * inputs["delta"], "D": 0 * inputs["D"], "delta_bias": 0 * inputs["delta_bias"] - 10}
    errors = find_errors(cases, [x.float() for x in inputs.values()], sizes, "triton")
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(("options", "sequences", "strided"), [({}, 0, "delta B C z"), (VMAMBA, 2, "delta B C")])
def test_what_a_layer_gives_is_taken_by_its_strides(options, sequences, strided):
    """Parts of a projection, and u's sequences, one memory for four routes: without a copy."""
    sizes = Sizes(batch=2, tokens=3, channels=32, **options)
    inputs = cases.layer_inputs(sizes, torch.device("cpu"))
    given = dict(zip(INPUTS, inputs, strict=True))
    assert not any(given[name].is_contiguous() for name in strided.split())
    taken = triton_fwd.shared_arguments(cases.arguments(inputs, sizes))
    assert all(taken[f"{name}_ptr"] is given[name] for name in ("u", *strided.split())) and taken["K"] == sequences
    inputs = [x.half() if x is not None and x.dtype == torch.bfloat16 else x for x in inputs]
    run = functools.partial(cases.bind(sizes), backend="triton")
    assert torch.equal(run(*inputs), run(*(x if x is None else x.contiguous() for x in inputs)))


def test_numbers_of_states_that_the_kernels_do_not_take():
    inputs = [x.float() for x in draw(0, Sizes(batch=1, tokens=3, channels=8, state_dim=5))[:-1]]
    with pytest.raises(ValueError, match="A's last axis N is 5, expected one of 1, 8, 16, 32"):
        selective_scan_bidir(*inputs, backend="triton")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: vim.VimMixer(16, 4), (1, 5, 16)),
        (lambda: vmamba.SS2D(8, 2), (1, 3, 4, 8)),
        (lambda: mambavision.MambaVisionMixer(16), (2, 9, 16)),
        (lambda: ttt_mixer.TTTMixer(32, 2, 40), (2, 40, 32)),
    ],
    ids=["vim", "vmamba", "mambavision", "vittt"],
)
def test_layers_train_on_the_kernels(make, shape):
    """The strides that each layer itself produces, under autocast to fp16 and without; against the torch backend."""
    torch.manual_seed(0)
    mixer, x = make(), torch.randn(shape)
    for autocast, limit in ((False, 1e-4), (True, 2e-2 if shape[-1] == 32 else 5e-3)):
        results = []
        for mixer.backend in ("triton", "torch"):
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                out = mixer(x)
                assert mixer.selected_backend(out.dtype) == mixer.backend
            results.append([out, *torch.autograd.grad(out.float().square().sum(), list(mixer.parameters()))])
        assert max(map(check.relative_error, *results)) < limit
