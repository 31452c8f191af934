"""Peak memory of one computation, without the memory allocated before it."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def measure_peak_mib(step: Callable[[], Any], device: str) -> float:
    """Measure the peak memory of the tensors that a computation allocates, in MiB.

    On a GPU the peak is read from PyTorch's allocator. On a CPU it is the largest total size of storages that are alive
    at once. This is exact and the same in every run, but omits buffers inside an operator.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with _LiveStorages() as live:
        step()
    return live.peak / 2**20


class _LiveStorages(TorchDispatchMode):
    """A dispatch mode that counts the bytes of the storages that operators allocate, until each is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # views and in-place results share the storage of an argument and allocate nothing
        given = {self._key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (key := self._key(tensor)) not in self.alive and key not in given:
                storage = tensor.untyped_storage()
                self.alive[key] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, key)
        return out

    def _free(self, key: int) -> None:
        """Forget a storage when it is freed, since another may get its address."""
        self.now -= self.alive.pop(key)

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        """Return the address of a tensor's storage, which no other has while it is alive."""
        return tensor.untyped_storage()._cdata
