"""What a terminal gets, whatever its encoding, and what an error looks like."""

import io
import sys

import pytest

from repro.core.errors import did_you_mean
from repro.core.ui import allow_every_terminal, print_error, print_table
from tests.conftest import run_python


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("make", [io.TextIOWrapper, Terminal], ids=["pipe", "terminal"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_table_is_printed_in_every_encoding(monkeypatch, encoding, make):
    stream = make(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    allow_every_terminal()
    print_table(["name", "–"], [["Ü", "12 × 3 ≤ 中\udcff"]])
    stream.flush()
    printed = stream.buffer.getvalue().decode(encoding)
    assert "3 <= ?" in printed and ("U" in printed) == (encoding == "ascii")


def test_an_error_is_one_line_that_keeps_both_ends(capsys):
    print_error(ValueError("file.yaml:3:\n  bad\tvalue " + "x" * 10_000 + "; do this"))
    err = capsys.readouterr().err
    assert err.startswith("repro: file.yaml:3: bad value xxx") and err.endswith("x; do this\n")
    assert err.count("\n") == 1 and len(err) <= 301


@pytest.mark.parametrize("missing", ["typer", "torch", "yaml"])
def test_a_missing_package_is_one_line_that_says_how_to_install_it(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['repro', 'predict', 'x.png', '--weights', 'x']"
    code += "; from repro.__main__ import main; main()"
    done = run_python("-c", code)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f" {missing} " in done.stderr and "requirements.lock" in done.stderr


def test_known_names_are_listed_where_a_line_has_room_for_all(repro_cli):
    names = [f"name_{number}" for number in range(20)]
    assert names[-1] in did_you_mean("zzz", names) and did_you_mean("zzz", names * 2) == ""
    err = repro_cli.refuse("zzz")
    assert " ... " not in err and "--help" in err
