"""Faults in every stage that trains and every kind of file, as many as one likes; see test_campaign.

One process imports everything and forks a child for each run, which saves the seconds that an import takes. A child is
killed at a random moment, or just before one of its changes to the file system.
"""

import contextlib
import functools
import io
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves

import stages
from repro.core.config import active_profile, load_section, load_yaml, section_keys
from repro.core.errors import RunError, UserError
from repro.core.hashing import hash_file
from repro.core.paths import Paths
from repro.models.checkpoints import open_weights
from repro.models.weights import open_file
from repro.training.checkpoint import Checkpointer
from tests.conftest import run_main
from tests.faults.lab import PARAMS, describe_damage, flip, make_base
from tests.stages import helpers

# what a run does to the file system, and what a kill may come before
CHANGES = ("fsync", "replace", "rename", "unlink", "remove", "rmdir", "mkdir")
NANO = PARAMS["pretrain"]["nano"] | {"batch_size": 32, "steps_per_epoch": 3, "snapshot_epochs": [1]}
_WEIGHTS = str(helpers.WEIGHTS)
_SECTIONS = yaml.safe_load(helpers.DENSE) | yaml.safe_load(helpers.GENERATE)
_T5 = {"model": "t5_nano_patch4_32", "options": {"depth": 1}, "batch_size": 32, "steps_per_epoch": 3, "drop_path": 0.0}
_SHORT = {"steps_per_epoch": 2, "batch_size": 2}
CELLS: dict[str, Any] = {
    "pretrain": {
        "nano": NANO | {"options": {"depth": 4}},
        "killed": NANO,
        "teacher": NANO | _T5 | {"model": "t5_softmax_nano_patch4_32"},
    },
    "ablate": {"killed": NANO | {"options": {"depth": 1, "design": "dual"}}},
    "linearize": {"killed": NANO | _T5 | {"init": {"weights": "artifacts/pretrain/teacher/weights.safetensors"}}},
    "detect": {"killed": _SECTIONS["detect"]["nano"] | _SHORT},
    "segment": {"killed": _SECTIONS["segment"]["nano"] | _SHORT},
    "generate": {"killed": _SECTIONS["generate"]["nano"] | {"judge": {"weights": _WEIGHTS, "samples": 10}}},
}
KILLED = {stage: (stage, "--cell", "killed") for stage in CELLS} | {"report": ("report",)}

# a kind of file -> where one is, and what opens it
FILES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "weights": (_WEIGHTS, lambda path: open_weights(path).build().state_dict()),
    "checkpoint": ("published.pth", open_file),
    "release": ("published-*.safetensors", open_file),  # whose name has the hash
    "state": (".runs/pretrain/killed/*/step_*.pt", lambda path: Checkpointer(path.parent).restore()),
}
GOOD = ("equal", "refused", "read")
SEED = int(os.environ.get("FAULT_SEED", 0))


