"""`python -m repro` is `repro`."""

from .cli import main

main()
