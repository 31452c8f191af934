"""How the embedded data sets are written: the tree of a kind, whole or not at all."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.record import write_json

_MARKER = "generated.json"


@contextlib.contextmanager
def new_tree(root: Path, kind: str, settings: Any) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `root` on success; an earlier tree that was written so is replaced.

    It lies beside `root` and is renamed, so that an interrupted call leaves nothing at `root` that is not whole.

    Args:
        kind: of the data set, which names its key of `runtime.data_roots` and stands in the tree's `generated.json`.
        settings: a dataclass, which stands there too.

    Raises:
        UserError: `root` holds something that was not written so.
    """
    if root.exists() and any(root.iterdir()) and not (root / _MARKER).is_file():
        raise UserError(f"{root}: holds files that are not ours; remove them or set runtime.data_roots.{kind} to another folder")
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}.", suffix=".tmp") as temporary:
        tree = Path(temporary) / "new"
        tree.mkdir()
        yield tree
        write_json(tree / _MARKER, {"kind": kind, **dataclasses.asdict(settings)})
        if root.exists():
            os.rename(root, Path(temporary) / "old")
        try:
            os.rename(tree, root)
        except OSError:
            # another process put its own tree there in between; the manifest's check judges it
            if not (root / _MARKER).is_file():
                raise
