"""Results on disk: atomic writes, records with their identity, and their `run.json`.

A record holds everything that explains a number, and nothing that changes from run to run. Date, seconds and host go to
`run.json`, on which no stage depends. A cell of the pipeline has `metrics.json` with its scores alone, which are all
that `dvc metrics` prints then, and `record.json` with the rest; `read_record` joins them. Any other record
is one file. A run with the same result as the record does not rewrite it, so Git shows no change.
"""

import base64
import contextlib
import datetime
import json
import math
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .children import ask
from .config import params_hash
from .errors import RunError, UserError
from .hashing import hash_file, require_own_code
from .paths import split_word
from .runtime import describe_place

DETAILS_FILE = "record.json"  # next to metrics.json, see above
CURVE_SCORES = 2  # a record has the curves of so many scores of its task, the first ones, for the pages
# packages whose versions a record names, since they affect numbers
_VERSIONS_OF = ("torch", "torchvision", "triton", "timm", "numpy", "numba", "llvmlite")


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it is flushed and renamed to `path`, on failure removed.

    The file is there, empty, and its name ends with `.tmp`. A writer that takes the format from the name must be told
    it; one that appends an ending, as `np.savez` does, needs an open file, or the empty file becomes `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # a file name has at most 255 bytes, and a character up to four; `sweep` finds leftovers by this form of the name
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:60]}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as stream:
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # the error of a full disk names no file, or both files of a copy
        if isinstance(error, OSError) and (error.filename is None or error.filename2 is not None):
            error.filename = str(path)
        raise


def sweep(*folders: Path) -> None:
    """Remove the temporary files of `atomic` that a killed process left; no other process may write to the folders."""
    for folder in folders:
        for left in folder.glob(f".*.{'?' * 8}.tmp"):
            left.unlink(missing_ok=True)


def require_writable(folder: Path) -> None:
    """Raise a RunError if no file can be written into a folder, which need not exist yet; leave no trace."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise RunError(f"{existing}: cannot be written: {error.strerror}; the results would go to {folder}") from None


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write sorted, indented JSON atomically; raise a ValueError for NaN and infinity.

    A missing number is `null` with a reason.
    """
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def format_record(value: Any, line: str = "\n") -> str:
    """Format a JSON value with sorted keys, compactly but so that a diff by lines stays readable.

    A mapping or list without nested ones takes one line, such as the scores of a seed. In a list of texts, such as the
    lines of a curve, each text has its own line.

    Args:
        value: a value as `json.loads` returns it.
        line: the line break and the indentation at the depth of `value`.
    """
    is_list, inner = isinstance(value, list), f"{line} "
    held = value if is_list else value.values() if isinstance(value, dict) else ()
    if not any(isinstance(item, dict | list) or (is_list and isinstance(item, str)) for item in held):
        return json.dumps(value, sort_keys=True)
    if is_list:
        return "[" + inner + f",{inner}".join(format_record(item, inner) for item in value) + line + "]"
    items = (f"{json.dumps(key)}: {format_record(value[key], inner)}" for key in sorted(value))
    return "{" + inner + f",{inner}".join(items) + line + "}"


def read_json(path: Path) -> Any:
    """Read JSON; raise a `UserError` that names a missing or damaged file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None


def replace_block(path: Path, name: str, text: str) -> None:
    """Replace the text between the lines `<!-- name -->` and `<!-- /name -->` of a Markdown file.

    Raises:
        UserError: the file has no such lines.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, opened, rest = path.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise UserError(f"{path}: has no lines {begin.strip()} and {end}; put them where the table belongs")
    write_text(path, f"{before}{begin}{text}\n{end}{after}")


def write_record(
    file: Path,
    metrics: dict,
    identity: dict,
    seconds: float,
    *,
    scores: Collection[str] = (),
    curve: Sequence[str] | None = None,
) -> None:
    """Write the record `file`, {metrics, identity}, and its `run.json` (date, seconds, host).

    An existing record with the same metrics, parameters, data and device is not rewritten, so its commit remains that
    of the last change. The rest of the identity, such as recipe and versions, is not compared: a caller that must renew
    it removes the file first, as `runs.seeds.collect` does. Metrics have their unit in the key. A None must have a
    sibling key `<name>_reason` or `reason`.

    Args:
        file: `metrics.json` in a cell's folder, or `<cell>.json` among the records of a device.
        metrics: the results.
        identity: see `make_identity`.
        seconds: the time of the run.
        scores: keys of the scores to compare. If given, `file` has these alone, and `record.json` next to it the rest.
            A cell must always have them or never: without them an old `record.json` stays, and `read_record` joins it.
        curve: the lines of a CSV table with a row per epoch and seed. A record that is not rewritten keeps its own.
    """
    _require_reasons(metrics, str(file))
    folder = file.parent
    if file.name == "metrics.json":  # no other process writes into a cell's folder
        sweep(folder)
    write_run(file, seconds)
    record = {"metrics": metrics, "identity": identity} | ({} if curve is None else {"curve": list(curve)})
    if _says(file, record, scores):
        return
    if scores:
        rest = {key: value for key, value in metrics.items() if key not in scores}
        file.unlink(missing_ok=True)  # an interruption between the two writes must not leave halves of two runs
        _write_details(folder / DETAILS_FILE, record | {"metrics": rest})
        write_json(file, {key: value for key, value in metrics.items() if key in scores})
    else:
        _write_details(file, record)


def _write_details(file: Path, record: Mapping[str, Any]) -> None:
    """Write a record in the form of `format_record`; raise a ValueError for NaN and infinity."""
    # through JSON, which turns tuples into lists and keys into texts, as `format_record` expects them
    write_text(file, format_record(json.loads(json.dumps(record, allow_nan=False))) + "\n")


def find_run(file: Path) -> Path:
    """Return the path of the `run.json` of a record or of a stage's rows.csv."""
    return file.with_name("run.json" if file.name in ("metrics.json", "rows.csv") else f"{file.stem}.run.json")


def write_run(file: Path, seconds: float) -> None:
    """Write the `run.json` of a record or of a stage's rows.csv: date, host and seconds."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_json(find_run(file), {"finished": now, "seconds": round(seconds, 1), "host": platform.node()})


def _says(file: Path, record: Mapping[str, Any], scores: Collection[str]) -> bool:
    """Tell whether the file already holds an equal record in the same form, with equal parameters, data and device.

    The form is one file, or two where there are `scores`, and with a curve or without one.
    """
    if not file.is_file() or (file.name == "metrics.json" and file.with_name(DETAILS_FILE).is_file() != bool(scores)):
        return False
    try:
        found = read_record(file)
    except UserError:
        return False
    if not isinstance(found, Mapping) or not isinstance(found.get("identity"), Mapping):
        return False
    same = ("params_hash", "data_manifest_hash", "golden_hash", "dtype", "backend")
    was, now = found["identity"], record["identity"]
    return (
        json.loads(json.dumps(record["metrics"])) == found.get("metrics")
        and ("curve" in found) == ("curve" in record)
        and all(was.get(name) == now.get(name) for name in same)
        and name_machine(was) == name_machine(now)
    )


def name_machine(identity: Mapping[str, Any]) -> str:
    """Return the device that a record names, without its number of threads."""
    return str(identity.get("device", "–")).partition(", ")[0]


def read_record(path: Path) -> Any:
    """Read a record from one file, or from `metrics.json` and `record.json` together.

    Raises:
        UserError: a file is missing or damaged.
    """
    content, details = read_json(path), path.with_name(DETAILS_FILE)
    if path.name != "metrics.json" or not details.is_file():
        return content
    rest = read_json(details)
    for file, half in ((path, content), (details, rest.get("metrics") if isinstance(rest, Mapping) else None)):
        if not isinstance(half, Mapping):
            raise UserError(f"{file}: not what a run wrote; remove the file and run its stage again")
    return {**rest, "metrics": {**rest["metrics"], **content}}


def make_identity(
    root: Path, config: Any, *, data_manifest: Path | None = None, device: str, dtype: str, backend: str
) -> dict:
    """Return the provenance of a number.

    Args:
        root: the root of the work tree.
        config: the stage's params dataclass.
        data_manifest: the manifest of the data set, if the number depends on one.
        device: see `runtime.device_label`.
        dtype: the precision of the computation, e.g. `bf16`.
        backend: the implementation of the kernels that ran.

    Returns:
        {command, parent_commit, params_hash, data_manifest_hash, device, machine, dtype, backend, versions}; for
        `machine` see `runtime.describe_place`. Unknown values are None; that of `command` comes with `command_reason`.

    Raises:
        UserError: the running code is not that of the work tree, see `require_own_code`.
    """
    require_own_code(root)
    command = find_command(root, sys.argv)
    return {
        "command": command,
        **({} if command else {"command_reason": "made by a program of its own"}),
        "parent_commit": current_commit(root),
        "params_hash": params_hash(config),
        "data_manifest_hash": hash_file(data_manifest) if data_manifest else None,
        "device": device,
        "machine": describe_place(device),
        "dtype": dtype,
        "backend": backend,
        "versions": versions(),
    }


def current_commit(root: Path) -> str | None:
    """Return the hash of the work tree's commit; None outside of Git."""
    commit = ask(["git", "rev-parse", "HEAD"], root)
    return commit and commit.strip()


def label_commit(root: Path) -> str:
    """Return the 12 digits that a row of a CSV file has for the work tree's commit; "not in Git" outside of Git."""
    return (current_commit(root) or "not in Git")[:12]


def serialise_recipe(identity: Mapping[str, Any]) -> str | None:
    """Return the recipe in a record's identity as JSON, without device and backend; None for a record without one.

    The report joins the records of a cell by several machines only if these texts are equal, so facts of a recipe that
    belong to the machine must be left out here.
    """
    if (recipe := identity.get("recipe")) is None:
        return None
    precision = recipe.get("precision")
    dtype = precision["dtype"] if isinstance(precision, Mapping) else precision
    rest = {name: value for name, value in recipe.items() if name not in ("device", "backend")}
    return json.dumps(rest | {"precision": dtype}, sort_keys=True)


def find_difference(identity: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return in words the first hash of `now` that differs in a record, e.g. `data manifest`; None if all agree.

    `now` has those keys of an identity that must agree, such as `params_hash` and `data_manifest_hash`.
    """
    other = next((name for name, value in now.items() if identity.get(name) != value), None)
    return other and other.removesuffix("_hash").replace("_", " ")


def find_command(root: Path, argv: Sequence[str]) -> str | None:
    """Return the command of a process with these arguments, e.g. `repro pretrain --cell nano`; None for other programs.

    An absolute path, also behind an option or a kind of data, becomes relative to `root`. A path outside of it becomes
    `.../` and its last part, so that records show no private folders.
    """
    program = Path(argv[0])
    if program.stem != "repro" and program.parts[-2:] != ("repro", "__main__.py"):  # the script, or `python -m repro`
        return None
    return shlex.join(["repro", *(_hide_folders(word, root) for word in argv[1:])])


def _hide_folders(word: str, root: Path) -> str:
    """Shorten the path in a word of a command line as `find_command` does; a relative path below the root stays."""
    before, place = split_word(word)
    if not place or (place.startswith(".") and ".." not in Path(place).parts):
        return word
    path = Path(os.path.abspath(os.path.expanduser(place)))
    return f"{before}{path.relative_to(root) if path.is_relative_to(root) else f'.../{path.name}'}"


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that affect numbers, without importing them."""
    return {"python": platform.python_version(), **{name: installed_version(name) for name in _VERSIONS_OF}}


def installed_version(name: str) -> str | None:
    """Return the version of the first distribution of this name on the module path; None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _require_reasons(value: Any, where: str) -> None:
    """Raise ValueError for a None without a reason, see `write_record`, and for NaN and infinity, at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            if item is None and not value.get(f"{key}_reason") and not value.get("reason"):
                raise ValueError(f"{where}: metric {key!r} is null without a reason")
            _require_reasons(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _require_reasons(item, f"{where}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: {value} is not a finite number; write null with a reason")


def pack_hits(hits: Sequence[bool]) -> str:
    """Pack one bit per image into base64, the first in the highest bit of the first byte, padded with zeros."""
    import numpy as np

    return base64.b64encode(np.packbits(np.array(hits, dtype=bool)).tobytes()).decode()


def unpack_hits(packed: str, images: int) -> list[bool]:
    """The inverse of `pack_hits`.

    Raises:
        ValueError: not base64, or not as many bytes as so many images need.
    """
    import numpy as np

    packed_bits = np.frombuffer(base64.b64decode(packed), dtype=np.uint8)
    if len(packed_bits) != -(-images // 8):
        raise ValueError(f"{len(packed_bits)} bytes, which are not the hits of {images} images")
    return np.unpackbits(packed_bits, count=images).astype(bool).tolist()
