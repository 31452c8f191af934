"""Triton forward pass of Bi-WKV, and the parts that it shares with the backward pass.

A program walks through some tokens of one image, BLOCK_T at a time, in 32 or 64 channels for each of its warps, one or
two to a thread. The tokens of a block are a tuple of rows: a scan over them is straight-line code on a thread's own
registers. Its latency is hidden by the other programs. To have many of these, a long sequence is cut into segments,
since the operator is associative. Then there are three launches: the sum of each segment in both directions, a short
scan over the segments for the states at their ends, and the outputs, each segment from these states. k and v are read
once more for that.

Everything is in powers of two. A state (m, a, b) stands for the sums 2^m a and 2^m b, where m is a running maximum of
exponents. This is right for any k, w and u. The kernel goes through the tokens twice. Backward, it adds up blocks to
the state behind each block, which goes to scratch memory, 12 bytes for a block and channel. Forward, it has the state
before the block in registers, fetches the one behind it, and goes from both through the block. The second time k and v
come from the cache where a segment is short.

Where the weights change little over a block, |BLOCK_T w| + |u| ≤ GENTLE, as they do if both are divided by T, one
exponent for each direction serves a whole block. The token or state that it comes from has a weight of at least
2^−GENTLE in all outputs of the block; a term that is too small for a float next to it does not matter, whatever k is.
That saves a fifth of the instructions, which limit this kernel. Otherwise every token has its own maximum. Shape
letters as in `reference`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_launch import INTERPRETED as INTERPRETED  # callers find it here, as in any forward module
from ..triton_launch import ceil_div, dtype_obstacle, launch
from .reference import Arguments
from .triton_blocks import (
    LOG2E,
    add_states,
    go_back,
    go_gently,
    go_on,
    is_gentle,
    load_decay,
    load_sums,
    load_tokens,
    nothing,
    ones,
    store_sums,
    sum_rows,
)

DTYPES = torch.float32, torch.float16, torch.bfloat16
# tokens, a multiple of every BLOCK_T; a program has fewer tokens than two segments: its offsets fit in 32 bits
SEGMENT = 256


@triton.jit(do_not_specialize=["T", "bucket"])
def sums_kernel(
    w_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    sums_ptr,
    T,
    bucket,
    C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SEGMENT: tl.constexpr,
    ADJOINT: tl.constexpr,
):
    """Write the sums that each segment adds to the state behind it and to the one in front of it, (B,S,2,3,C).

    The first sum of a shorter last segment is wrong, and never read. For adjoint tokens k and v are L and the gradient
    of out; else out is not read.
    """
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = c < C
    w = load_decay(w_ptr, c, there, T)
    one = ones(w, BLOCK_T)
    image, segment = tl.program_id(0).to(tl.int64), tl.program_id(2)
    start = (image * T + segment * SEGMENT) * C + c
    tokens = tl.minimum(T - segment * SEGMENT, SEGMENT)
    m_left, a_left, b_left = nothing(BLOCK_C)
    m_right, a_right, b_right = nothing(BLOCK_C)
    WHOLE: tl.constexpr = 2 if C % BLOCK_C == 0 else 1
    full = tokens // BLOCK_T
    for i in tl.range(0, full):
        at = start + i * (BLOCK_T * C)
        k, x, y = load_tokens(k_ptr + at, v_ptr + at, out_ptr + at, tokens, there, one, C, BLOCK_T, ADJOINT, WHOLE)
        m, a, b = sum_rows(w, 0, k, x, y)
        m_right, a_right, b_right = add_states(m_right, a_right, b_right, m - i * BLOCK_T * w, a, b)
        # behind a block the last token is nearest: −w and the shift by BLOCK_T − 1 turn the distances round
        m, a, b = sum_rows(-w, 0, k, x, y)
        m_left, a_left, b_left = add_states(m_left - BLOCK_T * w, a_left, b_left, m - (BLOCK_T - 1) * w, a, b)
    if full * BLOCK_T < tokens:  # only in the last segment, which has no segment behind it
        at, left = start + full * (BLOCK_T * C), tokens - full * BLOCK_T
        k, x, y = load_tokens(k_ptr + at, v_ptr + at, out_ptr + at, left, there, one, C, BLOCK_T, ADJOINT, 0)
        m, a, b = sum_rows(w, 0, k, x, y)
        m_right, a_right, b_right = add_states(m_right, a_right, b_right, m - full * BLOCK_T * w, a, b)
    pointer = sums_ptr + (image * tl.num_programs(2) + segment) * (6 * C) + c
    store_sums(pointer, there, C, m_left, a_left, b_left)
    store_sums(pointer + 3 * C, there, C, m_right, a_right, b_right)


@triton.jit(do_not_specialize=["T"])
def ends_kernel(w_ptr, sums_ptr, ends_ptr, T, segments, C: tl.constexpr, BLOCK_C: tl.constexpr, SEGMENT: tl.constexpr):
    """Write the states in front of each segment and behind it, (B,S,2,3,C), from the sums of `sums_kernel`."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = c < C
    w = load_decay(w_ptr, c, there, T)
    start = tl.program_id(0).to(tl.int64) * segments * (6 * C) + c
    m_left, a_left, b_left = nothing(BLOCK_C)
    m_right, a_right, b_right = nothing(BLOCK_C)
    for i in tl.range(0, segments):
        at = start + tl.cast(i, tl.int64) * (6 * C)
        store_sums(ends_ptr + at, there, C, m_left, a_left, b_left)
        m, x, y = load_sums(sums_ptr + at, there, C)
        m_left, a_left, b_left = add_states(m_left - SEGMENT * w, a_left, b_left, m, x, y)
        at = start + tl.cast(segments - 1 - i, tl.int64) * (6 * C) + 3 * C
        store_sums(ends_ptr + at, there, C, m_right, a_right, b_right)
        m, x, y = load_sums(sums_ptr + at, there, C)
        m_right, a_right, b_right = add_states(m_right - SEGMENT * w, a_right, b_right, m, x, y)


