"""report.html: the rows of claims.csv, everything escaped and embedded, the same bytes by the same records."""

import csv
import html.parser
import re
from collections import Counter

import pytest
from PIL import Image

from repro.core.errors import UserError
from repro.report.html import make_parser, render_html, render_section
from repro.report.markdown import make_anchor
from repro.report.pages import build_document
from repro.report.verdicts import STATUSES
from tests.conftest import ROOT

VOID = {"meta", "link", "input", "br", "img", "hr"}


class Elements(html.parser.HTMLParser):
    """Every element as (tag, attributes, text), and proof that each is closed where it must be."""

    def __init__(self, text: str):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        element = [tag, dict(attrs), ""]
        self.found.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open[-1][0] == tag, (tag, self.open[-1][:2])
        text = self.open.pop()[2]
        if self.open:
            self.open[-1][2] += text

    def handle_data(self, data):
        if self.open:
            self.open[-1][2] += data

    def all(self, tag: str, **attributes: str) -> list[list]:
        return [
            each
            for each in self.found
            if each[0] == tag and all(value in (each[1].get(key) or "").split() for key, value in attributes.items())
        ]


def page(checkout) -> str:
    checkout.run_stage()
    return checkout.read("results/report.html")


@pytest.fixture(scope="module")
def pages(committed) -> tuple[str, str]:
    """tables.md and report.html of the records of this repository."""
    report = committed[0]
    document = build_document(report)
    return document, render_html([(report, document)])


def test_the_ledgers_rows_are_those_of_claims_csv_and_the_same_records_give_the_same_bytes(checkout):
    checkout.count(t=("vittt_tiny_patch16_224", {}, 224, 6_983_116, 1.4575))
    checkout.write("dvc.yaml", "stages: {pretrain: {cmd: repro pretrain}, ablate: {cmd: repro ablate}}\n")
    picture = checkout.paths.results / "visualize" / "fig8_receptive_field.png"
    picture.parent.mkdir(parents=True)
    Image.linear_gradient("L").save(picture)
    elements = Elements(first := page(checkout))
    others = {f"{name}-": f"papers/{name}.claims" for name in ("kv_binding", "linearize", "vit3")}
    files = {key: checkout.read(f"results/{file}.csv") for key, file in {"": "claims", **others}.items()}
    claims = {key: list(csv.DictReader(text.splitlines(keepends=True))) for key, text in files.items()}
    entries = [(f"{key}entry-{entry['id']}", entry) for key, rows in claims.items() for entry in rows]
    rows = [attributes for tag, attributes, _ in elements.found if tag == "tr" and "data-status" in attributes]
    found = [(row["id"], row["data-status"], row["data-kind"]) for row in rows]
    assert found == [(name, entry["status"], entry["kind"]) for name, entry in entries]
    assert all(row["data-places"] for row in rows)
    statuses = [text.strip() for _, _, text in elements.all("button", **{"class": "status"})]
    # a mark, and the word
    assert [text.split(" ", 1)[1] for text in statuses] == [entry["status"] for _, entry in entries]
    buttons = elements.all("button", **{"class": "chip"})
    chips = [(attributes["data-status"], int(text.split()[-1])) for _, attributes, text in buttons]
    counts = [Counter(row["status"] for row in rows) for rows in claims.values()]
    assert chips == [(status, count[status]) for count in counts for status in STATUSES]
    style = (ROOT / "repro/report/template.html").read_text(encoding="utf-8")
    assert all(re.search(rf"\.{make_anchor(word)}[ ,]", style) for word in STATUSES)  # every one has a colour
    # what explains a status is in its row
    texts = (text for _, _, text in elements.all("div", **{"class": "about"}))
    about = dict(zip((entry["id"] for entry in claims[""]), texts))
    for text in ("results/complexity/metrics.json", checkout.CPU, "0123456789ab", "the pipeline", "rounding"):
        assert text in about["table1.vittt_t.params_m"]
    assert "profiles/paper.yaml has no cell" in about["table1.vittt_t.top1_percent"]
    checkout.write("results/complexity/run.json", '{"finished": "2026-01-01"}')
    assert page(checkout) == first and "data:image/webp;base64," in first


