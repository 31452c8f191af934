"""Predictions of a trained model on the user's own pictures: printed, drawn, and written as JSON."""

import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..core.errors import UserError
from ..core.hashing import short_hash
from ..core.paths import find_root
from ..core.record import atomic, read_json, write_json
from ..core.runtime import choose_device, load_runtime
from ..core.ui import escape_line, print_error, print_table
from ..data.findings import RaiseFirst
from ..data.pictures import EXTENSIONS, is_picture, list_entries, tell_unread
from ..data.pixels import read_pixels
from ..models.checkpoints import open_own
from ..tasks import load_tasks
from ..tasks.spec import Predictor


def predict_pictures(
    given: list[Path], weights: Path, task: str | None, output: Path | None, json: Path | None, min_score: float
) -> None:
    """Print a line per picture (classes on a terminal: a table), and draw what detection and segmentation predict.

    Drawings are <output>/<picture>.png, next to those of earlier calls with the same weights.

    Args:
        given: pictures, and folders of pictures.
        weights: a file of this project, of the task `task` where that is not None.
        output: the folder for drawings; None for predictions/<task>.
        json: a file for the predictions of this call; those of detection and segmentation also go to
            <output>/predictions.json, which keeps other weights out of the folder.
        min_score: smallest score of a drawn detection.

    Raises:
        UserError: weights of another task, two pictures with the same output file, a drawing that would replace a
            picture, or a folder with predictions of other weights, before anything is written; unreadable pictures,
            after the others.
    """
    runtime = load_runtime(find_root())
    device = choose_device(runtime.device)
    checkpoint = open_own(weights)
    own_task = (checkpoint.task or {"name": "classify"})["name"]
    if task not in (None, own_task):
        raise UserError(f"{weights}: holds a model that can {own_task}, not {task}")
    output, tasks = output or Path("predictions", own_task), load_tasks()
    if own_task not in tasks:
        raise UserError(
            f"{weights}: holds a model for the task {own_task!r}, which is none of {', '.join(sorted(tasks))}"
        )
    try:
        predictor = tasks[own_task].open_predictor(checkpoint, device, min_score)
    except ValueError as error:
        raise UserError(f"{weights}: {error}") from None
    files = find_pictures(given, unique_names=predictor.draws)
    about = {"weights": weights.name, "weights_hash": checkpoint.hash, "model": checkpoint.model, "task": own_task}
    if predictor.draws:
        _require_apart(files, output)
    beside = _open_output(output / "predictions.json", about, files) if predictor.draws else {}
    found, rows, unread = {}, [], []
    pictures = _read(files, predictor, unread, runtime.max_pixels)
    while group := list(itertools.islice(pictures, predictor.batch_size)):
        for (path, _), sight in zip(group, predictor.look([picture for _, picture in group]), strict=True):
            found[path.name if predictor.draws else str(path)] = sight.content
            if not predictor.draws and sys.stdout.isatty():
                rows.append([path.name, *sight.line.split(", ")])
            else:
                print(escape_line(f"{path}: {sight.line}"), flush=True)
            if sight.drawing is not None:
                with atomic(output / f"{path.stem}.png") as temporary:
                    sight.drawing.save(temporary, "PNG")
    if rows:
        columns = max(map(len, rows))  # a class name with a comma adds a column
        print_table(["picture", *map(str, range(1, columns))], [row + [""] * (columns - len(row)) for row in rows])
    if found and json:
        write_json(json, about | {"pictures": found})
    if found and predictor.draws:  # after the other file, which may be this one
        write_json(output / "predictions.json", about | beside | {"pictures": beside["pictures"] | found})
    if found and (json or predictor.draws):
        where = f"drawn in {output}" if predictor.draws else f"in {json}"
        print(f"{len(found)} picture{'s' if len(found) > 1 else ''} {where}")
    if len(unread) > 1:
        for error in unread:
            print_error(error)
        raise UserError(f"predict: {len(unread)} of {len(files)} pictures could not be read")
    if unread:
        raise unread[0]


def find_pictures(given: list[Path], *, unique_names: bool = False) -> list[Path]:
    """List the given files, and the pictures directly in the given folders; prints how many other files are not read.

    `unique_names` refuses pictures whose names differ only by folder or suffix: their results would share a file.

    Raises:
        UserError: a folder without pictures, or names that are not unique.
    """
    files = []
    for path in given:
        inside = [path]
        if path.is_dir():
            found = list_entries(path, None)
            # broken links are listed too: reading them reports the error
            names = [os.fsdecode(name) for name, _ in found.images]
            inside = [path / name for name in sorted([*names, *filter(is_picture, found.broken)])]
            tell_unread(path, found.others, RaiseFirst(progress=True))
        if not inside:
            raise UserError(f"{path}: holds no picture ({', '.join(EXTENSIONS)})")
        files += inside
    times = Counter(path.stem for path in files) if unique_names else Counter()
    repeated = next((path for path in files if times[path.stem] > 1), None)
    if repeated is not None:
        raise UserError(
            f"{repeated}: another picture is also named {repeated.stem}, and one result would replace the other; rename one"
        )
    return files


def _require_apart(files: list[Path], output: Path) -> None:
    """Raise a UserError if a drawing in `output` would be one of the pictures, also by a link or another path."""
    pictures = {(found.st_dev, found.st_ino) for found in map(os.stat, filter(os.path.exists, files))}
    for drawing in filter(os.path.exists, (output / f"{path.stem}.png" for path in files)):
        found = drawing.stat()
        if (found.st_dev, found.st_ino) in pictures:
            problem = "is one of the pictures, and a drawing would replace it"
            raise UserError(f"{drawing}: {problem}; name another folder with --output")


def _open_output(file: Path, about: dict[str, str], files: list[Path]) -> dict[str, Any]:
    """Return the earlier content of predictions.json: the `pictures` of earlier calls, and the `places` of all.

    A place is the hash of a picture's path, so that the file does not reveal the path.

    Raises:
        UserError: it is of other weights, or has another picture of the same name.
    """
    earlier = read_json(file) if file.exists() else about
    if earlier.get("weights_hash") != about["weights_hash"]:
        raise UserError(
            f"{file}: holds what other weights saw; name another folder with --output, or remove {file.parent}"
        )
    places = {path.stem: short_hash(os.fsencode(path.resolve())) for path in files}
    known = earlier.get("places", {})
    if taken := next((path for path in files if known.get(path.stem, places[path.stem]) != places[path.stem]), None):
        problem = f"{file.parent} holds another picture named {taken.stem}"
        raise UserError(f"{taken}: {problem}; name another folder with --output, or rename one")
    return {"pictures": earlier.get("pictures", {}), "places": known | places}


def _read(
    files: list[Path], predictor: Predictor, unread: list[UserError], max_pixels: int
) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the prepared picture of each readable file; errors of the others are appended to `unread`."""
    for path in files:
        try:
            pixels = read_pixels(path, max_pixels)
        except UserError as error:
            unread.append(error)
            continue
        yield path, predictor.prepare(torch.from_numpy(pixels).permute(2, 0, 1).contiguous())