@triton.jit(do_not_specialize=["T", "bucket"])
def forward_kernel(
    w_ptr,
    u_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    behind_ptr,
    ends_ptr,
    T,
    bucket,
    C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    KEEP: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Write out and, with KEEP, the binary logarithm of the denominator. `bucket` is a key for tuning.

    With SEGMENT a program has that many tokens, and starts from the states at their ends; else it has all tokens. C is
    a compile-time constant: the rows' addresses become one address and constants, a third of the instructions fewer.
    """
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = c < C
    w = load_decay(w_ptr, c, there, T)  # with T of the whole sequence, which is cut to a segment below
    u = tl.load(u_ptr + c, mask=there, other=0.0) * LOG2E
    start = tl.program_id(0).to(tl.int64) * T * C + c
    part = tl.program_id(0).to(tl.int64)
    if SEGMENT:
        start += tl.program_id(2).to(tl.int64) * (SEGMENT * C)
        part = part * tl.num_programs(2) + tl.program_id(2)
        T = tl.minimum(T - tl.program_id(2) * SEGMENT, SEGMENT)
        behind_ptr += part * (SEGMENT // BLOCK_T * 3 * C) + c
        ends_ptr += part * (6 * C) + c
    else:
        behind_ptr += part * tl.cdiv(T, BLOCK_T) * (3 * C) + c
    blocks = tl.cdiv(T, BLOCK_T)
    one = ones(w, BLOCK_T)

    m, a, b = nothing(BLOCK_C)
    if SEGMENT:
        m, a, b = load_sums(ends_ptr + 3 * C, there, C)
    WHOLE: tl.constexpr = 2 if C % BLOCK_C == 0 else 1
    full = T // BLOCK_T
    if full < blocks:
        m, a, b = go_back(w, m, a, b, k_ptr + start, v_ptr + start, behind_ptr, full, T, there, one, C, BLOCK_T, 0)
    for done in tl.range(0, full):
        m, a, b = go_back(
            w, m, a, b, k_ptr + start, v_ptr + start, behind_ptr, full - 1 - done, T, there, one, C, BLOCK_T, WHOLE
        )

    m, a, b = nothing(BLOCK_C)
    if SEGMENT:
        m, a, b = load_sums(ends_ptr, there, C)
    k_ptr += start
    v_ptr += start
    out_ptr += start
    lse_ptr += start
    if is_gentle(w, u, BLOCK_T):
        for i in tl.range(0, full):
            m, a, b = go_gently(
                w, u, m, a, b, k_ptr, v_ptr, behind_ptr, out_ptr, lse_ptr, i, T, there, C, BLOCK_T, KEEP, WHOLE
            )
        if full < blocks:
            m, a, b = go_gently(
                w, u, m, a, b, k_ptr, v_ptr, behind_ptr, out_ptr, lse_ptr, full, T, there, C, BLOCK_T, KEEP, 0
            )
    else:
        for i in tl.range(0, blocks):
            m, a, b = go_on(
                w, u, m, a, b, k_ptr, v_ptr, behind_ptr, out_ptr, lse_ptr, i, T, there, one, C, BLOCK_T, KEEP
            )


def unsupported(dtype: torch.dtype) -> str | None:
    """Return why these kernels cannot run k of this dtype, or None."""
    return dtype_obstacle("k", dtype, DTYPES)


def states_shape(shape: Sequence[int], keep_states: bool) -> tuple[int, ...]:
    """Return the shape of `forward`'s states for k (B,T,C): a logarithm for each output, or none.

    Takes symbolic sizes.
    """
    return tuple(shape) if keep_states else (0,)


def configs(dtype: torch.dtype | None = None) -> list[triton.Config]:
    """Return the candidates of both kernels, for k of any dtype; the first is the default, which runs untuned.

    BLOCK_T must not depend on the dtype: `launch_segments` sizes scratch memory by these configs without it.
    """
    return [config_of(8, 1), config_of(8, 2), config_of(8, 1, channels=2), config_of(4, 1, channels=2)]


def ends_configs(dtype: torch.dtype | None = None) -> list[triton.Config]:
    """Return the one config of the scan over segments."""
    return [triton.Config({"BLOCK_C": 32}, num_warps=1, num_stages=1)]


def count_segments(tokens: int) -> int:
    """Return how many segments a sequence is cut into: one where two would not be full."""
    return 1 if tokens < 2 * SEGMENT else ceil_div(tokens, SEGMENT)


def config_of(tokens: int, warps: int, channels: int = 1) -> triton.Config:
    """Return a config by the tokens of a block, which must divide SEGMENT, and the channels of a thread.

    A channel belongs to one thread, so that no barrier is needed between `store_sums` and `load_sums`. Two channels are
    loaded as a pair; with 8 tokens that takes fewer instructions for each channel, and more registers.
    """
    return triton.Config({"BLOCK_T": tokens, "BLOCK_C": 32 * warps * channels}, num_warps=warps, num_stages=1)


def shared_arguments(x: Arguments) -> dict[str, object]:
    """Return the arguments that both kernels take: contiguous k and v, w and u in fp32, and the sizes.

    `bucket` combines the bit lengths of T and of the number of channels in all images, which decide the best config.
    """
    B, T, C = x.k.shape
    return {
        "w_ptr": x.w.float().contiguous(),
        "u_ptr": x.u.float().contiguous(),
        "k_ptr": x.k.contiguous(),
        "v_ptr": x.v.contiguous(),
        "T": T,
        "C": C,
        "bucket": 64 * (B * C).bit_length() + T.bit_length(),
    }


def launch_segments(
    kernel, arguments: dict[str, object], states: int, x: Arguments, config: triton.Config | None, segments: int
) -> None:
    """Launch the forward or backward kernel, with scratch memory for `states` numbers of each block and channel.

    While it is not known which config will run, the blocks are those of the config with the most of them.
    """
    B, T, C = x.k.shape
    tokens = T if segments == 1 else segments * SEGMENT
    blocks = max(ceil_div(tokens, one.kwargs["BLOCK_T"]) for one in ([config] if config else configs()))
    behind = x.k.new_empty((B, blocks, states, C), dtype=torch.float32)

    def grid(meta: dict[str, int]) -> tuple[int, int, int]:
        return B, ceil_div(C, meta["BLOCK_C"]), segments

    launch(kernel, configs, (x.k.dtype,), grid, arguments | {"behind_ptr": behind}, x.k.device, config)


def scan_ends(
    arguments: dict[str, object],
    k: Tensor,
    v: Tensor,
    out: Tensor,
    config: triton.Config | None,
    *,
    adjoint: bool = False,
) -> Tensor:
    """Return the states in front of each segment and behind it, (B,S,2,3,C), fp32; see `sums_kernel`."""
    B, T, C = k.shape
    segments = count_segments(T)
    sums, ends = (k.new_empty((B, segments, 2, 3, C), dtype=torch.float32) for _ in range(2))
    shared = {"w_ptr": arguments["w_ptr"], "sums_ptr": sums, "C": C, "SEGMENT": SEGMENT}
    given = shared | {name: arguments[name] for name in ("T", "bucket")}
    given |= {"k_ptr": k, "v_ptr": v, "out_ptr": out, "ADJOINT": adjoint}
    grid = lambda c: (B, ceil_div(C, c["BLOCK_C"]), segments)  # noqa: E731
    launch(sums_kernel, configs, (v.dtype,), grid, given, k.device, config)
    given = shared | {"ends_ptr": ends, "T": T, "segments": segments}
    grid = lambda c: (B, ceil_div(C, c["BLOCK_C"]))  # noqa: E731
    launch(ends_kernel, ends_configs, (), grid, given, k.device, ends_configs()[0])
    return ends


def forward(x: Arguments, keep_states: bool, config: triton.Config | None = None) -> tuple[Tensor, Tensor]:
    """Return out (B,T,C) in k's dtype and states of shape `states_shape` in fp32.

    `config` is one of `configs`; None tunes.
    """
    arguments = shared_arguments(x)
    out = torch.empty_like(arguments["k_ptr"])
    states = out.new_empty(states_shape(out.shape, keep_states), dtype=torch.float32)
    segments = count_segments(out.shape[1])
    # with SEGMENT 0 the kernel reads no ends: any pointer will do
    split = {"ends_ptr": out, "SEGMENT": 0}
    if segments > 1:
        ends = scan_ends(arguments, arguments["k_ptr"], arguments["v_ptr"], out, config)
        split = {"ends_ptr": ends, "SEGMENT": SEGMENT}
    given = arguments | {"out_ptr": out, "lse_ptr": states, "KEEP": keep_states} | split
    launch_segments(forward_kernel, given, 3, x, config, segments)
    return out, states
