"""What tests of every folder share."""

import sys

import pytest


@pytest.fixture
def repro_cli(monkeypatch, capsys):
    """Run the command line in this process: `repro_cli("pretrain", "--cell", "nano")` -> (exit code, stdout, stderr)."""
    from repro.cli import main

    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["repro", *args])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as exit:
            code = int(exit.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call
