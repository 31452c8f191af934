"""Pages that people write: what fills their placeholders, what a missing number leaves, and that no number is typed."""

import re
from pathlib import Path

import pytest

from repro.report.document import Section, number, table
from repro.report.markdown import render_markdown
from repro.report.prose import read_page
from repro.report.results import Missing

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("repro/papers/*/*.md"), *ROOT.glob("repro/report/*.md")])
# digits that are part of a name: of a data set, a place in a paper, an architecture, a dtype, an interval
NAMES = re.compile(
    r"ImageNet-1(?:K|00)|CIFAR-100|Top-1|ADE20K|(?:Table|Fig\.|Eq\.|Section|Insight) [\d.]*\d|[Cc]onv\dd|"
    r"\d×\d (?=convolution)|256×256|fp\d\d|bf16|95 %"
)


def lack(report):
    raise Missing("no model is trained yet", "repro train")


PARTS = {
    "half": lambda report, value: value / 2,
    "rows": lambda report: [table(["a"], [[number(7)]])],
    "nothing": lambda report: [],
    "further": lambda report: [Section("Further", [("more",)])],
    "lack": lack,
    "word": lambda report: "*ahead*",
}


@pytest.fixture
def fill(checkout, tmp_path):
    def fill(text: str) -> str:
        file = tmp_path / "page.md"
        file.write_text(text, encoding="utf-8")
        return render_markdown(read_page(file, checkout.report(), PARTS))

    return fill


PRINTED = '{printed("table1.vittt_t.top1_percent")}'


@pytest.mark.parametrize(
    ("text", "page"),
    [
        (f"Two are {{half(5) + 1}}, {{half(3e6):,d}}\nand {PRINTED}.", "Two are 3.50, 1,500,000 and 77.7."),
        # blocks and sections take the place of their paragraph
        ("see\n\n{rows()}\n\n{further()}", "see\n\n| a |\n|---:|\n| 7 |\n\n## Further\n\nmore"),
        ("a\n\n## B\n\n- one\n  more\n- two", "a\n\n## B\n\n- one more\n- two"),
        # a section without anything to show is left out
        ("a\n\n## B\n\nabout nothing\n\n{nothing()}", "a"),
        # a missing number leaves its reason and its command once
        ("kept\n\n{lack()}\n\nIt is {lack()} of {half(2)}.", "kept\n\nNo model is trained yet: `repro train`."),
        # what a record says is no markup
        ("*we* are {word()}", "*we* are *ahead*"),
    ],
)
def test_placeholders_are_expressions_of_the_ledger(fill, text, page):
    assert fill(f"## A\n\n{text}\n") == f"# A\n\n{page}\n"


def test_an_id_is_our_number_or_why_there_is_none(fill, checkout):
    checkout.count(t=("vittt_tiny_patch16_224", {}, 224, 7_654_321, 1.0))
    assert "7.654" in fill("## A\n\n{table1.vittt_t.params_m:.3f}\n")
    assert "ImageNet-1K" in fill("## A\n\n{table1.vittt_t.top1_percent}\n")


@pytest.mark.parametrize("text", ["{half(}", "{unknown()}", "{half(1) if 2}"])
def test_a_mistake_in_a_page_is_an_error(fill, text):
    with pytest.raises(ValueError, match="expression of the ledger"):
        fill(f"## A\n\n{text}\n")


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_no_number_is_typed_where_an_expression_could_give_it(file):
    text = re.sub(r"\{[^{}]+\}", "", file.read_text(encoding="utf-8"))
    assert re.findall(r".*\d.*", NAMES.sub("", text)) == []
