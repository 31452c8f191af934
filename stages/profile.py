"""`repro profile show|use`: the committed sets of parameters."""

from typing import Annotated

import typer

from repro.core.config import active_profile, find_profile, list_profiles, load_yaml
from repro.core.errors import UserError
from repro.core.paths import find_root
from repro.core.record import write_text

from . import Stage

app = typer.Typer(
    help="Show or choose a profile: `mini` runs on a CPU in minutes, `digits` in hours, `cifar10` in days, `night` on one "
    "GPU in a night; `paper` has the scale of ImageNet-1K.",
    no_args_is_help=True,
)

STAGE = Stage(purpose="check", records=False)


@app.command()
def show(
    name: Annotated[
        str | None, typer.Argument(help="The profile to print; without it, list them and name the active one.")
    ] = None,
) -> None:
    """Print a profile, or say which one params.yaml equals."""
    paths = find_root()
    if name is not None:
        load_yaml(file := find_profile(paths, name))  # an error, where it is not valid
        print(file.read_text(encoding="utf-8"), end="")
        return
    current = active_profile(paths)
    print(f"active: {current}" if current else "active: none; params.yaml was edited")
    print(f"profiles: {', '.join(list_profiles(paths))}")


@app.command()
def use(
    name: Annotated[str, typer.Argument(help="The profile to write to params.yaml.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite a params.yaml that equals no profile.")] = False,
) -> None:
    """Write a profile to params.yaml."""
    paths = find_root()
    load_yaml(source := find_profile(paths, name))  # an error, where it is not valid
    if not force and paths.params.is_file() and active_profile(paths) is None:
        raise UserError(
            f"{paths.params}: has edits that are in no profile and would be lost; keep a copy, then use --force"
        )
    write_text(paths.params, source.read_text(encoding="utf-8"))
    print(f"params.yaml is now the {name} profile; `repro status` shows what it makes stale")
