"""Training state on disk, written atomically in two generations; a damaged one is skipped.

A file's name carries its step and the hash of its content, so a half-written or altered file is recognised before it is
loaded. Everything is loaded with `weights_only=True`.
"""

import io
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.errors import RunError, UserError
from ..core.hashing import short_hash
from ..core.record import atomic, sweep

# `runs.job`, `runs.cells` and `graph` find states as step_*.pt, and `graph` takes the last name for the newest state
_NAME = re.compile(r"^step_(\d{9})\.([0-9a-f]{16})\.pt$")
GENERATIONS = 2


class Checkpointer:
    """Checkpoints of one run in one folder.

    Args:
        folder: `.runs/<stage>/<cell>/seed_<n>-<hash>`; the hash of the params separates runs with other params.

    `earlier` has the seconds and the CPU seconds that earlier calls had spent when they saved the restored state; both
    are 0 before `restore`, and without a state.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.earlier, self._began = (0.0, 0.0), read_clocks()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write the state after `step` finished steps and drop generations beyond the newest two.

        Raises:
            RunError: the state cannot be written; earlier states are untouched.
        """
        # in memory, since the file's name has the hash of its content
        buffer = io.BytesIO()
        # of all calls so far; `restore` takes it as `earlier`
        spent = [e + now - then for e, now, then in zip(self.earlier, read_clocks(), self._began, strict=True)]
        torch.save(state | {"spent": spent}, buffer)
        content = buffer.getbuffer()
        digest = short_hash(content)
        try:
            with atomic(self.folder / f"step_{step:09d}.{digest}.pt") as temporary:
                temporary.write_bytes(content)
        except OSError as error:  # mostly a full disk
            earlier = self._files()
            kept = f"the state after step {earlier[0][0]} is intact" if earlier else "no earlier state is there"
            problem = f"the state after step {step} cannot be written: {error.strerror}"
            raise RunError(f"{self.folder}: {problem}; {kept}") from None
        for _, old in self._files()[GENERATIONS:]:
            old.unlink()

    def restore(self) -> dict[str, Any] | None:
        """Load the newest undamaged state, and print which; None where there is none to resume from.

        Raises:
            UserError: all states are damaged.
        """
        sweep(self.folder, self.folder / "snapshots")  # temporary files of a call that was killed
        files = self._files()
        for place, (step, path) in enumerate(files):
            content = path.read_bytes()
            if short_hash(content) != _NAME.match(path.name)[2]:
                print(f"{path}: damaged (its hash differs); passing over it")
                continue
            for _, damaged in files[:place]:  # else `save` would count it as one of the two generations
                damaged.unlink()
            print(f"continuing after step {step} from {path.name}")
            saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            self.earlier = tuple(saved.get("spent", self.earlier))  # older states lack it
            return saved
        if files:
            raise UserError(
                f"{self.folder}: no undamaged training state among {len(files)} files; remove the folder to start again"
            )
        return None

    def _files(self) -> list[tuple[int, Path]]:
        """List (step, file), newest first."""
        if not self.folder.is_dir():
            return []
        found = [(int(m[1]), self.folder / name) for name in os.listdir(self.folder) if (m := _NAME.match(name))]
        return sorted(found, reverse=True)


def read_clocks() -> tuple[float, float]:
    """Return a clock's seconds, and the CPU seconds of this process and of its children that have ended.

    Both count from an arbitrary moment: only differences have a meaning.
    """
    return time.monotonic(), sum(os.times()[:4])


def rng_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and PyTorch's generators, in types that `weights_only` loading allows."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": (version, list(internal), gauss),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        # only this process's device: a query of the others would create a context on each
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the generators from `rng_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"][0])
