"""README.md: short, with no number typed by hand, with the verbs of the table of stages, and true of the tree."""

import re
from pathlib import Path

from repro.papers import load_papers
from stages.report import describe_verbs

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"<!-- (\w+) -->\n(.*?)\n<!-- /\1 -->", TEXT, re.S))
BY_HAND = re.sub(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", "", TEXT, flags=re.S)


def test_it_is_short():
    assert len(TEXT.split()) <= 600


def test_it_has_the_blocks_that_are_written_by_code():
    assert set(BLOCKS) == {"verdict", "picture", "run", "papers", "verbs"}


def test_it_leads_to_the_page_of_every_paper_and_to_the_documentation():
    files = {paper.page for paper in load_papers().values()} | {"docs/README.md"}
    assert all((ROOT / file).is_file() and f"]({file})" in TEXT for file in files)


def test_its_verbs_are_those_of_the_table():
    assert BLOCKS["verbs"] == describe_verbs(), "put describe_verbs() between the markers"


def test_what_the_installation_needs_is_what_it_checks():
    """The only numbers in its prose; see `find_typed_numbers` in test_docs.py."""
    need_gb = re.search(r"^NEED_GB := (\d+)$", (ROOT / "Makefile").read_text(), re.M)[1]
    python = re.search(r'^requires-python = ">=([\d.]+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert f"{need_gb} GB of disk" in BY_HAND and f"Python {python} or newer" in BY_HAND
    assert not re.search(r"[%×]", BY_HAND)


def test_its_python_runs():
    names = {}
    exec(re.search(r"```python\n(.*?)```", TEXT, re.S)[1], names)
    model, pyramid, variant = (names[name] for name in ("model", "pyramid", "variant"))
    assert type(model).__name__ == "Vittt" and len(pyramid.feature_info.channels()) == 4
    assert (variant.design, variant.pool, variant.chunk_size, variant.w0) == ("dual", "head", 32, "shared")
