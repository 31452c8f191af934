"""How fast operators run, as a share of what the same machine does at the same moment: a matrix product, or a copy."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from kernels import selected_backend, ttt_linear, ttt_linear_bidir
from kernels.bi_wkv import bi_wkv
from kernels.selective_scan import selective_scan_bidir
from kernels.ttt_linear.reference import ttt_linear_dual

from ..models.ttt_mixer import ttt_linear_macs
from .speed import DTYPES, STEP_TIMERS, median_interval


def op_rate(
    *,
    batch: int,
    tokens: int,
    heads: int,
    head_dim: int,
    chunk_size: int,
    matmul_side: int,
    repeats: int,
    device: str,
    dtype: str,
    backend: str,
) -> dict[str, Any]:
    """Time the op and a square matrix product in turn, so that a drifting clock or a busy machine meets both alike.

    Args:
        batch, tokens, heads, head_dim, chunk_size: sizes of the op; both directions run.
        matmul_side: n of the n x n x n product.
        repeats: timed turns, after one that is not timed.
        device: `cpu` or `cuda`.
        dtype: fp32 (PyTorch's default for products, without TF32), bf16 or fp16.
        backend: see `kernels.ttt_linear`.

    Returns:
        {matmul_gflop_per_s, op_gflop_per_s, share_of_matmul_rate, share_ci95, op_ms, matmul_ms, op_samples_ms,
        matmul_samples_ms, sizes, backend}: rates from median times, 2 FLOPs per MAC, the op's MACs by `ttt_mixer.ttt_linear_macs`;
        `share_ci95` is the interval of the median over the per-turn shares.
    """
    random = _drawer(device)
    cast = getattr(torch, DTYPES[dtype])
    q, k, v = (random(batch, tokens, 2, heads, head_dim, dtype=cast) for _ in range(3))
    lr = torch.sigmoid(random(batch, tokens, heads)) / head_dim
    scale = (1 / torch.arange(1, chunk_size + 1, device=device)).repeat(2, 1)
    W0, b0 = 0.02 * random(2, heads, head_dim, head_dim), torch.zeros(2, heads, head_dim, device=device)
    weight, bias = torch.ones_like(b0), torch.zeros_like(b0)
    a, b = (random(matmul_side, matmul_side, dtype=cast) for _ in range(2))
    steps = {
        "matmul": lambda: a @ b,
        "op": lambda: ttt_linear_bidir(q, k, v, lr, scale, W0, b0, weight, bias, chunk_size=chunk_size, backend=backend),
    }
    samples: dict[str, list[float]] = {name: [] for name in steps}
    timer = STEP_TIMERS[torch.device(device).type]
    with torch.inference_mode():
        for turn in range(repeats + 1):
            for name, step in steps.items():
                elapsed_ms = timer(step)
                if turn:
                    samples[name].append(elapsed_ms)

    gflop = {"matmul": 2 * matmul_side**3 / 1e9, "op": 2 * 2 * batch * ttt_linear_macs(tokens, heads, head_dim, chunk_size) / 1e9}
    rate = {name: gflop[name] / (statistics.median(samples[name]) / 1e3) for name in steps}
    shares = [
        (gflop["op"] / op_ms) / (gflop["matmul"] / matmul_ms) for op_ms, matmul_ms in zip(samples["op"], samples["matmul"], strict=True)
    ]
    interval = median_interval(shares)
    return {
        "matmul_gflop_per_s": rate["matmul"],
        "op_gflop_per_s": rate["op"],
        "share_of_matmul_rate": rate["op"] / rate["matmul"],
        "share_ci95": list(interval) if interval else None,
        **{f"{name}_ms": statistics.median(samples[name]) for name in steps},
        **{f"{name}_samples_ms": [round(s, 3) for s in samples[name]] for name in steps},
        "backend": selected_backend(backend, device, head_dim=head_dim, chunk_size=chunk_size, dtype=cast),
        "sizes": {
            "batch": batch,
            "tokens": tokens,
            "heads": heads,
            "head_dim": head_dim,
            "chunk_size": chunk_size,
            "matmul_side": matmul_side,
        },
    }


def kept_for_backward(
    *, batch: int, tokens: int, heads: int, head_dim: int, chunk_size: int, device: str, backend: str
) -> dict[str, float]:
    """What autograd keeps between the passes for one direction: of the equations as written, and of the op, which recomputes.

    The equations keep a state per chunk and what is computed from it, the op its inputs: Appendix B.2's fusion and recomputation.

    Returns:
        {kept_reference_mib, kept_kernel_mib, memory_reference_over_kernel}: sizes of the distinct storages, counted, fp32.
    """
    random = _drawer(device)
    q, k, v = (random(batch, tokens, heads, head_dim).requires_grad_() for _ in range(3))
    lr = (torch.sigmoid(random(batch, tokens, heads)) / head_dim).requires_grad_()
    scale = 1 / torch.arange(1, chunk_size + 1, device=device)
    W0 = (0.02 * random(heads, head_dim, head_dim)).requires_grad_()
    b0, bias = (torch.zeros(heads, head_dim, device=device, requires_grad=True) for _ in range(2))
    weight = torch.ones(heads, head_dim, device=device, requires_grad=True)
    inputs = q, k, v, lr, scale, W0, b0, weight, bias
    steps = {
        "reference": lambda: ttt_linear_dual(*inputs, chunk_size=chunk_size),
        "kernel": lambda: ttt_linear(*inputs, chunk_size=chunk_size, backend=backend),
    }
    mib: dict[str, float] = {}
    for name, step in steps.items():
        storages: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            step()
        mib[name] = sum(storage.nbytes() for storage in storages.values()) / 2**20
    found = {f"kept_{name}_mib": size for name, size in mib.items()}
    return {**found, "memory_reference_over_kernel": mib["reference"] / mib["kernel"]}


TOKENS = 6400  # 1280 x 1280 pixels
REPEATS = 7
_COPIED = 2**28  # bytes; far beyond any cache
Case = tuple[str, Callable[[], Any], int]


def _selective_scan(batch: int, device: str, dtype: torch.dtype) -> Case:
    """Vim-T: E 384, N 16, both directions."""
    width, states = 384, 16
    draw = _drawer(device)
    u, delta = (draw(batch, TOKENS, 2, width, dtype=dtype) for _ in range(2))
    B, C = (draw(batch, TOKENS, 2, states, dtype=dtype) for _ in range(2))
    z = draw(batch, TOKENS, width, dtype=dtype)
    A = -torch.arange(1.0, states + 1, device=device).expand(2, width, states).contiguous()
    D, bias = torch.ones(2, width, device=device), torch.full((2, width), -4.0, device=device)
    moved = sum(x.numel() * x.element_size() for x in (u, delta, B, C, z, u))  # and out, of u's size
    return "selective_scan_bidir", lambda: selective_scan_bidir(u, delta, A, B, C, D, z, bias), moved


def _bi_wkv(batch: int, device: str, dtype: torch.dtype) -> Case:
    """VRWKV-T: C 192."""
    draw = _drawer(device)
    k, v = (draw(batch, TOKENS, 192, dtype=dtype) for _ in range(2))
    w, u = (draw(192) / TOKENS for _ in range(2))
    return "bi_wkv", lambda: bi_wkv(w, u, k, v), 3 * k.numel() * k.element_size()


# family of models -> its operator at the family's smallest width, and the bytes that it must read and write
OPERATORS: dict[str, Callable[[int, str, torch.dtype], Case]] = {"vim": _selective_scan, "vrwkv": _bi_wkv}


def share_of_copy(family: str, *, batch: int, device: str, dtype: str) -> dict[str, Any]:
    """Time the forward pass of a family's operator at 6400 tokens and a copy within memory, in turn.

    Returns:
        {operator, share_of_copy_percent, op_gb_per_s, copy_gb_per_s}: from median times; every tensor of the operator counted once,
        the copy as read and written.
    """
    name, step, moved = OPERATORS[family](batch, device, getattr(torch, DTYPES[dtype]))
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timer = STEP_TIMERS[torch.device(device).type]
    taken: dict[str, list[float]] = {"op": [], "copy": []}
    with torch.inference_mode():
        for turn in range(REPEATS + 1):
            for which, each in (("op", step), ("copy", lambda: target.copy_(source))):
                elapsed_ms = timer(each)
                if turn:
                    taken[which].append(elapsed_ms)
    rates = [size / statistics.median(taken[which]) / 1e6 for which, size in (("op", moved), ("copy", 2 * _COPIED))]
    return {"operator": name, "share_of_copy_percent": 100 * rates[0] / rates[1], "op_gb_per_s": rates[0], "copy_gb_per_s": rates[1]}


def _drawer(device: str) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return draw
