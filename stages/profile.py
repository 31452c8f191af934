"""`repro profile show|use`: the committed sets of parameters."""

import difflib
from pathlib import Path
from typing import Annotated

import typer

from repro.core.config import load_yaml
from repro.core.errors import UserError
from repro.core.paths import Paths, find_root
from repro.core.record import write_text

from . import Stage

app = typer.Typer(
    help="Show or choose a profile: `mini` runs on a laptop CPU in minutes, `paper` is ImageNet-1K scale.", no_args_is_help=True
)


def names(paths: Paths) -> list[str]:
    """The profiles that exist."""
    return sorted(path.stem for path in paths.profiles.glob("*.yaml"))


def active(paths: Paths, *, besides: tuple[str, ...] = ()) -> str | None:
    """The profile whose values params.yaml holds, comments, order and the sections `besides` apart; None for edited parameters."""

    def values(file: Path) -> dict:
        return {section: content for section, content in load_yaml(file).items() if section not in besides}

    current = values(paths.params)
    return next((name for name in names(paths) if values(_file(paths, name)) == current), None)


STAGE = Stage(purpose="check")


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(help="A profile; without it, which one is active and which there are.")] = None,
) -> None:
    """Print a profile, or say which one params.yaml equals."""
    paths = find_root()
    if name is not None:
        print(_file(paths, name).read_text(encoding="utf-8"), end="")
        return
    current = active(paths)
    print(f"active: {current}" if current else "active: none, params.yaml is edited")
    print(f"profiles: {', '.join(names(paths))}")


@app.command()
def use(
    name: Annotated[str, typer.Argument(help="The profile to write to params.yaml.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite a params.yaml that equals no profile.")] = False,
) -> None:
    """Write a profile to params.yaml."""
    paths = find_root()
    source = _file(paths, name)
    if not force and paths.params.is_file() and active(paths) is None:
        raise UserError(f"{paths.params}: holds parameters of no profile and would be lost; keep a copy, then use --force")
    write_text(paths.params, source.read_text(encoding="utf-8"))
    print(f"params.yaml is now the {name} profile; `repro status` shows what it makes stale")


def _file(paths: Paths, name: str) -> Path:
    known = names(paths)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        raise UserError(f"profile {name!r}: not known; " + (f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"))
    return paths.profiles / f"{name}.yaml"
