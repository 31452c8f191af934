"""Bytes that operations move and how many there are, counted on tensors without data: what a GPU's memory has to do, whatever its speed.

Every operation reads its inputs once and writes its outputs once. Views move nothing, broadcast inputs are read as they lie, and caches
are left out, so that the count is the least that these operations can move when each is a launch of its own.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import timm
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..models import fused_block

_NAMESPACES = "aten", "vision_ttt"  # those whose operations run on the device
# they only reserve memory
_FREE = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default}


@dataclasses.dataclass
class Launch:
    """An operation by its name, and the bytes that it moves."""

    name: str
    bytes: int


class Traffic(TorchDispatchMode):
    """A context that keeps a `Launch` for each operation that is not a view."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES and not _is_view(func) and func not in _FREE:
            tensors = {id(x): x for x in (*_tensors([args, kwargs or {}]), *_tensors(out))}
            moved = sum(map(_bytes, tensors.values()))
            if func == torch.ops.aten.addmm.default and args[0].dim() == 2:  # PyTorch copies the summand, to which the product is added
                copied = _bytes(args[0]) + _bytes(out)
                self.launches.append(Launch("aten.copy_.default", copied))
                moved += _bytes(out) - _bytes(args[0])
            elif func._schema.name.endswith("_"):  # what is changed in place is read and written
                moved += _bytes(args[0])
            self.launches.append(Launch(str(func), moved))
        return out


def count_launches(make: Callable[[], Callable[[], Any]], device: str = "cuda") -> list[Launch]:
    """What a call launches on a device that need not exist: `make` gets its tensors there and returns the call."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        call = make()
        with torch.no_grad(), Traffic() as traffic:
            call()
    return traffic.launches


def count_block(name: str, *, batch: int, side: int, fused: bool) -> dict[str, float]:
    """Launches of a block of Vittt in bf16 inference, its constants made before, and the bytes that it moves, in units of its tokens'.

    `side` is that of the grid, and a unit is a (B,T,D) tensor. `fused`: by `models.fused_block`, as where the kernels run; else by plain
    PyTorch around the scan.
    """
    block = timm.create_model(name, depth=1).blocks[0].eval().requires_grad_(False)
    width = block.mixer.dim

    def make() -> Callable[[], Any]:
        for module in block.modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, key, torch.nn.Parameter(torch.empty(parameter.shape, dtype=torch.bfloat16), requires_grad=False))
        tokens = torch.empty(batch, side * side, width, dtype=torch.bfloat16)
        if not fused:
            return lambda: block.forward_plainly(tokens, (side, side))
        fused_block.freeze(block, side * side)
        return lambda: fused_block.forward(block, tokens, (side, side))

    found = count_launches(make)
    unit = batch * side * side * width * torch.bfloat16.itemsize
    return {"launches": len(found), "units": sum(each.bytes for each in found) / unit}


def _is_view(func: Any) -> bool:
    if func == torch.ops.aten._unsafe_view.default:  # a view of a result that nothing else has
        return True
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _tensors(values: Any) -> Iterator[Tensor]:
    found: Iterable[Any] = tree_leaves(values)
    yield from (x for x in found if isinstance(x, Tensor))


def _bytes(x: Tensor) -> int:
    """The bytes of the elements that exist: an expanded axis has one."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count * x.element_size()
