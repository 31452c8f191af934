"""Errors that end a command with one line and a documented exit code."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator

_MOST_LISTED = 200  # characters; a line of more than 300 loses its middle
INSTALL = "python -m pip install --no-deps -r requirements.lock"  # the fix where a package is missing or too old


class UserError(Exception):
    """The user's mistake: bad parameters, missing data, a wrong file. One line, exit code 2."""

    exit_code = 2


class RunError(Exception):
    """A run that could not finish for a reason that is not the user's input. One line, exit code 1."""

    exit_code = 1


class Diverged(RunError):
    """A training with too many non-finite steps, or with a non-finite result; `step` is the last step."""

    def __init__(self, step: int, message: str):
        super().__init__(step, message)  # all arguments: by them a worker process sends the error to its parent
        self.step = step

    def __str__(self) -> str:
        return self.args[1]


class Interrupted(Exception):
    """A signal ended the run after its state was saved; `where` describes the state. Exit code 128 + signal number."""

    def __init__(self, signum: int, where: str):
        super().__init__(signum, where)  # as in `Diverged`
        self.exit_code = 128 + signum

    def __str__(self) -> str:
        return f"stopped by signal {self.args[0]}; {self.args[1]}; the same command continues"


@contextlib.contextmanager
def blame(where: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn an error of one of these kinds within the context into a `UserError` that begins with `where`."""
    try:
        yield
    except kinds as error:
        raise UserError(f"{where}: {error}") from None


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return the end of an error line about an unknown name.

    This is `; did you mean 'vim'?`, or `; known: ...` if no name is close and all names fit on a line, or empty.
    """
    names = [str(each) for each in known]
    close = difflib.get_close_matches(str(name), names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    listed = ", ".join(names)
    return f"; known: {listed}" if 0 < len(listed) <= _MOST_LISTED else ""
