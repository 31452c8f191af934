"""Running the check of a kind, with or without the loader's speed."""

import sys
from collections.abc import Callable
from pathlib import Path

from ...core.errors import RunError, UserError, did_you_mean
from ..findings import PrintAll, count
from ..kinds import KINDS, load_function
from .sample import Depth


def run_check(kind: str, root: Path, depth: Depth, *, speed: bool = False, emit: Callable[[str], None] = print) -> None:
    """Check a data set, and with `speed` time the training loader on it. Nothing is written.

    Args:
        kind: a row of `KINDS`.
        root: the folder that holds the data set.
        depth: how many images are decoded, and by how many processes.
        speed: whether to time the loader, too.
        emit: takes the lines.

    Raises:
        UserError: an unknown kind, no such root, or `speed` of a data set without class folders.
        RunError: errors were found, or a decoding process died.
    """
    if kind not in KINDS:
        raise UserError(f"kind {kind!r}: unknown{did_you_mean(kind, KINDS)}")
    row, report = KINDS[kind], PrintAll(root, emit)
    if speed and "folders" not in row.parts:
        raise UserError(f"--speed: times the loader of classification, not that of {kind}; leave it out")
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "no such folder"
        raise UserError(f"{root}: {problem}; give the folder that holds {row.layout} (docs/data.md)")
    load_function(row.check)(root, report, depth)
    warned = count(report.num_warnings, "warning")
    if speed:
        _emit_speed(kind, root, depth.workers, emit)
    if report.num_errors:
        errors = count(report.num_errors, "error")
        raise RunError(f"data check {kind}: {errors}, {warned} in {root}; the lines above say what to do")
    emit(f"{kind} at {root}: no errors, {warned}")


def _emit_speed(kind: str, root: Path, workers: int, emit: Callable[[str], None]) -> None:
    from .speed import measure_speed

    try:
        for line in measure_speed(root, kind, workers, log=lambda line: print(line, file=sys.stderr, flush=True)).lines():
            emit(line)
    except UserError as error:
        emit(f"speed    not measured: {error}")
