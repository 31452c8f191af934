"""`repro status`: what is fresh, stale, missing or interrupted, the next command, and which records older code made."""

from collections.abc import Iterable
from typing import Annotated

import typer

from . import Stage, load_stages

STAGE = Stage(purpose="run", records=False)


def command(
    stale: Annotated[
        bool,
        typer.Option("--stale", help="List the records that older code made, each with the command that renews it."),
    ] = False,
) -> None:
    """Show each stage and cell: fresh, stale, missing or interrupted, the command to run next, and the records that
    older code made.

    A record is stale when the files that its numbers depend on have changed, unless the present code has made it again
    on another machine, or begins its training alike.
    """
    from repro.core.paths import describe_missing_results, find_root
    from repro.core.ui import print_table
    from repro.graph import find_old_records, find_status, list_stale_records

    paths = find_root()
    if stale:
        listed = sorted((record.path, record.command or "none is named") for record in list_stale_records(paths))
        if listed:
            print_table(["record", "command"], listed)
        else:
            print("no record is stale")
        return
    rows = find_status(paths, load_stages())
    print_table(["stage", "status", "why"], rows)
    waiting = [name for name, status, _ in rows if status != "fresh"]
    stopped = [name for name, status, _ in rows if status == "interrupted"]
    command_line = f"dvc repro {stopped[0]}" if stopped else "dvc repro" if waiting else None
    print(f"next: {command_line}" if command_line else "nothing to do; results/tables.md is up to date")
    if missing := describe_missing_results(paths.root):
        print(missing)
    for why, records in find_old_records(paths).items():
        print(f"\n{len(records)} record{'s' if len(records) > 1 else ''} {why}:")
        print("\n".join(group_records(record.path for record in records)))


def group_records(records: Iterable[str]) -> list[str]:
    """A line for each folder of cells: `results/pretrain: a, b`; of a record that is not its cell's only one, the
    file's name goes along.
    """
    groups: dict[str, list[str]] = {}
    for record in records:
        *folders, cell, file = record.removesuffix(".json").split("/")
        name = cell if file == "metrics" else f"{cell}/{file}"
        groups.setdefault("/".join(folders), []).append(name)
    return [f"{folder}: {', '.join(names)}" for folder, names in groups.items()]
