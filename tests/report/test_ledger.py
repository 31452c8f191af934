"""The ledger against the paper: its tables and numbers of its text (paper.txt, copied from one rendering)."""

import dataclasses
from pathlib import Path

import pytest

from repro.core.errors import UserError
from repro.report.ledger import Claim, Column, Table, find_narrowed, load_ledger

PAPER = Path(__file__).with_name("paper.txt")
SIZES = {"table1": (35, 3), "table2_coco": (15, 4), "table2_ade20k": (15, 3), "table3": (6, 7), "table4": (5, 6)}


def read_section(name: str) -> list[str]:
    text = PAPER.read_text(encoding="utf-8")
    return text.partition(f"[{name}]\n")[2].partition("[")[0].strip().splitlines()


def paper_rows(table: str) -> list[tuple[str, list[str]]]:
    """(label, numbers without their M and G) as the paper prints them."""
    width, further = SIZES[table][1], table == "table1"  # which has the side of the images too
    found = [line.rsplit(maxsplit=width + further) for line in read_section(table)]
    return [(label, [word.rstrip("MG") for word in words[further:]]) for label, *words in found]


@pytest.mark.parametrize("table", SIZES)
def test_every_number_of_the_tables_is_in_the_ledger_as_printed(ledger, table):
    (about,) = [t for t in ledger.tables if t.id == table]
    assert (len(about.rows), len(about.columns)) == SIZES[table]
    ours = [[ledger.entries[f"{table}.{row}.{column}"].printed for column in about.columns] for row in about.records]
    labels = [label.partition(" (")[0] if table == "table1" else label for label in about.labels.values()]
    assert list(zip(labels, ours, strict=True)) == paper_rows(table)


@pytest.mark.parametrize("line", read_section("text"))
def test_numbers_of_the_text(ledger, line):
    """Each line has the entry, or those of several ends, its number and its unit, copied by another hand."""
    names, printed, *unit = line.split()
    stem, _, ends = names.rpartition("_")
    for end, number in zip(ends.split("/"), printed.split("/"), strict=True):
        entry = ledger.entries[f"{stem}_{end}"]
        assert (entry.printed, entry.unit) == (number, "".join(unit))


def test_places_are_named_once_and_with_a_capital(ledger):
    assert ledger.entries["eq13.vim"].places == ("Eq. 13", "Appendix B")
    assert ledger.entries["table2_ade20k.vim_b.miou_percent"].places == ("Table 2 (right)",)
    assert ledger.entries["text.fig7a.chunk"].places == ("Section 5.4", "Fig. 7a")


BASE = "paper: {title: t, version: v, speed_device: d, speed_batch: 1}\nclaims:\n"
NUMBER = "  - {id: x.y, place: p, says: s, kind: count, values: {a: {printed: 1.0, equals: 1 + 0%s}}}\n"
EXPLAINED = "explanations: [{ids: [x.y_a], text: t%s}]\n"
# nobody asked for T
NARROWED = '  - {id: x.gap, place: p, says: X has a gap, kind: statement, holds: "a.x_s.ap > 1 and a.x_b.ap > 1"}\n'


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (NUMBER % ", prnted: 3", UserError, "prnted.*did you mean 'printed'"),
        (NUMBER % "" * 2, ValueError, "x.y_a is there twice"),
        (NUMBER % " + no.such", ValueError, "x.y_a: no entry no.such"),
        (NUMBER % " +", ValueError, "not an expression of the ledger: 1 \\+ 0 \\+"),
        ("  - {id: x.y, place: p, says: s, kind: statement}\n", ValueError, "x.y: has neither `ours` nor a reason"),
        (NARROWED, ValueError, "x.gap: the statement is narrowed: it is about more sizes than S, B"),
        (NUMBER % ", declared: f(", ValueError, "not an expression"),
        (NUMBER % ", declared: no.such + 1", ValueError, "x.y_a: no entry no.such"),
        (NUMBER % ", measurable: no.such < 1", ValueError, "x.y_a: no entry no.such"),
        (NUMBER % "" + "explanations: [{ids: [x.z], text: t, source: s}]\n", ValueError, "x.z: no entry x.z"),
        (NUMBER % "" + EXPLAINED % ", shows: no.such", ValueError, "x.y_a: no entry no.such"),
        (NUMBER % "" + EXPLAINED % "", UserError, "either `shows` or `source`"),
        (NUMBER % "" + EXPLAINED % ", shows: 1 < 2, source: s", UserError, "either `shows` or `source`"),
    ],
)
def test_a_mistake_in_the_ledger_is_an_error(tmp_path, text, error, message):
    file = tmp_path / "ledger.yaml"
    file.write_text(BASE + text, encoding="utf-8")
    with pytest.raises(error, match=message):
        load_ledger(file)


