"""`repro status`: fresh, stale, missing and interrupted cells, and the next command."""

from . import Stage, load_stages

STAGE = Stage(purpose="run", records=False)


def command() -> None:
    """Show each stage, and how many of its cells are fresh, stale, missing or interrupted, and the command to run next."""
    from repro.core.paths import describe_missing_results, find_root
    from repro.core.ui import print_table
    from repro.graph import find_status, join_cells

    paths = find_root()
    rows = find_status(paths, load_stages())
    print_table(["stage", "status", "why"], join_cells(rows))
    waiting = [name for name, status, _ in rows if status != "fresh"]
    stopped = [name for name, status, _ in rows if status == "interrupted"]
    command_line = f"dvc repro {stopped[0]}" if stopped else "dvc repro" if waiting else None
    print(f"next: {command_line}" if command_line else "nothing to do; results/tables.md is up to date")
    if missing := describe_missing_results(paths.root):
        print(missing)
