"""What a terminal gets, whatever its encoding, and what an error looks like."""

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from repro.core import ui
from repro.core.errors import did_you_mean
from repro.core.ui import Progress, allow_every_terminal, print_error, print_table
from tests.conftest import ROOT, run_python


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


@pytest.mark.parametrize("missing", ["typer", "torch"])
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


NAMES = {
    "long": "x" * 200 + ".jpg",
    "wide": "猫" * 80 + ".jpg",
    "not UTF-8": "caf\udce9.jpg",
    "clears the screen": "\x1b[2J\x1b[H.jpg",
    "of lines": "a\nb\r\nc.jpg",
    "turned around": "\u202egpj.exe",
    "of markup": r"\[red]a[/red] :cat:.jpg",
    "8 bits": "\x9b2J.jpg",
    "combining": "e" + "\u0301" * 60 + ".jpg",
    "empty": "",
}


@pytest.mark.parametrize(("encoding", "columns"), [("utf-8", 20), ("latin-1", 80), ("ascii", 400)])
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_table_keeps_every_cell_whatever_a_picture_is_called(monkeypatch, name, encoding, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal(stream := io.BytesIO(), encoding=encoding))
    allow_every_terminal()
    rows = [[name, "cat 57.7 %", "dog 42.3 %"], ["b.jpg", "dog 91.2 %", "cat 8.8 %"]]
    print_table(["picture", "1", "2"], rows)
    sys.stdout.flush()
    printed = re.sub("\x1b\\[[0-9;]*m", "", stream.getvalue().decode(encoding))  # without the table's own colours
    assert all(number in printed for number in ("57.7", "42.3", "91.2", "8.8")) and "b.jpg" in printed
    if (name + "x").isascii() and name.isprintable():
        assert name in printed
    assert not {"\x1b", "\r", "\u202e", "\x9b"} & set(printed)
    if columns == 400:  # a line of its own for each row, and no more
        assert sum(" %" in line for line in printed.splitlines()) == 2


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_an_error_about_any_name_is_one_line_that_moves_no_cursor(capsys, name):
    print_error(f"{name}: no such file")
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.endswith(": no such file\n") and err[:-1].isprintable()


# what is done to the streams -> exit code, and the word that stderr has
STREAMS = {
    ">&-": (1, "stdout"),
    "> /dev/full": (1, "stdout"),
    "2>&-": (0, ""),
    "2> /dev/full": (0, ""),
    ">&- 2>&-": (1, ""),
    "> /dev/full 2> /dev/full": (1, ""),
    "<&- >&- 2>&-": (1, ""),
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    ("words", "redirected"), [("--help", "> /dev/full"), *(("profile show mini", of) for of in STREAMS)]
)
def test_streams_that_are_closed_or_full_give_no_traceback(redirected, words):
    code, said = STREAMS[redirected]
    command = f"{shlex.quote(sys.executable)} -m repro {words} {redirected}"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and said in done.stderr and done.stderr.count("\n") == bool(said), done.stderr


def test_the_time_that_is_left_is_that_of_the_units_since_the_start(monkeypatch, capsys):
    """80 of 100 units remained; 40 of them took 100 seconds, so the other 40 take as long."""
    now = [50.0]
    monkeypatch.setattr(ui.time, "monotonic", lambda: now[0])
    with Progress("work", 100, done=20, unit="images") as progress:
        now[0] += 100.0
        progress.update(60)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "60 of 100" in said and "100 s" in said