TABLE = """
paper: {title: t, version: v}
tables:
  - {id: table12, place: Table 12, title: t, columns: {a: {label: A, unit: "", kind: count%s}}, keys: [id, label, model], rows: [[x, X-1, m, 3], [y, Y-1, "", 4]]}
"""


def test_a_column_without_a_counterpart_says_why(tmp_path):
    file = tmp_path / "ledger.yaml"
    file.write_text(TABLE % ", reason: it is hard, command: repro hard", encoding="utf-8")
    built, other = load_ledger(file).entries.values()
    assert (built.ours, built.reason, built.command) == (None, "it is hard", "repro hard")
    assert built.places == ("Table 12",)
    assert other.reason == "Y is not built in this project"
    for more in ("", ", ours: 1 + 2, reason: r, command: c", ", reason: r", ", ours: 1 + 2, command: c"):
        file.write_text(TABLE % more, encoding="utf-8")
        with pytest.raises(UserError, match="column A: has not exactly one of"):
            load_ledger(file)


@pytest.mark.parametrize(
    ("says", "asked", "narrowed"),
    [
        ("it is faster", "a.x_t.fps > 1 and a.x_s.fps > 1 and a.x_b.fps > 1", None),
        ("it is faster", 'fps("x_tiny_patch16_224", 224) > 1', "T"),
        ("X-T is faster", "a.x_t.fps > 1", None),
        ("X-S/B are faster than Y-S/B", "a.x_s.fps > 1", "S"),
        ("X-T is faster than Y-T, X-B is slower", "a.x_t.fps > 1", "T"),
        ("X-S is faster", "a.x_t.fps > 1 and a.x_s.fps > 1", None),  # more than it says
        ("it is faster", "1 < 2", None),  # about no size at all
        ("X is faster than Y", "a.x_t.fps > a.y_t.fps and a.x_s.fps > 1 and a.x_b.fps > 1", "T"),  # of Y, only T
        ("X is faster than Y", "a.x_t.fps > a.y_t.fps and a.x_s.fps > a.y_s.fps and a.x_b.fps > a.y_b.fps", None),
    ],
)
def test_a_statement_is_judged_for_every_size_that_it_is_about(says, asked, narrowed):
    claim = Claim(id="x.y", place="p", says=says, kind="statement", holds=asked)
    assert find_narrowed(claim) == narrowed
    assert find_narrowed(dataclasses.replace(claim, holds=None, ours=asked)) == narrowed
    assert find_narrowed(dataclasses.replace(claim, about="the size of its section")) is None


def test_what_was_copied_has_no_counterpart_that_could_match_and_what_was_fitted_says_to_what(ledger):
    copied = {"profile", "profile_setting", "expected", "model_constant"}
    for entry in ledger.entries.values():
        called = {call.name for call in entry.ours.calls} if entry.ours else set()
        assert not copied & called, entry.id
        assert "macs_g_paper_convention" not in called or "fitted to the rows" in entry.fitted, entry.id


def test_rows_that_are_counted_as_their_authors_count_are_asked_by_formula(ledger):
    rows = ledger.table("table1").records.values()
    assert all(row["model"] for row in rows)
    calls = {row["label"]: ledger.entries[f"table1.{row['id']}.macs_g"].ours.calls[0] for row in rows}
    by_formula = [label for label, call in calls.items() if call.name == "macs_g_of_authors"]
    assert by_formula == [f"{family}-{size}" for family in ("VMamba", "MambaVision") for size in "TSB"]
    assert calls["VMamba-T"].args == ("vmamba_tiny_224@224",) and calls["Vim-T"].args == ("vim_tiny_patch16_224@224",)
    assert ledger.entries["table1.vmamba_t.params_m"].ours.calls[0].args == ("vmamba_tiny_224@224",)


def test_a_row_without_a_model_says_that_it_is_not_built():
    column = Column(label="FLOPs", unit="G", kind="count", ours='macs_g("{model}")', by_formula={"b*": "formula()"})
    table = Table(id="t", place="Table 9", title="", columns={"macs_g": column}, keys=("id", "label", "model"), rows=[])
    models = {"a": "", "b": "", "c": "c", "bb": "b"}
    rows = [{"id": name, "label": f"Net-{name}", "model": model, "macs_g": "1.0"} for name, model in models.items()]
    entries = [table.entry(row, "macs_g", ()) for row in rows]
    assert [entry.reason for entry in entries] == ["Net is not built in this project"] * 2 + [None] * 2
    assert [entry.ours and entry.ours.calls[0].name for entry in entries] == [None, None, "macs_g", "formula"]
    entry = table.entry({"id": "d", "label": "Net-S (iso.)", "model": "", "macs_g": "1.0"}, "macs_g", ())
    assert entry.reason == "Net (iso.) is not built in this project"
