"""The paths of a work tree as one object, which is made from its root and passed to every stage."""

import dataclasses
import os
import re
from pathlib import Path

from .children import ask
from .errors import UserError

# a word of a command line: an optional `--option=`, an optional `kind:`, and a path
_WORD = re.compile(r"((?:-[A-Za-z]|--[\w-]+=)?(?:\w+:)?)(?=[~/.]|.*/\.\./)(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Paths:
    """The folders of a work tree, whose `root` holds params.yaml and dvc.yaml; the project's only source of paths."""

    root: Path

    @property
    def params(self) -> Path:
        return self.root / "params.yaml"

    @property
    def profiles(self) -> Path:
        return self.root / "profiles"

    @property
    def results(self) -> Path:
        return self.root / "results"

    def find(self, given: str) -> Path:
        """Resolve a path of params.yaml: relative to the root, `~` for the user's home."""
        return self.root / os.path.expanduser(given)

    def cell(self, stage: str, cell: str) -> Path:
        """Return `results/<stage>/<cell>`, which only that stage writes."""
        return self.results / stage / cell

    @property
    def speed(self) -> Path:
        """Return `results/speed`: times and checks by device, one CSV for each kind; never a DVC out."""
        return self.results / "speed"

    def replications(self, device: str) -> Path:
        """Return `results/replications/<device>`, with a `<stage>/<cell>.json` for each record; never a DVC out.

        The records are those of other machines and of commands outside the pipeline.
        """
        return self.results / "replications" / device

    def artifacts(self, record: Path) -> Path:
        """Return the folder outside of Git of a record: `artifacts/`, then the record's path in results/ without suffix.

        For `metrics.json` of a cell it is `artifacts/<stage>/<cell>`. `find_record` goes the other way.
        """
        place = record.relative_to(self.results)
        return self.root / "artifacts" / (place.parent if place.name == "metrics.json" else place.with_suffix(""))

    def find_record(self, weights: Path) -> Path | None:
        """Return the record of the training that left this file of weights in its artifacts; None without one."""
        folder = weights.resolve().parent
        if not folder.is_relative_to(root := (self.root / "artifacts").resolve()):
            return None
        place = self.results / folder.relative_to(root)
        return next(
            (file for file in (place / "metrics.json", place.with_name(f"{place.name}.json")) if file.is_file()), None
        )

    def run_state(self, stage: str, cell: str, key: str) -> Path:
        """Return `.runs/<stage>/<cell>/<key>`, the folder of a state to resume from.

        It is no DVC out, because DVC deletes outs before a stage starts. The key is that of `TrainParams.state_key`;
        `graph` finds states by its beginning, `seed_`, and without it would call no stage `interrupted`.
        """
        return self.root / ".runs" / stage / cell / key

    def logs(self, stage: str, cell: str) -> Path:
        """Return `.runs/logs/<stage>/<cell>`, the folder of a run's output, which is kept after the run."""
        return self.root / ".runs" / "logs" / stage / cell


def split_word(word: str) -> tuple[str, str]:
    """Split a word of a command line into a prefix and a path, such as `--data=folder:` and `~/pets`.

    The path must begin with `~`, `/` or `.`, or have `..` within it; any other word is all prefix.
    """
    found = _WORD.fullmatch(word)
    return (found[1], found[2]) if found else (word, "")


def expand_home(word: str) -> str:
    """Replace a `~` at the beginning of the path in a word of a command line by the user's home."""
    before, place = split_word(word)
    return before + os.path.expanduser(place)


def find_root() -> Paths:
    """Find the nearest folder at or above the working directory with params.yaml and dvc.yaml.

    Raises:
        UserError: there is none.
    """
    start = Path.cwd().resolve()
    for folder in (start, *start.parents):
        if (folder / "params.yaml").is_file() and (folder / "dvc.yaml").is_file():
            return Paths(folder)
    raise UserError(f"{start}: no folder with params.yaml and dvc.yaml here or above; run inside a checkout")


def describe_missing_results(root: Path) -> str | None:
    """Describe the committed results that are missing, and how to restore them; None if none is missing.

    DVC removes the results of a stage before it runs it, so a failed or stopped stage leaves them missing.
    """
    said = ask(["git", "ls-files", "--deleted", "results"], root)
    if not said:  # none, or the checkout is no repository
        return None
    missing = said.splitlines()
    stages = ", ".join(sorted({"/".join(Path(name).parts[:3]) for name in missing}))
    back = "git ls-files -d results | xargs git checkout --"
    return f"{len(missing)} committed files are missing in {stages}; run their stages again, or bring them back: {back}"
