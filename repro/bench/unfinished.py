"""The state of measurements that take several calls."""

import contextlib
import datetime
from typing import Any

from ..core.errors import UserError
from ..core.paths import Paths
from ..core.record import read_json, write_json


def read_clock() -> str:
    """Return the time in UTC as ISO 8601, `2026-11-29T18:17:00.000000+00:00`; these texts sort by time."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


class Unfinished:
    """The state of an interrupted measurement in `.runs/measuring/<name>.json`, until `finish`.

    A call after an interruption finds it and continues; a call after a complete measurement starts anew.

    Attributes:
        began: the start of the measurement, see `read_clock`; earlier rows do not count.
        kept: further state, besides the rows that were written, as JSON values.
    """

    def __init__(self, paths: Paths, name: str):
        self._file = paths.root / ".runs" / "measuring" / f"{name}.json"
        self.began: str = read_clock()
        self.kept: dict[str, Any] = {}
        with contextlib.suppress(UserError, TypeError, KeyError):  # missing, or damaged by a full disk
            found = read_json(self._file)
            self.began, self.kept = str(found["began"]), dict(found["kept"])

    def save(self) -> None:
        """Write `began` and `kept`."""
        write_json(self._file, {"began": self.began, "kept": self.kept})

    def finish(self) -> None:
        """Remove the state, because the measurement is complete."""
        self._file.unlink(missing_ok=True)
