"""A made-up second paper beside the first: its own page and claims, a tab in report.html, and nothing of the first one's."""

import re

import pytest

from repro.report.pages import write_report
from repro.report.paper import Figure, Paper, Question
from repro.report.results import Results
from repro.report.verdicts import STATUSES

from .conftest import SCORES, VERBS
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
def second(tmp_path) -> Paper:
    file = tmp_path / "room" / "ledger.yaml"
    file.parent.mkdir()
    file.write_text(LEDGER, encoding="utf-8")
    return Paper(
        id="second",
        name="Second",
        model="Big",
        ledger_file=file,
        claim="It claims little.",
        families={"other": {"deep": "no"}},
        formulas={"double": lambda number: 2 * number},
        questions=(Question(label="sizes", entries=("table1.*.params_m",)),),
        figures=(Figure(place="Fig. 1", shows="a diagram"),),
    )


@pytest.fixture
def reported(checkout, second):
    checkout.count(big=("other_big", {"deep": "no"}, 224, 12_010_000, 1.0), deep=("other_big", {"deep": "yes"}, 224, 7_000_000, 1.0))
    papers = [checkout.paper, second]
    results = Results(checkout.paths, papers, SCORES)
    line = write_report(papers, results, "fp16", VERBS, "mini")
    assert line.endswith(f" of {len(checkout.ledger.entries)}")
    return checkout


def test_it_has_its_own_page_and_its_own_claims(reported):
    page = (reported.paths.results / "papers" / "second.md").read_text(encoding="utf-8")
    claims = reported.json("results/papers/second.claims.json")
    assert claims["summary"] == {**dict.fromkeys(STATUSES, 0), "matched": 2, "not measured": 1, "entries": 3}
    assert {entry["id"]: entry["status"] for entry in claims["entries"]} == {
        "table1.big.params_m": "matched",
        "table1.old.params_m": "not measured",
        "text.ratio": "matched",
    }
    assert page.startswith("# Second: the paper's numbers and ours\n\n*A second paper*, v2. It claims little.\n")
    assert "| Big | 12.0 → 12.01 ✓ |" in page and "| sizes | 1 of 2 match |" in page and "Vittt" not in page
    # what is measured but compared with no paper is on the first paper's page alone, and so is the first paper's ablation
    titles = re.findall(r"(?m)^## (.*)", page)
    assert not {"Provenance", "Speed and memory measured here", "Headline claims", "Example pictures"} & set(titles)
    assert "Old is not built in this project" in page and "Table 1: sizes" in titles


def test_the_first_papers_page_is_what_it_is_without_it(reported):
    before = (reported.paths.results / "tables.md").read_text(encoding="utf-8")
    write_report([reported.paper], Results(reported.paths, [reported.paper], SCORES), "fp16", VERBS, "mini")
    assert (reported.paths.results / "tables.md").read_text(encoding="utf-8") == before
    assert [entry["id"] for entry in reported.json("results/claims.json")["entries"]] == list(reported.ledger.entries)


def test_the_page_for_a_browser_has_a_tab_for_each(reported):
    elements = Elements((reported.paths.results / "report.html").read_text(encoding="utf-8"))
    assert [attributes["data-paper"] for _, attributes, _ in elements.all("article")] == ["vision_ttt", "second"]
    tabs = [(attributes["data-paper"], text) for _, attributes, text in elements.all("button", **{"class": "tab"})]
    assert tabs == [("vision_ttt", "Vision-TTT"), ("second", "Second")]
    ids = [each[1]["id"] for each in elements.found if "id" in each[1]]
    assert len(ids) == len(set(ids)) and {"the-ledger", "second-the-ledger", "second-entry-text.ratio"} <= set(ids)
    links = {each[1]["href"] for each in elements.all("a")}
    assert {link[1:] for link in links} <= set(ids)
