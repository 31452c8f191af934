"""CUDA graphs of a frozen model's forward passes: the GPU runs all kernels of a pass without waiting for the host.

A graph replays kernels on fixed addresses. So there is one graph per layout of images. No graph is used after the model
has changed, or while hooks, modes or gradients need the modules to be called.
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

CALLS = 3  # eager calls of a layout before its capture: they compile and tune, and rare sizes need no graph
MOST_TOKENS = 2**16  # tokens of a batch; above, a block takes the GPU half a millisecond, which hides the host's work
SEEN = 64  # layouts without a graph whose calls are counted; the one seen longest ago is forgotten first
_logger = logging.getLogger(__name__)


class Pass(NamedTuple):
    """A captured forward pass: its static input, the graph, and its static output, which each replay overwrites."""

    given: Tensor
    graph: Any
    out: Tensor


class Cuda:
    """CUDA as `Graphs` uses it; tests put a stub in its place."""

    kind = "cuda"  # type of the devices whose images a graph takes

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[int | None]:
        """Enter a device; yield its current stream, or None while the caller captures a graph of their own there."""
        with torch.cuda.device(device):
            yield None if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream().cuda_stream

    def make_pool(self) -> Any:
        """Make a memory pool that captured passes share."""
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[Tensor], Tensor], given: Tensor, pool: Any) -> Pass:
        """Capture the pass of these images; raise a RuntimeError where CUDA refuses it."""
        # cuBLAS keeps one workspace per stream: the cached one may belong to another graph, and the one that this
        # capture allocates in its pool must not be used by a later graph
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool, torch.cuda.Stream(), capture_error_mode="thread_local")
        try:
            with torch.cuda.stream(torch.cuda.current_stream()), capture:  # a failed capture leaves its stream current
                out = run(given)
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        return Pass(given, graph, out)

    def release(self, passes: list[Pass]) -> None:
        """Wait until no pass runs, then free the memory of the passes."""
        torch.cuda.synchronize(passes[0].given.device)
        for each in passes:
            each.graph.reset()
        torch._C._cuda_clearCublasWorkspaces()


class _Watch:
    """Snapshot of everything in a model that a captured pass depends on: tensors, and attributes of modules."""

    def __init__(self, model: nn.Module):
        self.tensors, self.inner = Frozen(model, None), list(model.modules())[1:]
        self._tables = [vars(module) for module in self.inner]  # without the model's own: a reference cycle
        own = _list_attributes(vars(model))
        self._lengths, self._own = self._count(model), [each for each in own if not isinstance(each[1], Graphs)]
        slots = [(table, *each) for table in self._tables for each in _list_attributes(table)]
        self._owners, self._names, self._values = zip(*slots, strict=True)

    def is_fresh(self, model: nn.Module) -> bool:
        """Return whether no change is visible, in the sense of `Frozen`. It takes some ten microseconds per block."""
        return (
            self.tensors.is_fresh(model)
            and all(map(is_, map(dict.get, self._owners, self._names), self._values))
            and all(vars(model).get(name) is value for name, value in self._own)
            and self._lengths == self._count(model)
        )

    def _count(self, model: nn.Module) -> list[int]:
        """Return how many attributes each module has: a new one is in no list of old ones."""
        return list(map(len, (vars(model), *self._tables)))


def _list_attributes(table: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the public attributes of a module, which are compared by identity.

    `Frozen` compares weights and submodules. A change of another private attribute, or of the content of a list or
    dict, goes unnoticed: a captured pass would give the results of before.
    """
    return [(name, value) for name, value in table.items() if not name.startswith("_")]


class Graphs:
    """Store of a model's captured forward passes, one per layout of images.

    Args:
        model: a `Vittt`. A copy or a replica of it runs without graphs.
        limit: the largest number of graphs. One more drops all of them, and from then on a layout needs twice as many
            calls before it is captured.
        driver: captures the passes; the default is `Cuda`.
    """

    def __init__(self, model: Any, limit: int, driver: Any = None):
        self.limit, self.calls, self.driver = limit, CALLS, driver or Cuda()
        self.passes: dict[tuple, Pass] = {}
        self.seen: dict[tuple, int] = {}
        self._watch: _Watch | None = None
        self._pools: dict[int, Any] = {}  # one a stream: passes of one stream run one after the other
        self._owner, self._lock = weakref.ref(model), threading.RLock()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle to None: a copy of a model, or one from a file, is not frozen."""
        return type(None), ()

    def __call__(self, model: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `run(x)`, by a graph if there is one or its layout has come often enough, else eagerly."""
        if not self._takes(model, x):
            return run(x)
        with self.driver.on(x.device) as stream:
            if stream is not None:
                cast = torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type)
                key = stream, x.device, x.dtype, x.shape, x.stride(), cast
                with self._lock:  # copy, replay and clone share the static buffers
                    if (found := self._find(model, run, x, key)) is not None:
                        found.given.copy_(x)
                        found.graph.replay()
                        return found.out.clone()
            return run(x)

    def drop(self) -> None:
        """Drop all graphs after the running ones have ended, and free their memory."""
        with self._lock:
            if self.passes:
                self.driver.release([*self.passes.values()])
            self.passes, self.seen, self._pools, self._watch = {}, {}, {}, None

    def drop_stale(self, model: Any) -> None:
        """Drop all graphs if the model has changed."""
        with self._lock:
            if self._watch is not None and not self._watch.is_fresh(model):
                self.drop()

    def _takes(self, model: Any, x: Any) -> bool:
        """Return whether `x` is a batch that a graph can take, with no gradient, mode or determinism in force."""
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
        """Return the pass for a layout of images, captured now if the layout has come often enough, or None.

        `key` describes the layout; see `__call__`. Its first entry is the stream, and its last the dtype of autocast, or
        False without autocast.
        """
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
        """Capture the pass for a layout and store it, or return None where the model or CUDA does not allow it."""
        if len(self.passes) >= self.limit:
            self.drop()
            self.calls *= 2
        # autocast's cache of cast weights is freed before the graph is, so the graph must not use it
        autocast = torch.autocast(x.device.type, dtype=key[-1] or None, enabled=bool(key[-1]), cache_enabled=False)
        with torch.inference_mode(False), torch.no_grad(), autocast:
            given = x.clone()
            run(given)  # warm up on these very buffers: Triton specialises on the alignment of pointers
            if not _is_settled(model):  # the pass found a changed weight and unfroze a block
                return None
            self._watch = self._watch or _Watch(model)
            pool = self._pools.setdefault(key[0], self.driver.make_pool())
            try:
                found = self.passes[key] = self.driver.capture(run, given, pool)
            except RuntimeError as error:
                _logger.warning("no CUDA graphs of %s, which runs without: %s", type(model).__name__, error)
                self.limit = 0  # CUDA would refuse the next capture, too
                self.drop()
                return None
        self.seen.pop(key, None)
        return found


def _is_settled(model: Any) -> bool:
    """Return whether a pass can be captured: eval mode, all blocks frozen, no hook, no inference tensor.

    PyTorch does not count writes to inference tensors, so a graph could not notice a changed weight.
    """
    return (
        all(block.frozen is not None for block in model.blocks)
        and not _has_any_global_hook()
        and not any(module.training or is_watched(module) for module in model.modules())
        and not any(x.is_inference() for x in (*model.parameters(), *model.buffers()))
    )
