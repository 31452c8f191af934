"""The command line: it loads the verb that is called, and turns errors into one line and an exit code."""

import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

import stages

from .core.children import PARENT, follow_parent
from .core.errors import Interrupted, RunError, UserError, did_you_mean
from .core.hashing import require_own_code
from .core.paths import describe_missing_results, expand_home, find_root
from .core.ui import allow_every_terminal, print_error

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # Typer exports no name for it


class Verbs(TyperGroup):
    """The group of all verbs; the module of a verb is imported when the verb is called or listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all verbs, in the order of use."""
        return [stages.verb_of(name) for names in stages.list_verbs(stages.load_stages()).values() for name in names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb's command, or its group of commands; raise a UserError for an unknown verb."""
        name = cmd_name.replace("-", "_")
        if name not in (known := stages.stage_names()):
            hint = did_you_mean(cmd_name, map(stages.verb_of, known)) or "; repro --help lists them"
            raise UserError(f"{cmd_name}: no such verb{hint}")
        module = stages.load_module(name)
        if hasattr(module, "app"):
            command = typer.main.get_group(module.app)
        else:
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            alone.command()(module.command)
            command = typer.main.get_command(alone)
        command.name, command.rich_help_panel = cmd_name, stages.PURPOSES[module.STAGE.purpose]
        command.hidden = module.STAGE.hidden
        # `commands` are those of a verb with verbs of its own
        for each in getattr(command, "commands", {cmd_name: command}).values() if module.STAGE.records else ():
            each.callback = _require_own_code_first(each.callback)
        return command


def _require_own_code_first(callback: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that it first checks that the running code is that of the work tree.

    `make_identity` checks this too, but only after the work is done.
    """

    @functools.wraps(callback)
    def call(*args: Any, **kwargs: Any) -> None:
        require_own_code(find_root().root)
        callback(*args, **kwargs)

    return call


app = typer.Typer(
    name="repro",
    cls=Verbs,
    help="Test-time training in vision, reproduced: one pipeline measures what four papers report.\n\n"
    "First `repro doctor` says what this machine lacks, `repro plan` what would run and for how long, and `repro run` runs it. "
    "Then open results/tables.md.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error.")) -> None:
    """Options in front of the verb."""
    if debug:
        os.environ["REPRO_DEBUG"] = "1"


def main() -> None:
    """Run the command line. Exit codes: 0 success, 1 failure, 2 the user's mistake, 130 and 143 for signals.

    A `~` in an argument becomes the home folder, also after `=` and `KIND:`, where shells do not expand it.
    """
    follow_parent()  # ends this process when the `repro` that started it is gone
    sys.argv[1:] = map(expand_home, sys.argv[1:])
    try:
        allow_every_terminal()
        try:
            code = app(standalone_mode=False)
        finally:
            sys.stdout.flush()  # here, so that an error of writing is caught below
        sys.exit(code)
    except UsageError as error:
        if message := error.format_message():  # a group without a verb has printed its help
            command = error.ctx.command_path
            where = command.removeprefix(error.ctx.find_root().command_path).lstrip()
            message = message.replace("Value error, ", "").rstrip(".")  # which pydantic puts before a type's own words
            print_error(f"{where and f'{where}: '}{message}; see {command} --help")
        sys.exit(error.exit_code)
    except (UserError, RunError, Interrupted) as error:
        if os.environ.get("REPRO_DEBUG"):
            raise
        print_error(error)
        by_plain_dvc = "DVC_STAGE" in os.environ and PARENT not in os.environ  # `repro run` prints this at its own end
        if by_plain_dvc and (missing := describe_missing_results(find_root().root)):
            print(missing, file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:  # e.g. a full disk or a read-only folder
        if os.environ.get("REPRO_DEBUG") or error.filename is None:
            raise
        if error.errno != errno.EPIPE:  # the reader of a pipe, such as `head`, has closed it
            print_error(f"{error.filename}: {error.strerror}")
        sys.exit(RunError.exit_code)
