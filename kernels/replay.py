"""What was launched for tensors of one layout, repeated for others of the same layout.

From an operator's arguments to its launches is a long way for a host: sizes, strides, backends, configs. Where nobody
watches (`custom_op.is_plain`) it is gone once for each layout, and a recorder notes the launches as steps. What they
need in between is made for each repetition, and let go after the step that is the last to use it.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# what kernels write, of their arguments: made anew for each repetition; a new kernel's own are added here
WRITTEN = frozenset(
    f"{name}_ptr"
    for name in ("out", "states", "G", "S", "beta", "lse", "sums", "ends", "behind", "edges", "steps", "starts")
)
REPLAYED = {"cuda"}  # the kinds of devices on which launches are repeated


class Place(NamedTuple):
    """Where a step takes a tensor: its number, and shape, strides and offset where it is a part of it."""

    argument: int
    number: int
    view: tuple[Any, Any, int] | None


class Step(NamedTuple):
    """One launch: what runs it, its arguments with None for the tensors that differ, and these; the numbers of the
    tensors that are made before it, with shape and dtype, and of those that are let go after it.
    """

    run: Callable[..., None]
    values: list[Any]
    places: list[Place]
    made: list[tuple[int, Any, torch.dtype]]
    gone: list[int]


class Recorder:
    """Notes launches as steps.

    Args:
        inputs: the tensors that will be others.
        constants: tensors that will be the same; where a launch takes yet another, nothing can be repeated.
    """

    def __init__(self, inputs: Sequence[Tensor], constants: Iterable[Tensor] = ()):
        self.inputs, self.steps = inputs, []
        self.is_ready = self.is_repeatable = True
        # a weak reference keeps the number of a storage from being used again
        self._known = [StorageWeakRef(x.untyped_storage()) for x in inputs]
        self._constants = {StorageWeakRef(x.untyped_storage()).cdata for x in constants}

    def add(self, run: Callable[..., None], names: Sequence[str], values: Sequence[Any]) -> None:
        """Note a launch. An argument whose name ends in `_ptr` counts by its first element, not its shape."""
        step = Step(run, list(values), [], [], [])
        for argument, (name, x) in enumerate(zip(names, values, strict=True)):
            if isinstance(x, Tensor) and (place := self._find(argument, name, x, step)):
                step.places.append(place)
                step.values[argument] = None
        self.steps.append(step)

    def _find(self, argument: int, name: str, x: Tensor, step: Step) -> Place | None:
        reference = StorageWeakRef(x.untyped_storage())
        same = [i for i, known in enumerate(self._known) if known.cdata == reference.cdata]
        # of inputs that are parts of one tensor, the one that begins there
        number = next((i for i in same if i >= len(self.inputs) or self._begins(i, x)), same[0] if same else None)
        if number is None and reference.cdata in self._constants:
            return None
        if number is None and name in WRITTEN and x.is_contiguous() and not x.storage_offset():
            step.made.append((len(self._known), tuple(x.shape), x.dtype))
            self._known.append(reference)
            return Place(argument, len(self._known) - 1, None)
        if number is None:
            self.is_repeatable = False
            return None
        if number < len(self.inputs):
            same_size = x.numel() == self.inputs[number].numel()
            self.is_repeatable &= self._begins(number, x) and same_size and name.endswith("_ptr")
            return Place(argument, number, None)
        if name.endswith("_ptr") and not x.storage_offset():
            return Place(argument, number, None)
        return Place(argument, number, (tuple(x.shape), x.stride(), x.storage_offset()))

    def _begins(self, number: int, x: Tensor) -> bool:
        return x.data_ptr() == self.inputs[number].data_ptr()

    def finish(self, out: Tensor) -> "Replay | None":
        """The steps as what makes `out`; None where they cannot be repeated."""
        step = Step(_do_nothing, [], [], [], [])
        place = self._find(0, "", out, step)
        if not self.is_repeatable or place is None or place.number < len(self.inputs):
            return None
        last = {each.number: i for i, step in enumerate(self.steps) for each in step.places}
        for number, i in last.items():
            if number != place.number:
                self.steps[i].gone.append(number)
        return Replay(self.steps, len(self._known), place, out.device)


class Replay:
    """Steps for other inputs of the same layout; holds none of the tensors that differ."""

    def __init__(self, steps: Sequence[Step], count: int, out: Place, device: torch.device):
        self.steps, self.count, self.out, self.device = steps, count, out, device

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The result for these inputs."""
        tensors: list[Any] = [*inputs, *[None] * (self.count - len(inputs))]
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            for run, values, places, made, gone in self.steps:
                for number, shape, dtype in made:
                    tensors[number] = torch.empty(shape, dtype=dtype, device=self.device)
                given = values.copy()
                for argument, number, view in places:
                    given[argument] = tensors[number] if view is None else tensors[number].as_strided(*view)
                run(*given)
                del given  # which would hold what is gone
                for number in gone:
                    tensors[number] = None
        out = tensors[self.out.number]
        return out if self.out.view is None else out.as_strided(*self.out.view)


class _Noting(threading.local):
    recorder: Recorder | None = None


NOTING = _Noting()  # who notes the launches of this thread

# what operators launched, by their names and layouts
REPLAYS: dict[tuple, Replay | None] = {}


@contextlib.contextmanager
def recording_into(recorder: Recorder) -> Iterator[None]:
    """A context in which a recorder gets all launches of the thread."""
    NOTING.recorder = recorder
    try:
        yield
    finally:
        NOTING.recorder = None


def run(call: Callable[..., None], names: Sequence[str], *values: Any) -> None:
    """Run what is no kernel of ours, such as a product that writes its result, so that it is noted as a launch."""
    call(*values)
    if NOTING.recorder is not None:
        NOTING.recorder.add(call, names, values)


def repeat(
    replays: dict[tuple, Replay | None],
    values: Sequence[Any],
    compute: Callable[[], Tensor],
    constants: Callable[[], Iterable[Tensor]] = tuple,
) -> Tensor:
    """What `compute` makes of these values on a GPU; once everything is compiled, by repeating the launches of an
    earlier call of the same layout.

    Args:
        replays: those of earlier calls, by layout.
        values: what `compute` depends on, besides constants; the first tensor has the device of all.
        constants: () -> tensors that are the same in all calls with these `replays`.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    if tensors[0].device.type not in REPLAYED or NOTING.recorder is not None:
        return compute()
    layout = tensors[0].device, torch.are_deterministic_algorithms_enabled(), *map(_lay_out, values)
    if layout not in replays:
        recorder = Recorder(tensors, constants())
        with recording_into(recorder):
            out = compute()
        if recorder.is_ready:
            replays[layout] = recorder.finish(out) if recorder.steps else None
        return out
    replay = replays[layout]
    return replay(*tensors) if replay else compute()


def _lay_out(value: Any) -> Any:
    """What launches depend on, of a value: all but the elements of a tensor."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride(), value.data_ptr() % 16
    return tuple(value) if isinstance(value, list) else value


def _do_nothing() -> None:
    pass
