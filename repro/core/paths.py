"""The paths of a checkout, as one object that is made from its root and given to every stage."""

import dataclasses
import os
import re
from pathlib import Path

from .children import ask
from .errors import UserError

# a word of a command line: an option and a kind in front of a place, each where it is there
_WORD = re.compile(r"((?:-[A-Za-z]|--[\w-]+=)?(?:\w+:)?)(?=[~/.])(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Paths:
    """The folders of one checkout, whose `root` holds params.yaml and dvc.yaml; every path in the project comes from
    here.
    """

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
        """`results/<stage>/<cell>`: written by that stage alone."""
        return self.results / stage / cell

    @property
    def speed(self) -> Path:
        """`results/speed`: times and checks of a device, one CSV for each kind; never a DVC out."""
        return self.results / "speed"

    def replications(self, device: str) -> Path:
        """`results/replications/<device>`: records of other machines and of commands outside the pipeline, never a DVC
        out; `<stage>/<cell>.json` each.
        """
        return self.results / "replications" / device

    def artifacts(self, record: Path) -> Path:
        """`artifacts/<stage>/<cell>`: the files outside of Git of a training with this record in results/."""
        place = record.relative_to(self.results)
        return self.root / "artifacts" / (place.parent if place.name == "metrics.json" else place.with_suffix(""))

    def find_record(self, weights: Path) -> Path | None:
        """The record of a training that left this file of weights in its artifacts; None where there is none."""
        folder = weights.resolve().parent
        if not folder.is_relative_to(root := (self.root / "artifacts").resolve()):
            return None
        place = self.results / folder.relative_to(root)
        return next(
            (file for file in (place / "metrics.json", place.with_name(f"{place.name}.json")) if file.is_file()), None
        )

    def run_state(self, stage: str, cell: str, key: str) -> Path:
        """`.runs/<stage>/<cell>/<key>`: resume state, outside DVC's outs because DVC deletes outs before a stage
        starts.
        """
        return self.root / ".runs" / stage / cell / key

    def logs(self, stage: str, cell: str) -> Path:
        """`.runs/logs/<stage>/<cell>`: the output of a run, kept when the run is done."""
        return self.root / ".runs" / "logs" / stage / cell


def split_word(word: str) -> tuple[str, str]:
    """Split a word of a command line into a prefix and a path: `--data=folder:` and `~/pets`.

    A word without a path, or whose path begins like a name, is all prefix.
    """
    found = _WORD.fullmatch(word)
    return (found[1], found[2]) if found else (word, "")


def expand_home(word: str) -> str:
    """The same word of a command line with the user's home for a `~` that begins its place."""
    before, place = split_word(word)
    return before + os.path.expanduser(place)


def find_root(start: Path | None = None) -> Paths:
    """The nearest folder at or above `start` (default: the working directory) with params.yaml and dvc.yaml, or a
    UserError.
    """
    start = (start or Path(os.getcwd())).resolve()
    for folder in (start, *start.parents):
        if (folder / "params.yaml").is_file() and (folder / "dvc.yaml").is_file():
            return Paths(folder)
    raise UserError(f"{start}: no folder with params.yaml and dvc.yaml here or above; run inside a checkout")


def describe_missing_results(root: Path) -> str | None:
    """The line that says how committed results come back: DVC removes those of a stage before it runs it. None if none
    is missing.
    """
    said = ask(["git", "ls-files", "--deleted", "results"], root)
    if not said:  # none, or the checkout is no repository
        return None
    missing = said.splitlines()
    stages = ", ".join(sorted({"/".join(Path(name).parts[:3]) for name in missing}))
    back = "git ls-files -d results | xargs git checkout --"
    return f"{len(missing)} committed files are missing in {stages}; run their stages again, or bring them back: {back}"
