"""`repro status`: what is fresh, stale, missing or interrupted, and the next command."""

from . import Stage, load_stages

STAGE = Stage(purpose="check")


def command() -> None:
    """Show each stage and cell: fresh, stale, missing or interrupted, and the command to run next."""
    from repro.core.paths import find_root
    from repro.core.ui import print_table
    from repro.graph import find_status

    rows = find_status(find_root(), load_stages())
    print_table(["stage", "status", "why"], rows)
    waiting = [name for name, status, _ in rows if status != "fresh"]
    stopped = [name for name, status, _ in rows if status == "interrupted"]
    command_line = f"dvc repro {stopped[0]}" if stopped else "dvc repro" if waiting else None
    print(f"next: {command_line}" if command_line else "nothing to do; results/tables.md is up to date")
