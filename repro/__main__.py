"""`python -m repro` is `repro`: the command line, or one line about the package that it lacks."""

import os
import sys

from .core.errors import INSTALL, UserError


def main() -> None:
    """Entry point of the console script; see `cli.main`."""
    try:
        from .cli import main as run

        run()
    except ImportError as error:
        first = (error.name or "repro").partition(".")[0]
        if os.environ.get("REPRO_DEBUG") or first in ("repro", "stages", "kernels"):
            raise
        print(f"repro: the package {first} is missing or does not load; run `{INSTALL}`", file=sys.stderr)
        sys.exit(UserError.exit_code)


if __name__ == "__main__":
    main()
