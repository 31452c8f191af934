"""The ledger against the paper: its tables (paper_tables.txt, from one rendering), and numbers typed from its text."""

import dataclasses
from pathlib import Path

import pytest

from repro.core.errors import UserError
from repro.report.ledger import Claim, Column, Table, find_narrowed, load_ledger

PAPER_TABLES = Path(__file__).with_name("paper_tables.txt")
SIZES = {"table1": (35, 3), "table2_coco": (15, 4), "table2_ade20k": (15, 3), "table3": (6, 7), "table4": (5, 6)}


def paper_rows(table: str) -> list[tuple[str, list[str]]]:
    """(label, numbers without their M and G) as the paper prints them."""
    lines = PAPER_TABLES.read_text(encoding="utf-8").partition(f"[{table}]\n")[2].partition("[")[0].splitlines()
    width, further = SIZES[table][1], table == "table1"  # which has the side of the images too
    found = [line.rsplit(maxsplit=width + further) for line in lines]
    return [(label, [word.rstrip("MG") for word in words[further:]]) for label, *words in found]


@pytest.mark.parametrize("table", SIZES)
def test_every_number_of_the_tables_is_in_the_ledger_as_printed(ledger, table):
    (about,) = [t for t in ledger.tables if t.id == table]
    assert (len(about.rows), len(about.columns)) == SIZES[table]
    ours = [[ledger.entries[f"{table}.{row}.{column}"].printed for column in about.columns] for row in about.records]
    labels = [label.partition(" (")[0] if table == "table1" else label for label in about.labels.values()]
    assert list(zip(labels, ours, strict=True)) == paper_rows(table)


# copied from the paper's text by another hand: the entry, or those of several ends, its number, its unit
NUMBERS = """
text.abstract.top1_t/s/b 77.7/81.8/82.7 %
text.abstract.speedup_1280_t 4.72 ×
text.abstract.memory_saved_1280_t 88.9 %
text.1.flops_saved_1280_t 79.4 %
text.4_1.batch_b 16
text.4_3.dwconv_params_t/s/b 0.02/0.04/0.08 M
text.5_1.gain_over_vim_t/s 1.6/1.5 points
text.5_1.gain_base_least/most 0.7/0.9 points
text.5_2.gain_t_over_vim_ap_mask 0.5 points
text.5_2.gain_s_over_vim_miou 1.4 points
text.5_2.gain_b_over_vrwkv_ap_box 2.0 points
text.5_2.tokens_coco 4200 tokens
text.5_3.flops_saved_1280_t/s/b 79.4/66.3/48.9 %
text.5_3.speedup_1280_s/b 4.23/3.88 ×
text.5_3.memory_saved_1280_b 89.0 %
text.5_4.share_params_t 0.44 M
text.5_4.gating_conv1d_fps_t 14.1 %
text.5_4.dual_fps_t 38.2 %
text.5_4.steps_b4 49 steps
appendix.b2.memory_factor_x 4 ×
appendix.d.imagenet_lr 1e-3
appendix.d.imagenet_batch_size 1024
appendix.d.coco_weight_decay 0.05
appendix.d.ade20k_lr_t/s 12e-5/6e-5
appendix.d.ade20k_weight_decay 0.01
"""


@pytest.mark.parametrize("line", NUMBERS.strip().splitlines())
def test_numbers_of_the_text(ledger, line):
    names, printed, *unit = line.split()
    stem, _, ends = names.rpartition("_")
    for end, number in zip(ends.split("/"), printed.split("/"), strict=True):
        entry = ledger.entries[f"{stem}_{end}"]
        assert (entry.printed, entry.unit) == (number, "".join(unit))


def test_places_are_named_once_and_with_a_capital(ledger):
    assert ledger.entries["eq13.vim"].places == ("Eq. 13", "Appendix B")
    assert ledger.entries["table2_ade20k.vim_b.miou_percent"].places == ("Table 2 (right)",)
    assert ledger.entries["text.fig7a.chunk"].places == ("Section 5.4", "Fig. 7a")


BASE = """
paper: {title: t, version: v, speed_device: d, speed_batch: 1}
claims:
"""
NUMBER = "  - {id: x.y, place: p, says: s, kind: count, values: {a: {printed: 1.0, equals: 1 + 0%s}}}\n"
EXPLAINED = "explanations: [{ids: [x.y_a], text: t%s}]\n"
# of three sizes, one of which nobody asked
NARROWED = """
  - {id: x.gap, place: p, says: X has a gap to Y, kind: statement, holds: "a.x_s.ap > 1 and a.x_b.ap > 1"}
"""


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
        ("it is faster", "a.x_s.fps > 1 and a.x_b.fps > 1", "S, B"),
        ("it is faster", 'fps("x_tiny_patch16_224", 224) > 1', "T"),
        ("X-T is faster", "a.x_t.fps > 1", None),
        ("X-S/B are faster than Y-S/B", "a.x_s.fps > 1 and a.x_b.fps > 1", None),
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


def test_settings_are_declared_and_never_read_from_a_measurement(ledger):
    """What was copied from the paper has no counterpart that could match."""
    copied = {"profile", "profile_setting", "expected", "model_constant"}
    for entry in ledger.entries.values():
        assert not entry.ours or not copied & {call.name for call in entry.ours.calls}, entry.id


def test_what_was_fitted_says_to_what(ledger):
    for entry in ledger.entries.values():
        if entry.ours and "macs_g_paper_convention" in {call.name for call in entry.ours.calls}:
            assert "fitted to the rows" in entry.fitted, entry.id


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
