"""report.html in a real browser, `make test-browser`: what only a browser can show. Screenshots: .runs/browser."""

import os
import shutil
from pathlib import Path

import pytest

from repro.core.csvfile import parse_csv
from repro.core.paths import Paths
from repro.papers.vision_ttt.paper import PAPER as VISION_TTT
from repro.report.pages import write_report
from repro.report.paper import Paper
from repro.report.results import Results
from repro.report.verdicts import STATUSES
from stages.report import report_on_papers
from tests.conftest import ROOT

pytestmark = pytest.mark.browser
SHOTS = ROOT / ".runs" / "browser"
DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """This repository's records, reported anew."""
    root = tmp_path_factory.mktemp("report")
    shutil.copytree(ROOT / "results", root / "results", ignore=shutil.ignore_patterns("*.safetensors", "snapshots"))
    shutil.copytree(ROOT / "profiles", root / "profiles")
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, root / name)
    report_on_papers(Paths(root))
    return root / "results"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    own = next(filter(None, map(shutil.which, names)), None)  # else the one that playwright has fetched
    with sync_playwright() as playwright:
        # Chromium refuses its sandbox to root
        launched = playwright.chromium.launch(executable_path=own, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser, folder):
    """Opens the report at a size and a colour scheme; no error and no request but for the file may come of it."""
    pages, messages, requests = [], [], []

    def opened(viewport=DESKTOP, scheme="light", **more):
        page = browser.new_page(viewport=viewport, color_scheme=scheme, **more)
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto((folder / "report.html").as_uri())
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert messages == []
    assert {url for url in requests if not url.startswith("data:")} == {(folder / "report.html").as_uri()}


def shown(page) -> int:
    return page.locator("#ledger tbody tr:visible").count()


def column(page, index: int) -> list[str]:
    """The cells of a column of the ledger, those that are shown."""
    return page.eval_on_selector_all(
        "#ledger tbody tr:not([hidden])", f"rows => rows.map(row => row.cells[{index}].innerText.trim())"
    )


def test_filters_count_as_claims_csv_does(open_page, folder):
    page, entries = open_page(), parse_csv((folder / "claims.csv").read_text(encoding="utf-8"), "claims")
    assert shown(page) == len(entries)
    paper = page.locator("article").first
    for status in STATUSES:
        chip = paper.locator(f'.chip[data-status="{status}"]')
        chip.click()
        assert shown(page) == sum(entry["status"] == status for entry in entries)
        assert page.locator("#count").inner_text() == f"{shown(page)} of {len(entries)} entries"
        chip.click()
    page.select_option("#kind", "speed")
    assert shown(page) == sum(entry["kind"] == "speed" for entry in entries)
    paper.locator('.chip[data-status="paper inconsistent"]').click()
    assert shown(page) == sum((entry["kind"], entry["status"]) == ("speed", "paper inconsistent") for entry in entries)
    page.click("#reset")
    page.select_option("#place", "Table 3")
    assert shown(page) == sum(entry["id"].startswith("table3.") for entry in entries) == 42
    page.click("#reset")
    page.fill("#search", "vittt-t top-1")
    texts = [" ".join(map(str, entry.values())).lower() for entry in entries]
    found = [text for text in texts if "vittt-t" in text and "top-1" in text]
    assert shown(page) == len(found) > 0
    page.click("#reset")
    assert shown(page) == len(entries)


def test_every_paper_filters_its_own_ledger(open_page):
    page = open_page()
    for tab in page.locator(".tab").all():
        tab.click()
        rows = page.locator("article:visible table[id$=ledger] tbody tr:visible")
        chip = page.locator("article:visible .chip[data-status=matched]")
        everything = rows.count()
        chip.click()
        assert 0 < rows.count() == int(chip.inner_text().split()[-1]) < everything
        chip.click()
        assert rows.count() == everything


def test_a_head_sorts_up_down_and_back(open_page):
    page = open_page()
    first = column(page, 0)
    head = page.locator("#ledger thead th").nth(2)

    def numbers():
        return [float(text) for text in column(page, 2) if text and not text.endswith("K")]

    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending" and numbers() == sorted(numbers())
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending" and numbers() == sorted(numbers(), reverse=True)
    assert column(page, 2)[0] and not column(page, 2)[-1]  # statements have no number, and stay last
    head.locator("button").click()
    assert head.get_attribute("aria-sort") is None and column(page, 0) == first


@pytest.mark.parametrize("by", ["hover", "focus", "tap"])
def test_a_status_explains_itself(open_page, by):
    page = open_page(has_touch=by == "tap")
    status = page.locator("#entry-table1\\.vittt_t\\.params_m .status")
    assert page.locator("#card").is_hidden()
    getattr(status, by)()
    text = page.locator("#card").inner_text()
    assert "results/complexity/metrics.json" in text and "table1.vittt_t.params_m" in text
    assert status.get_attribute("aria-expanded") == "true" and status.get_attribute("aria-describedby") == "card"
    page.keyboard.press("Escape")
    assert page.locator("#card").is_hidden()


