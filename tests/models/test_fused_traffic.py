"""Launches and bytes of a block of Vittt-T at 1280 x 1280 pixels, against counts by hand: on tensors without data."""

import math
import weakref

import pytest
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import repro.models  # noqa: F401
from repro.models import fused_block

aten = torch.ops.aten
# views of results that nothing else has, and what only reserves memory
FREE = {aten._unsafe_view.default, aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}


def count_bytes(x):
    """Of the elements that exist: an expanded axis has one."""
    return x.element_size() * math.prod(size if stride else 1 for size, stride in zip(x.shape, x.stride(), strict=True))


class Traffic(TorchDispatchMode):
    """The bytes of each operation that is no view: it reads its inputs once, and writes its outputs once."""

    def __init__(self):
        super().__init__()
        self.moved = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        aliases = [each.alias_info for each in func._schema.returns]
        is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        if func.namespace in ("aten", "vision_ttt") and not is_view and func not in FREE:
            tensors = {id(x): x for x in tree_leaves([args, kwargs or {}, out]) if isinstance(x, torch.Tensor)}
            written_over = count_bytes(args[0]) if func._schema.name.endswith("_") else 0  # it is read and written
            self.moved.append(sum(map(count_bytes, tensors.values())) + written_over)
        return out


class Peak(TorchDispatchMode):
    """The most bytes that tensors hold at once, of those that an operation has taken or made."""

    def __init__(self):
        super().__init__()
        self.known, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves([args, kwargs or {}, out]) if isinstance(x, torch.Tensor)]
        self.known |= {id(x): weakref.ref(x) for x in tensors}
        alive = [x.untyped_storage() for ref in self.known.values() if (x := ref()) is not None]
        self.most = max(self.most, sum({each._cdata: each.nbytes() for each in alive}.values()))
        return out


def run_block(mode, fused, side=80, batch=64):
    """The bytes of a block's (B,T,D) tokens; in `mode` the block runs in bf16 inference."""
    block = timm.create_model("vittt_tiny_patch16_224", depth=1).blocks[0].eval().bfloat16()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"), torch.no_grad():
        for module in block.modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                empty = torch.empty_like(parameter, device="cuda")
                setattr(module, key, torch.nn.Parameter(empty, requires_grad=False))
        tokens = torch.empty(batch, side * side, block.mixer.dim, dtype=torch.bfloat16)
        if fused:
            fused_block.freeze(block, side * side)
        with mode:
            (block if fused else block.forward_plainly)(tokens, (side, side))
    return count_bytes(tokens)


def count_block(fused):
    """Launches, and bytes in units of the block's tokens."""
    traffic = Traffic()
    unit = run_block(traffic, fused)
    return len(traffic.moved), sum(traffic.moved) / unit


def test_a_plain_block():
    """DWConv with residual and norm 7, projection 7, padding and convolutions 16, scan 8, gate, sum and norm 10, output
    5, SwiGLU 29.3
    and some for the rates: 83.5.
    """
    launches, units = count_block(fused=False)
    assert units == pytest.approx(83.5, abs=0.1) and launches > 35


def test_a_fused_block_moves_half_of_it_in_a_quarter_of_the_launches():
    """Convolution and norm 3, projection 6.3, convolutions 6, scan 8, gate and norm 4, output 3, norm 2, SwiGLU 8.4."""
    launches, units = count_block(fused=True)
    assert units == pytest.approx(40.9, abs=0.1) and launches == 11


def test_what_a_fused_block_holds_at_once():
    """Tokens, what convolution and norm make of them 2, the projection 5.3, keys and queries 4, the result 2."""
    peak = Peak()
    unit = run_block(peak, fused=True)
    assert peak.most / unit == pytest.approx(14.4, abs=0.15)
