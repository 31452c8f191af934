"""Measured rows: which of them are still valid, and their table."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.csvfile import write_csv
from ..core.errors import UserError
from ..core.hashing import hash_code
from ..core.record import versions
from ..measure.speed import RowSpec
from ..measure.sweep import GROUP_KEYS, row_key
from ..models.registry import family_module

COLUMNS = tuple(
    "row model attention image_size batch_size dtype mode compile device backend attention_kernel status throughput_img_per_s "
    "latency_ms latency_ms_low latency_ms_high peak_memory_mib num_params macs_g run".split()
)

# the keys of a stored row by which it is found and sorted
ROW_KEYS = ("row", "model", "options", "attention", "image_size", *GROUP_KEYS, "device", "run", "code_hash", "torch_version")


class RowStore:
    """The measured rows of the device of a label.

    Args:
        root: the checkout, whose sources determine whether a row is still valid.
        rows: those of earlier calls, as `add` completes them.
        save: called with the store after every change.
    """

    def __init__(
        self, root: Path, device: str, rows: Iterable[Mapping[str, Any]] = (), save: Callable[["RowStore"], None] = lambda store: None
    ):
        self.rows = [dict(row) for row in rows]
        self._root, self._device, self._save = root, device, save
        self._torch_version = versions()["torch"]
        self._code_hashes: dict[str, str] = {}

    def find_reusable_row(self, spec: RowSpec, run: int) -> dict[str, Any] | None:
        """The row that measured the same in the same run, on this device, with the same code and the same PyTorch; None without one."""
        key = row_key(vars(spec))
        same = (row for row in self.rows if row_key(row) == key and (row["run"], row["device"]) == (run, self._device))
        valid = (row for row in same if (row["code_hash"], row["torch_version"]) == (self._hash_code(spec.model), self._torch_version))
        return next(valid, None)

    def add(self, spec: RowSpec, row: Mapping[str, Any], run: int) -> None:
        """Put a row of `measure` in place of an older one that measured the same in the same run, and save.

        The row gets `row`, its name; `device`, the label; and `run`, `code_hash` and `torch_version`, by which it is found again.
        """
        provenance = {"run": run, "code_hash": self._hash_code(spec.model), "torch_version": self._torch_version}
        new = {"row": spec.row_id, **row, "device": self._device, **provenance}
        self.rows = [*(old for old in self.rows if (row_key(old), old["run"]) != (row_key(new), run)), new]
        self._save(self)

    def _hash_code(self, model: str) -> str:
        """The hash of the sources on which a row of this model depends."""
        module = family_module(model)
        if module not in self._code_hashes:
            # families are found by lying in repro.models, where no import names them; only a model's own family shapes its rows
            own = [module] if module.startswith("repro.") else []
            self._code_hashes[module] = hash_code(self._root, ["repro.measure.speed", *own])
        return self._code_hashes[module]


def require_keys(items: Iterable[Any], keys: Iterable[str], where: str) -> None:
    """Refuse items that another version wrote: raise a UserError that names the first key that an item lacks."""
    for number, item in enumerate(items):
        for key in keys:
            if not isinstance(item, Mapping) or key not in item:
                raise UserError(f"{where}[{number}].{key}: missing; another version wrote this file, move it away")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str] = COLUMNS) -> None:
    """Write rows as CSV, one line each; `image_size` is the height there."""

    def flatten(row: Mapping[str, Any]) -> dict[str, Any]:
        low, high = row["latency_ms_ci95"] or (None, None)
        return {**row, "image_size": row["image_size"][0], "latency_ms_low": low, "latency_ms_high": high}

    write_csv(path, map(flatten, rows), columns)
