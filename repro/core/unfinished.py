"""Measurements that take several calls: their start and their rows so far."""

import contextlib
import datetime
from typing import Any

from .errors import UserError
from .paths import Paths
from .record import read_json, write_json


def read_clock() -> str:
    """The time in UTC as ISO 8601: `2026-11-29T18:17:00.000000+00:00`. Texts of it sort as their times do."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


class Unfinished:
    """The state of an interrupted measurement in `.runs/measuring/<name>.json`, until `finish`.

    So a call after an interruption goes on, and one after a complete measurement measures anew.

    Attributes:
        began: when the measurement began, see `read_clock`; earlier rows do not count.
        kept: its state besides the rows that it wrote, as JSON.
    """

    def __init__(self, paths: Paths, name: str):
        self._file = paths.root / ".runs" / "measuring" / f"{name}.json"
        self.began: str = read_clock()
        self.kept: dict[str, Any] = {}
        with contextlib.suppress(UserError, TypeError, KeyError):  # missing, or damaged by a full disk
            found = read_json(self._file)
            self.began, self.kept = str(found["began"]), dict(found["kept"])

    def save(self) -> None:
        """Write what there is."""
        write_json(self._file, {"began": self.began, "kept": self.kept})

    def finish(self) -> None:
        """Forget it: the measurement is complete."""
        self._file.unlink(missing_ok=True)