def test_pictures_open_large_by_click_and_key_and_close(open_page):
    page = open_page()
    button, dialog = page.locator(".zoom").first, page.locator("#large")
    for start, close in (
        (button.click, lambda: page.keyboard.press("Escape")),
        (lambda: button.press("Enter"), dialog.locator("button").click),
    ):
        assert dialog.is_hidden()
        start()
        assert dialog.is_visible() and dialog.locator("img").evaluate("image => image.naturalWidth") > 0
        close()
        assert dialog.is_hidden() and button.evaluate("button => button === document.activeElement")
    assert page.locator(".zoom img").evaluate_all(
        "images => images.every(image => image.complete && image.naturalWidth > 0)"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_fits_reads_and_is_photographed(open_page, viewport, scheme):
    page = open_page(viewport, scheme)
    SHOTS.mkdir(parents=True, exist_ok=True)
    assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 5 and min(contrasts.values()) >= 4.5, contrasts
    anchors = "content the-ledger table-1-imagenet-1k-classification figures example-pictures not-measured-and-why"
    for anchor in anchors.split():
        page.evaluate("anchor => document.getElementById(anchor).scrollIntoView()", anchor)
        page.screenshot(path=SHOTS / f"{viewport['width']}_{scheme}_{anchor}.png")
    page.evaluate("document.getElementById('the-ledger').scrollIntoView()")
    page.locator(".status").nth(2).focus()
    page.screenshot(path=SHOTS / f"{viewport['width']}_{scheme}_why.png")


def test_it_prints_on_a_sheet_in_light_colours(open_page):
    page = open_page({"width": 760, "height": 1050}, "dark")
    dark = page.evaluate("getComputedStyle(document.body).color")
    page.emulate_media(media="print")
    page.screenshot(path=SHOTS / "print.png")
    assert page.evaluate("document.documentElement.scrollWidth") == 760
    assert page.evaluate("getComputedStyle(document.body).color") != dark
    assert page.locator(".controls:visible").count() == 0


def test_the_switch_goes_before_the_system(open_page):
    page = open_page(scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.select_option("#theme", "dark")
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    assert page.evaluate(background) == dark
    page.select_option("#theme", "")
    assert page.evaluate(background) == light


def test_each_paper_has_a_tab_and_links_open_theirs(browser, tmp_path):
    ledger = tmp_path / "ledger.yaml"
    claim = "{id: text.a, place: Section 1, says: so, kind: statement, reason: an opinion, command: none}"
    ledger.write_text(f"paper: {{title: Other, version: v1}}\nclaims: [{claim}]\n", encoding="utf-8")
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).write_text("stages: {}\n", encoding="utf-8")
    papers = [VISION_TTT, Paper(id="other", name="Other", model="Other", ledger_file=ledger)]
    write_report(papers, Results(Paths(tmp_path), papers, {}))
    page = browser.new_page(viewport=DESKTOP)
    page.goto((tmp_path / "results" / "report.html").as_uri())
    first, second = (page.locator(f'article[data-paper="{paper.id}"]') for paper in papers)
    assert first.is_visible() and second.is_hidden() and page.locator("nav ol:visible").count() == 1
    page.click('.tab[data-paper="other"]')
    assert first.is_hidden() and second.locator("#other-ledger tbody tr:visible").count() == 1
    page.evaluate("location.hash = '#not-measured-and-why'")
    first.wait_for(state="visible")
    assert second.is_hidden()
    page.close()


def test_it_is_small_enough_to_open_at_once(open_page, folder):
    """What a browser has to read and lay out for four papers; seconds would say more of the machine than of the page."""
    assert (folder / "report.html").stat().st_size < 6e6
    assert open_page().evaluate("document.querySelectorAll('*').length") < 60_000


# WCAG's contrast of text with the page and with the raised surfaces, for each kind of text
CONTRASTS = """() => {
  const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const luminance = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map(channel).reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
  const found = {};
  for (const selector of ["body", "nav a", "main a", "label", ".matched", ".differs-unexplained", ".not-measured", ".paper-inconsistent", "thead th", ".compared .paper"]) {
    const element = document.querySelector(selector);
    for (const ground of [document.body, document.querySelector(".ledger")]) {
      const pair = [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor].map(luminance).sort((a, b) => b - a);
      found[`${selector} on ${ground.className || "page"}`] = (pair[0] + 0.05) / (pair[1] + 0.05);
    }
  }
  return found;
}"""
