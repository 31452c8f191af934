"""The errata: what is in them stands on a verdict, nothing is lost, and no text of a third party is held against authors."""

import re

import pytest

from repro.report.errata import LISTS, find_items, list_errata
from repro.report.ledger import load_ledger
from repro.report.verdicts import Status

WORDS = 900  # of a paper's list: a page

LEDGER = """
errata:
  as_of: 2026-01-02
  errors:
    - {ids: [wrong], correction: "four"}
    - {ids: [right], correction: "five"}
  questions:
    - {ids: [open], because: "it may be six", correction: "seven"}
claims:
  - {id: wrong, place: Eq. 1, says: the wrong one, kind: statement, ours: 1 > 2}
  - {id: right, place: Eq. 2, says: the right one, kind: statement, ours: 2 > 1}
  - {id: open, place: Eq. 3, says: the open one, kind: statement, reason: r, command: none}
  - {id: twofold, place: Eq. 4, says: the twofold one, kind: statement, contradiction: c, reason: r, command: none}
explanations:
  - {ids: [wrong], text: the reason, shows: 1 < 2}
"""


def read_rows(page: str) -> list[list[str]]:
    """The rows of all tables on a page, without their heads."""
    found = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if re.match(r"\| \d", line)]
    return [[cell.strip() for cell in row] for row in found]


def test_an_item_stands_on_a_verdict_and_a_contradiction_is_never_lost(checkout):
    """`right` is no error, since ours agrees; `twofold` is in no list of the ledger."""
    report = checkout.report_on(LEDGER)
    assert report.verdicts["wrong"].status == Status.EXPLAINED
    found = {name: [each.ids for each, _ in find_items(report, name)] for name in LISTS}
    assert found == {"errors": [("wrong",)], "inconsistencies": [("twofold",)], "questions": [("open",)]}
    rows = read_rows(list_errata([report]))
    assert [row[:5] for row in rows] == [
        ["1", "Eq. 1", "the wrong one", "the reason", "four"],
        ["2", "Eq. 4", "the twofold one", "c", "–"],
        ["3", "Eq. 3", "the open one", "it may be six", "seven"],
    ]


def test_answers_and_days_stand_beside_what_they_answer(checkout):
    text = LEDGER.replace("as_of: 2026-01-02", "as_of: 2026-01-02\n  sent: 2026-01-03\n  answers: {open: eight}")
    page = list_errata([checkout.report_on(text)])
    assert [row[5] for row in read_rows(page)] == ["", "", "eight"]
    assert "2026-01-02" in page and "2026-01-03" in page


def test_a_list_that_is_withheld_holds_nothing_against_the_authors(checkout):
    page = list_errata([checkout.report_on(LEDGER.replace("as_of: 2026-01-02", "withheld: so it is"))])
    assert not read_rows(page) and "so it is" in page


@pytest.mark.parametrize(
    ("found", "placed", "why"),
    [
        ("ids: [right]", "ids: [wrong]", "there twice"),
        ("ids: [right]", "ids: [nobody]", "no entry nobody"),
        ("errata:", "errata:\n  answers: {table9: yes}", "table9"),
    ],
)
def test_an_item_of_what_is_no_entry_or_is_listed_already_is_refused(tmp_path, found, placed, why):
    file = tmp_path / "ledger.yaml"
    file.write_text("paper: {title: A, version: B}\n" + LEDGER.replace(found, placed))
    with pytest.raises(ValueError, match=why):
        load_ledger(file)


def test_every_contradiction_of_the_papers_is_placed_and_every_item_is_still_one(committed):
    for report in committed:
        errata = report.paper.ledger.errata
        if errata.withheld:
            continue
        wrong = [each.entry.id for each in report.all if each.status == Status.INCONSISTENT]
        assert not set(wrong) - set(errata.placed), report.paper.id
        for name in LISTS:
            items = [erratum for erratum, _ in find_items(report, name)]
            assert items == list(getattr(errata, name)), (report.paper.id, name)
            assert all(erratum.correction for erratum in items)


def test_the_errors_have_what_a_source_or_a_computation_shows_to_be_wrong(committed):
    """An entry that differs, with the reason known, contradicts nothing in the paper, and is an error all the same."""
    found = {each for report in committed for e, _ in find_items(report, "errors") for each in e.ids}
    sizes = ("4g", "8g", "16g")
    assert {*(f"table1.regnety_{size}.params_m" for size in sizes), "text.appendix_e.rate", "text.6_1.vit3"} <= found


def test_a_list_is_a_page_and_names_each_number_once(committed):
    sections = (part.partition("\n") for part in re.split(r"(?m)^## ", list_errata(committed))[1:])
    pages = {title: body for title, _, body in sections}
    words = {title: len(page.replace("|", " ").split()) for title, page in pages.items()}
    assert max(words.values()) <= WORDS, words
    printed = [row[2] for row in read_rows(pages["Vision-TTT"])]
    numbers = [set(re.findall(r"[\d.]+", found[1])) for each in printed if (found := re.match(r"\*\*(.*?)\*\*", each))]
    assert all(sum(value in each for each in numbers) == 1 for value in ("4.23", "3.88", "89.0", "12", "45"))


def test_the_residual_of_an_equation_that_fails_is_computed(committed):
    """As the page of the paper has it."""
    report = next(each for each in committed if each.paper.id == "kv_binding")
    formula = report.paper.formulas()["lact_error"]
    (row,) = (row for row in read_rows(list_errata([report])) if row[0] == "1")
    assert f"{formula('coefficient'):.2f}" in row[3]
