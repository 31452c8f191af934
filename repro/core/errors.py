"""Errors that end a command with one line and a documented exit code."""


class UserError(Exception):
    """The user's mistake: bad parameters, missing data, a wrong file. One line, exit code 2."""

    exit_code = 2


class RunError(Exception):
    """A run that could not finish for a reason that is not the user's input. One line, exit code 1."""

    exit_code = 1


class Interrupted(Exception):
    """A signal ended the run after its state was saved. Exit code 128 + signal number.

    Args:
        signum: the signal's number (2 for SIGINT, 15 for SIGTERM).
        where: what was saved, for the message.
    """

    def __init__(self, signum: int, where: str):
        super().__init__(f"stopped by signal {signum}; {where}; the same command continues")
        self.exit_code = 128 + signum
