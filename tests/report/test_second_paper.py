"""A made-up second paper next to the first: its own page, claims and tab in report.html, nothing of the first one's."""

import csv
import dataclasses
import re

import pytest

from repro.report.pages import build_runs, write_report
from repro.report.paper import Document, Figure, Paper, Question
from repro.report.results import Missing, Results

from .conftest import JUDGE, SCORES
from .test_html import Elements

LEDGER = """
paper: {title: A second paper, version: v2}
tables:
  - id: table1
    place: Table 1
    title: sizes
    columns: {params_m: {label: "#P.", unit: M, kind: count, ours: 'params_m("{model}@224")'}}
    keys: [id, label, model]
    rows: [[big, Big, other_big, 12.0], [old, Old, "", 3]]
claims:
  - {id: text.ratio, place: Section 1, says: Big is twice Old and more, kind: statement, holds: double(table1.old.params_m) < table1.big.params_m,
     ours: 'double(3) < params_m("other_big[deep=yes]@224")'}
"""


@pytest.fixture
def second(checkout) -> Paper:
    return Paper(
        id="second",
        name="Second",
        model="Big",
        ledger_file=checkout.write("second/ledger.yaml", LEDGER),
        claim="It claims little.",
        families={"other": {"deep": "no"}},
        formulas=lambda: {"double": lambda number: 2 * number},
        questions=(Question(label="sizes", entries=("table1.*.params_m",)),),
        figures=(Figure(place="Fig. 1", shows="a curve", files="none/*.png"),),
        text=checkout.write("second/page.md", "## Its own\n\nits own words\n"),
        parts={"first_g": find_first},
        documents=(
            Document(
                file="docs/second.md",
                text=checkout.write("second/second.md", "# A page of its own\n\n{{ first_g() }} G\n"),
                records="second/*",
            ),
        ),
    )


def find_first(report) -> float:
    """A number of a record."""
    for row, _ in report.results.counts.values():
        return row["macs_g"]
    raise Missing("nothing is counted", "repro complexity")


@pytest.fixture
def reported(checkout, second):
    checkout.count(
        big=("other_big", {"deep": "no"}, 224, 12_010_000, 1.0),
        deep=("other_big", {"deep": "yes"}, 224, 7_000_000, 1.0),
    )
    papers = [checkout.paper, second]
    results = Results(checkout.paths, papers, SCORES)
    line = write_report(papers, results)
    assert line.endswith(f" of {len(checkout.ledger.entries)}")
    return checkout


def read_statuses(checkout, file) -> dict[str, str]:
    rows = csv.DictReader(checkout.read(file).splitlines(keepends=True))
    return {row["id"]: row["status"] for row in rows}


def test_it_has_its_own_page_its_own_claims_and_its_documents(reported):
    page = reported.read("results/papers/second.md")
    statuses = read_statuses(reported, "results/papers/second.claims.csv")
    big, old, ratio = "table1.big.params_m", "table1.old.params_m", "text.ratio"
    assert statuses == {big: "matched", old: "not measured", ratio: "matched"}
    assert page.startswith("# Second: ") and "\n\n*A second paper*, v2. It claims little.\n" in page
    assert "| Big | 12.0 → 12.01 ✓ |" in page and "| sizes | **1 of 2 hold, none fail" in page
    # what is measured but compared with no paper is on the first paper's page alone, and so is its ablation
    titles = re.findall(r"(?m)^## (.*)", page)
    assert not {"Provenance", "Speed and memory measured here", "Headline claims", "Runs on other data"} & set(titles)
    assert "Old is not built in this project" in page and "Table 1: sizes" in titles
    assert "\n## Its own\n\nits own words\n\n## The text's other claims\n" in page
    assert reported.read("docs/second.md") == "# A page of its own\n\n1.0 G\n"
    # the first paper's page is what it is without it, but for the links to the other pages, its second paragraph
    before = reported.read("results/tables.md").split("\n\n", 2)
    write_report([reported.paper], Results(reported.paths, [reported.paper], SCORES), with_html=False)
    assert reported.read("results/tables.md").split("\n\n", 2)[::2] == before[::2]
    assert list(read_statuses(reported, "results/claims.csv")) == list(reported.ledger.entries)


def test_what_another_page_shows_is_not_among_the_runs(checkout, second):
    """This is so for the paper itself; a second paper's pages change nothing on the page of the first."""
    checkout.train("replications/gpu/second/a", "other_big", "digits", top1=87.65, held_out_images=359)
    own = dataclasses.replace(second, primary=True)
    for papers, is_shown in (([own], False), ([dataclasses.replace(own, documents=())], True)):
        report = JUDGE(papers[0], Results(checkout.paths, papers, SCORES))
        assert ("87.65 %" in build_runs(report)) == is_shown


def test_the_page_for_a_browser_has_a_tab_for_each(reported):
    elements = Elements(reported.read("results/report.html"))
    assert [attributes["data-paper"] for _, attributes, _ in elements.all("article")] == ["vision_ttt", "second"]
    tabs = [(attributes["data-paper"], text) for _, attributes, text in elements.all("button", **{"class": "tab"})]
    assert tabs == [("vision_ttt", "Vision-TTT"), ("second", "Second")]
    ids = [each[1]["id"] for each in elements.found if "id" in each[1]]
    assert len(ids) == len(set(ids)) and {"the-ledger", "second-the-ledger", "second-entry-text.ratio"} <= set(ids)
    links = {each[1]["href"] for each in elements.all("a")}
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