def test_records_cannot_write_markup(checkout):
    attack = '"><script>alert(1)</script><img src=x onerror=alert(1)>[link](javascript:alert(1))'
    counts = {"rows": {}, "saved_at_1280_percent": {"T": 78.68}, "dwconv_params_m": {}}
    checkout.record("complexity", counts, device=attack)
    path = f"pretrain/cell{attack.replace('/', '')}"
    checkout.train(path, f"vittt{attack}", f"digits{attack}", top1=98.0, held_out_images=360)
    row = {"model": f"vittt{attack}", "status": attack, "reason": attack, "throughput_img_per_s": None}
    checkout.speed(row, device=attack)
    elements = Elements(page(checkout))
    assert len(elements.all("script")) == 1
    for tag, attributes, _ in elements.found:
        assert not any(key.startswith("on") for key in attributes)
        assert tag != "img" or attributes.get("src") != "x"
        assert not (attributes.get("href") or "").startswith("javascript")
    assert attack in "".join(text for _, _, text in elements.all("div", **{"class": "about"}))


@pytest.mark.parametrize(
    ("cell", "marks", "is_compared"),
    [
        ("1.4 → 1.458 ≠ᵉ (+0.018)", "≠ᵉ", True),
        ("77.7 → –", "–", True),
        ("→ holds ✓", "✓", True),
        ("4 → 4.06 ⚠ ≠ (+0.06)", "⚠≠", True),
        ("25.1 ⚠", "⚠", False),
        ("✓ / –", "✓–", False),
        ("⚠ ≠ᵉ (−0.3)", "⚠≠ᵉ", False),
        # a dash may stand for any value, and text is no status
        ("–", "", False),
        ("ours ≠ theirs", "", False),
        ("a → b → c", "", False),
        ("`7 → 6.983 ✓`", "", False),
    ],
)
def test_what_a_cell_compares_is_laid_out_and_its_marks_have_words(tmp_path, cell, marks, is_compared):
    text = render_section(make_parser(tmp_path), "A", f"| | b |\n|---|---|\n| a | {cell} |\n", "")
    elements = Elements(text)
    marked = elements.all("span", **{"class": "mark"})
    assert "".join(each[2].removesuffix(f" {each[1]['title']}") for each in marked) == marks
    assert bool(elements.all("span", **{"class": "compared"})) == is_compared


@pytest.mark.parametrize(
    ("text", "href"),
    [
        ("[a](README.md)", "../README.md"),
        ("[a](results/papers/a.md)", "papers/a.md"),
        ("[a](#why)", "#p-why"),
        ("[a](https://b.org/c)", "https://b.org/c"),
        ("| a |\n|---|\n| [a](docs/b.md) |", "../docs/b.md"),
        ("[a](javascript:alert(1))", None),
        ("<https://b.org>", None),
        ("<a href='x'>a</a>", None),
    ],
)
def test_links_lead_from_the_folder_of_the_page(tmp_path, text, href):
    elements = Elements(render_section(make_parser(tmp_path), "A", text, "p-"))
    assert [each[1]["href"] for each in elements.all("a")] == ([href] if href else [])


def test_it_needs_no_other_file_and_is_small(pages):
    _, text = pages
    elements = Elements(text)
    links = [each[1].get("src") or each[1].get("href") for each in elements.found if {"src", "href"} & each[1].keys()]
    # Git does not keep the page itself
    outside = [link for link in links if not link.startswith(("#", "data:image/", "report.html"))]
    assert all((ROOT / "results" / link).is_file() for link in outside)
    assert not [each for each in elements.found if each[0] in ("link", "iframe", "object")]
    assert "url(" not in text and "@import" not in text
    assert "default-src 'none'" in text
    assert len(text.encode()) < 5e6
    ids = [each[1]["id"] for each in elements.found if "id" in each[1]]
    assert len(ids) == len(set(ids)) and {link[1:] for link in links if link.startswith("#")} <= set(ids)


def test_every_section_and_picture_of_the_markdown_is_on_it(pages):
    tables, text = pages
    elements = Elements(text)
    titles = [each[2] for each in elements.all("h2")]
    expected = [title.replace("`", "") for title in re.findall(r"(?m)^## (.*)", tables)]
    assert [title for title in titles if title != "The ledger"] == expected
    pictures = [each for each in elements.all("img") if each[1].get("src")]
    assert len(pictures) == tables.count("![") > 0 and all(each[1]["alt"] for each in pictures)
    assert len(elements.all("button", **{"class": "zoom"})) == len(pictures)
    tables_there = elements.all("table")
    assert len(tables_there) == len(re.findall(r"(?m)^\|(?:---:?\|)+$", tables)) + 1
    assert all(each[1].get("scope") in ("col", "row") for each in elements.all("th"))
    marked = list(elements.all("span", **{"class": "mark"}))
    assert marked and all(each[1]["title"] in each[2] for each in marked)  # never the colour alone


def test_a_damaged_picture_is_one_line_that_names_it(checkout):
    checkout.write("results/visualize/fig8_receptive_field.png", "half a picture")
    with pytest.raises(UserError, match=r"fig8_receptive_field.png: not a picture that can be read .*; make it again"):
        checkout.run_stage()