class Campaign:
    """A prepared checkout, and the runs that nothing interrupts.

    Args:
        root: the checkout whose code is tried.
        folder: holds the temporary checkouts.
    """

    def __init__(self, root: Path, folder: Path):
        self.root, self.folder = root, folder
        runtime = PARAMS["runtime"] | {"data_roots": {"digits": "data/digits", "scenes": "data/scenes"}}
        data = PARAMS["prepare_data"] | _SECTIONS["prepare_data"]
        params = PARAMS | CELLS | {"runtime": runtime, "prepare_data": data}
        self.base = make_base(folder, root, params)
        for command in (("prepare-data",), ("pretrain", "--cell", "nano"), ("pretrain", "--cell", "teacher")):
            self.require(self.base, command)
        self.files = self.make_files()

    def make_files(self) -> Path:
        """A checkout with a file of each kind in `FILES`."""
        root = self.copy("files")
        state = load_file(root / _WEIGHTS)
        torch.save({"model": state}, root / "published.pth")
        save_file(state, release := root / "published.safetensors")
        release.rename(root / f"published-{hash_file(release)}.safetensors")
        pid = start(root, KILLED["pretrain"])
        while not list(root.glob(FILES["state"][0])):
            time.sleep(0.001)
        os.killpg(pid, signal.SIGKILL)
        wait(pid)
        return root

    def require(self, root: Path, command: tuple[str, ...], kill_at: int | None = None) -> tuple[int, float]:
        """Run a command to its end, or raise a RunError: how often it changed the file system, and its seconds."""
        began = time.monotonic()
        code = wait(start(root, command, kill_at))
        if code:
            raise RunError(f"{' '.join(command)}: exit code {code}: {' '.join(read_output(root).split())[-300:]}")
        return int((root / "changes").read_text()), time.monotonic() - began

    @functools.cache  # noqa: B019 (there is one campaign)
    def run_whole(self, name: str) -> tuple[Path, int, float]:
        """A checkout in which a command ran uninterrupted, how often that changed the file system, and its seconds."""
        root = self.copy(f"whole_{name}")
        return root, *self.require(root, KILLED[name])

    def copy(self, name: str) -> Path:
        """A new checkout with the prepared data and results."""
        shutil.copytree(self.base, self.folder / name, symlinks=True)
        return self.folder / name

    def try_kill(self, name: str, number: int) -> str:
        """Kill a command, run it again, and say what came of it: `equal`, or what is wrong."""
        whole, changes, seconds = self.run_whole(name)
        moment = random.Random(f"{SEED} {name} {number}").random() * seconds
        while True:
            root = self.copy(f"{name}_{number}")
            if number % 2:  # before one of its changes, each of them in turn
                code = wait(start(root, KILLED[name], kill_at=(number // 2) % changes))
            else:
                pid = start(root, KILLED[name])
                time.sleep(moment)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                code = wait(pid)
            if code == -signal.SIGKILL:
                break
            moment /= 2  # it ended before its moment
            shutil.rmtree(root)
        found = describe_damage(root, whole)
        if not found:
            try:
                self.require(root, KILLED[name])
                found = describe_damage(root, whole, finished=True)
            except RunError as error:
                found = f"the next run failed: {error}"
        if not found:
            shutil.rmtree(root)
        return found or "equal"

    def try_flip(self, kind: str, number: int) -> str:
        """Flip a byte of a file and open it: `refused`, `equal` if the content is the same, or what is wrong."""
        path, opening = min(self.files.glob(FILES[kind][0])), FILES[kind][1]
        chosen = random.Random(f"{SEED} {kind} {number}")
        damaged = self.folder / f"{kind}_{number}" / path.name
        damaged.parent.mkdir()
        shutil.copy(path, damaged)
        flip(damaged, chosen.randrange(damaged.stat().st_size), chosen.randrange(1, 256))
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                found = opening(damaged)
        except UserError as error:
            return "refused" if "\n" not in str(error) else f"an error of several lines: {error}"
        except Exception as error:
            return f"a traceback: {error!r}"
        finally:
            shutil.rmtree(damaged.parent)
        return "equal" if are_equal(found, self.open_whole(kind)) else "opened silently"

    @functools.cache  # noqa: B019
    def open_whole(self, kind: str) -> Any:
        """What is in the undamaged file."""
        return FILES[kind][1](min(self.files.glob(FILES[kind][0])))

    def try_params(self, _: str, number: int) -> str:
        """Read an altered params file: `read`, `refused`, or what is wrong."""
        root = self.folder / f"params_{os.getpid()}"
        root.mkdir(exist_ok=True)
        text = yaml.safe_dump(json.loads((self.base / "params.yaml").read_text()), sort_keys=False)
        (root / "params.yaml").write_bytes(alter(text, random.Random(f"{SEED} params {number}")))
        outcomes = set()
        for command in (functools.partial(read_params, Paths(root)), functools.partial(active_profile, Paths(root))):
            out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("repro.cli.app", command):
                try:
                    code = run_main()
                except Exception as error:
                    return f"a traceback: {error!r:.300}"
            err.seek(0)
            said = err.read()
            if code and not (said.startswith("repro: ") and said.count("\n") == 1 and len(said) <= 310):
                return f"no short line: {said[:300]!r}"
            outcomes.add("refused" if code else "read")
        return min(outcomes, key=("refused", "read").index)

    def try_case(self, case: str) -> str:
        """What comes of a case, one of `GOOD` or what is wrong."""
        group, kind, number = case.split()
        try:
            return getattr(self, f"try_{group}")(kind, int(number))
        except Exception as error:
            return f"the campaign failed: {error!r:.300}"


def start(root: Path, command: tuple[str, ...], kill_at: int | None = None) -> int:
    """Fork a child that runs `repro COMMAND`, and kills itself before its change number `kill_at` from 0. Its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        os.setsid()
        output = os.open(root / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(root)
        sys.argv = ["repro", *command]
        counted = count_changes(kill_at)
        code = run_main()
        (root / "changes").write_text(str(next(counted)))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def count_changes(kill_at: int | None) -> Iterator[int]:
    """Count this process's changes to the file system from now on, and have it die before one of them."""
    counted = iter(range(sys.maxsize))

    def watch(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            if next(counted) == kill_at:
                os.killpg(0, signal.SIGKILL)
            return change(*args, **kwargs)

        return changed

    for name in CHANGES:
        setattr(os, name, watch(getattr(os, name)))
    return counted


def wait(pid: int) -> int:
    """The exit code of a child, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def read_output(root: Path) -> str:
    """What the last command in a checkout wrote."""
    return (root / "output").read_text(errors="replace")


# split at |
ODD = "null|[]|{}|-1|0|1e999|.nan|-.inf|yes|~|''|2001-99-99|!!int q|!!float q|!!timestamp q|&a [*a]|<<: 3|0x_|1:2:3|\x00|%|\t"
ODD = (*ODD.split("|"), "!!python/object/apply:os.system [ls]", "9" * 5000, "[" * 3000, "x" * 10_000)


def alter(text: str, chosen: random.Random) -> bytes:
    """Return altered bytes of a params file: damaged, in another encoding, or with unexpected values."""
    lines, content = text.splitlines(), text.encode()
    at, line = chosen.randrange(len(content)), chosen.randrange(len(lines))
    key, colon, _ = lines[line].partition(":")
    match chosen.randrange(8):
        case 0:  # bytes
            altered = bytearray(content)
            for place in chosen.choices(range(len(content)), k=chosen.choice((1, 1, 1, 3, 30))):
                altered[place] = chosen.randrange(256)
            return bytes(altered)
        case 1:  # cut, or doubled
            end = min(len(content), at + chosen.randrange(1, 400))
            return chosen.choice((content[:at], content[:at] + content[end:], content[:end] + content[at:]))
        case 2:  # encodings
            named = f"# Größe\n{text}"
            return named.encode(chosen.choice(("utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "utf-8-sig")))
        case 3:  # nothing but an odd value
            return chosen.choice(("", "\n", "3", "[1, 2]", "text", "---\n---\n", "null", *ODD)).encode()
        case 4:  # a line elsewhere
            lines.insert(chosen.randrange(len(lines)), lines.pop(line))
        case 5:  # a key with another name
            lines[line] = key + chosen.choice(("x", "", " ", "é")) + colon
        case _:  # a value
            lines[line] = f"{key}: {chosen.choice(ODD)}" if colon else chosen.choice(ODD)
    return "\n".join(lines).encode()


def read_params(paths: Paths) -> None:
    """Load every section of params.yaml as its stage does."""
    found = load_yaml(paths.params)
    for name, stage in stages.load_stages().items():
        if stage.params is not None and (name in found or not isinstance(found, Mapping)):
            for cell in section_keys(paths.params, name) if stage.cells else (None,):
                load_section(stage.params, paths.params, name, *([cell] if cell else []))


def are_equal(a: Any, b: Any) -> bool:
    """Whether two nests of tensors and plain values are the same, bit for bit."""

    def told(x: Any) -> Any:
        return (x.dtype, x.numpy().tobytes()) if isinstance(x, torch.Tensor) else repr(x)

    return list(map(told, tree_leaves(a))) == list(map(told, tree_leaves(b)))


def list_cases(kills: int, flips: int, files: int) -> list[str]:
    """The cases, `group kind number`; kinds take turns."""
    cases = [f"kill {name} {number // len(KILLED)}" for number, name in zip(range(kills), itertools.cycle(KILLED))]
    cases += [f"flip {kind} {number // len(FILES)}" for number, kind in zip(range(flips), itertools.cycle(FILES))]
    return cases + [f"params file {number}" for number in range(files)]
