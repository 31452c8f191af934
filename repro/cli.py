"""The command line: collects the verbs that the stage modules declare and turns errors into one line and an exit code."""

import importlib
import os
import sys

import typer

from .core.errors import Interrupted, RunError, UserError

# verb -> stage module; each declares `command`, whose signature and docstring are its options and help
VERBS = {
    "prepare-data": "prepare_data",
    "environment": "environment",
    "complexity": "complexity",
    "pretrain": "pretrain",
    "baselines": "baselines",
    "detect": "detect",
    "segment": "segment",
    "ablate": "ablate",
    "visualize": "visualize",
    "efficiency": "efficiency",
    "report": "report",
    "evaluate": "evaluate",
    "status": "status",
    "doctor": "doctor",
    "plan": "plan",
    "predict": "predict",
    "explain": "explain",
    "export": "export",
}
GROUPS = {"profile": "profile", "kernels": "kernels", "data": "data", "selftest": "selftest"}

app = typer.Typer(
    name="repro",
    help="Vision-TTT, reproduced: every table and figure is a stage, every number stands beside the paper's.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error.")) -> None:
    """Options in front of the verb."""
    if debug:
        os.environ["REPRO_DEBUG"] = "1"


for _verb, _module in VERBS.items():
    app.command(_verb)(importlib.import_module(f"stages.{_module}").command)
for _verb, _module in GROUPS.items():
    app.add_typer(importlib.import_module(f"stages.{_module}").app, name=_verb)


def main() -> None:
    """Entry point of the console script. Exit codes: 0, 1 failure, 2 the user's mistake, 130 and 143 for signals."""
    try:
        app()
    except (UserError, RunError, Interrupted) as error:
        if os.environ.get("REPRO_DEBUG"):
            raise
        print(f"repro: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:  # a full disk, a read-only folder: the file and the system's word for it say all
        if os.environ.get("REPRO_DEBUG") or error.filename is None:
            raise
        print(f"repro: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(RunError.exit_code)
