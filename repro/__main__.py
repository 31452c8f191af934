"""Entry point of `repro` and `python -m repro`; a missing package gives one line instead of a traceback."""

import os
import sys

from .core.errors import INSTALL, UserError


def main() -> None:
    """Run the command line (`cli.main`); exit with 2 and one line if a package is missing."""
    try:
        # imported here, so that a package missing anywhere below is caught
        from .cli import main as run

        run()
    except ImportError as error:
        first = (error.name or "repro").partition(".")[0]
        # an import error within this project is a bug, whose traceback is needed
        if os.environ.get("REPRO_DEBUG") or first in ("repro", "stages", "kernels"):
            raise
        print(f"repro: the package {first} is missing or does not load; run `{INSTALL}`", file=sys.stderr)
        sys.exit(UserError.exit_code)


if __name__ == "__main__":
    main()
