"""Forward passes of a frozen model as CUDA graphs: a GPU runs all launches of one, and waits for no host between them.

A graph repeats what was launched on the memory where it lay. So there is one a layout of images, and none is taken where
the model has changed since, or somebody looks into the pass.
"""

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .as_built import is_watched
from .fused_block import Frozen, is_plain

CALLS = 3  # of a layout, without a graph: they compile and tune, and a size that comes once is never captured
MOST_TOKENS = 2**16  # of a batch; above, a block takes a GPU half a millisecond, which hides its host
SEEN = 64  # layouts without a graph whose calls are counted
_logger = logging.getLogger(__name__)


class Pass(NamedTuple):
    """A captured forward pass: where its images go, what repeats it, and its output, which a repetition overwrites."""

    given: Tensor
    graph: Any
    out: Tensor


class Cuda:
    """What the store asks of CUDA."""

    kind = "cuda"

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[int | None]:
        """A context on a device: its current stream, or None while somebody captures a graph of their own there."""
        with torch.cuda.device(device):
            yield None if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream().cuda_stream

    def make_pool(self) -> Any:
        """Memory that captured passes share."""
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[Tensor], Tensor], given: Tensor, pool: Any) -> Pass:
        """The pass of these images; raises a RuntimeError where CUDA refuses it."""
        # cuBLAS keeps a workspace a stream: what it has is another graph's, and this graph's must not become another's
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool, torch.cuda.Stream(), capture_error_mode="thread_local")
        try:
            with torch.cuda.stream(torch.cuda.current_stream()), capture:  # which, failing, leaves its stream current
                out = run(given)
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        return Pass(given, graph, out)

    def release(self, passes: list[Pass]) -> None:
        """Give back the memory of passes, once none of them runs any more."""
        torch.cuda.synchronize(passes[0].given.device)
        for each in passes:
            each.graph.reset()
        torch._C._cuda_clearCublasWorkspaces()


class _Watch:
    """All that a captured pass depends on, of a model: its tensors, and the attributes of its modules."""

    def __init__(self, model: nn.Module):
        self.tensors, self.inner = Frozen(model, None), list(model.modules())[1:]
        self._tables = [vars(module) for module in self.inner]  # the model's own would keep it alive
        own = _list_attributes(vars(model))
        self._lengths, self._own = self._count(model), [each for each in own if not isinstance(each[1], Graphs)]
        slots = [(table, *each) for table in self._tables for each in _list_attributes(table)]
        self._owners, self._names, self._values = zip(*slots, strict=True)

    def is_fresh(self, model: nn.Module) -> bool:
        """Whether nothing has changed, so far as it can be seen: see `Frozen`. It takes some ten microseconds a block."""
        return (
            self.tensors.is_fresh(model)
            and all(map(is_, map(dict.get, self._owners, self._names), self._values))
            and all(vars(model).get(name) is value for name, value in self._own)
            and self._lengths == self._count(model)
        )

    def _count(self, model: nn.Module) -> list[int]:
        return list(map(len, (vars(model), *self._tables)))


def _list_attributes(table: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in table.items() if not name.startswith("_")]


class Graphs:
    """The captured forward passes of a model, one a layout of images.

    Args:
        model: a `Vittt`. A copy of it, or a replica, does without.
        limit: how many are kept; at one more, all are dropped, and from then on it takes twice as many calls before a
            layout is captured.
        driver: what captures them.
    """

    def __init__(self, model: Any, limit: int, driver: Any = None):
        self.limit, self.calls, self.driver = limit, CALLS, driver or Cuda()
        self.passes: dict[tuple, Pass] = {}
        self.seen: dict[tuple, int] = {}
        self._watch: _Watch | None = None
        self._pools: dict[int, Any] = {}  # one a stream: passes of one stream run one after the other
        self._owner, self._lock = weakref.ref(model), threading.RLock()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """To None: a copy of a model, or one from a file, is not frozen."""
        return type(None), ()

    def __call__(self, model: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`run(x)` by a graph where there is one, or it is time for one, else as it is."""
        if not self._takes(model, x):
            return run(x)
        with self.driver.on(x.device) as stream:
            if stream is not None:
                cast = torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type)
                key = stream, x.device, x.dtype, x.shape, x.stride(), cast
                with self._lock:  # the three calls of a repetition
                    if (found := self._find(model, run, x, key)) is not None:
                        found.given.copy_(x)
                        found.graph.replay()
                        return found.out.clone()
            return run(x)

    def drop(self) -> None:
        """Let go of all of them, after what runs; their memory and the model's then belong to others."""
        with self._lock:
            if self.passes:
                self.driver.release([*self.passes.values()])
            self.passes, self.seen, self._pools, self._watch = {}, {}, {}, None

    def drop_stale(self, model: Any) -> None:
        """Let go of all of them if the model has changed."""
        with self._lock:
            if self._watch is not None and not self._watch.is_fresh(model):
                self.drop()

    def _takes(self, model: Any, x: Any) -> bool:
        """Whether it is a batch of images for a graph, and nobody looks into the pass but at its modules."""
        return (
            isinstance(x, Tensor)
            and is_plain([x])
            and (x.device.type, x.layout, x.ndim) == (self.driver.kind, torch.strided, 4)
            and 0 < x.shape[0] * x.shape[2] * x.shape[3] <= MOST_TOKENS * model.patch_size**2
            and self.limit > 0
            and self._owner() is model
            and not torch.are_deterministic_algorithms_enabled()
            and all(type(mode) is DeviceContext for mode in _get_current_function_mode_stack())
        )

    def _find(self, model: Any, run: Callable[[Tensor], Tensor], x: Tensor, key: tuple) -> Pass | None:
        self.drop_stale(model)
        if self._watch is not None and (_has_any_global_hook() or any(map(is_watched, (model, *self._watch.inner)))):
            return None
        if key in self.passes:
            return self.passes[key]
        count = self.seen.pop(key, 0) + 1
        if len(self.seen) >= SEEN:
            del self.seen[next(iter(self.seen))]
        self.seen[key] = count
        if count <= self.calls or not _is_settled(model):
            return None
        return self._capture(model, run, x, key)

    def _capture(self, model: Any, run: Callable[[Tensor], Tensor], x: Tensor, key: tuple) -> Pass | None:
        if len(self.passes) >= self.limit:
            self.drop()
            self.calls *= 2
        # what autocast keeps of a weight would be gone before the graph is
        autocast = torch.autocast(x.device.type, dtype=key[-1] or None, enabled=bool(key[-1]), cache_enabled=False)
        with torch.inference_mode(False), torch.no_grad(), autocast:
            given = x.clone()
            run(given)  # what is compiled for tensors where these lie
            if not _is_settled(model):  # the pass has seen another weight
                return None
            self._watch = self._watch or _Watch(model)
            pool = self._pools.setdefault(key[0], self.driver.make_pool())
            try:
                found = self.passes[key] = self.driver.capture(run, given, pool)
            except RuntimeError as error:
                _logger.warning("no CUDA graphs of %s, which runs without: %s", type(model).__name__, error)
                self.limit = 0
                self.drop()
                return None
        self.seen.pop(key, None)
        return found


def _is_settled(model: Any) -> bool:
    """Whether a model's pass can be captured: in inference, all blocks frozen, no hook, and every write is counted."""
    return (
        all(block.frozen is not None for block in model.blocks)
        and not _has_any_global_hook()
        and not any(module.training or is_watched(module) for module in model.modules())
        and not any(x.is_inference() for x in (*model.parameters(), *model.buffers()))
    )
