"""The committed sets of parameters in profiles/, and which of them params.yaml equals."""

from pathlib import Path
from typing import Any

from .config import load_yaml
from .errors import UserError, did_you_mean
from .paths import Paths


def list_profiles(paths: Paths) -> list[str]:
    """The names of the profiles, in alphabetical order."""
    return sorted(path.stem for path in paths.profiles.glob("*.yaml"))


def find_profile(paths: Paths, name: str) -> Path:
    """The file of a profile; raises a UserError for an unknown name."""
    known = list_profiles(paths)
    if name not in known:
        raise UserError(f"profile {name}: no such profile{did_you_mean(name, known)}")
    return paths.profiles / f"{name}.yaml"


def active_profile(paths: Paths, *, besides: tuple[str, ...] = ()) -> str | None:
    """The profile whose values params.yaml holds `besides` some sections, whatever its order; None where the values were edited."""

    def read_values(file: Path) -> dict[str, Any]:
        return {section: content for section, content in load_yaml(file).items() if section not in besides}

    current = read_values(paths.params)
    return next((name for name in list_profiles(paths) if read_values(find_profile(paths, name)) == current), None)
