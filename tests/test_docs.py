"""The pages in docs/ and README.md are true: commands and options exist, links lead somewhere, examples run, no number
is typed by hand, and the diagram of imports is the one that the code follows.
"""

import functools
import graphlib
import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from dvc.utils.hydra import apply_overrides, get_hydra_sweeps
from PIL import Image
from typer.testing import CliRunner

import stages
from repro.cli import app
from repro.core.config import build, load_section, load_yaml
from repro.data.coco import read_instances
from repro.data.kinds import PrepareData
from repro.papers import load_papers
from repro.tasks.classification.params import ClassifierParams
from repro.tasks.generation.params import GenerateParams
from stages.report import describe_verbs
from tests.conftest import ROOT, run_python
from tests.test_layout import import_graph

PAGES = [ROOT / name for name in ("README.md", "results/replications/README.md", "results/speed.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
REPRO = typer.main.get_command(app)
# files that the pages tell the reader to write
EXAMPLES = re.compile(r"stages/(toy|halve)\.py|repro/models/toy\.py|repro/tasks/halves/.*|repro/papers/deit/.*")


def fenced(page: Path | str, language: str) -> list[str]:
    """The code blocks of a page, or of one in docs/ by its name, in a language, without the last line's end."""
    blocks = FENCED.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    return [code.rstrip("\n") for found, code in blocks if found == language]


def spans(page: Path) -> list[str]:
    """What stands in backticks, outside code blocks."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def commands(page: Path) -> Iterator[list[str]]:
    """Each command line of `repro`, `make` or `dvc` on a page, as words."""
    shown = "\n".join([*fenced(page, ""), *re.findall(r"^    (.*)$", page.read_text(encoding="utf-8"), re.M)])
    for line in (*shown.replace("\\\n", " ").splitlines(), *spans(page)):
        if found := re.match(r"(?:.*-m |(?:\w+=\S+ )*)((?:repro|make|dvc) .*)", line):
            yield re.sub(r"\s#.*|[\[\]'`;]|,(?!\S)", "", found[1]).split()


def find_verb(words: list[str]) -> Any:
    """The command that words after `repro` call, and that is taken off them; None for a placeholder; else it fails."""
    command: Any = REPRO
    while hasattr(command, "get_command") and words and not words[0].startswith("-"):
        names = words.pop(0).split("|")
        if names[0].isupper():
            return None
        found = [command.get_command(None, name) for name in names]
        assert all(found), f"no verb {'|'.join(names)}"
        command = found[0]
    return command


def options_of(command: Any) -> dict[str, Any]:
    pairs = ((name, each) for each in command.params for name in (*each.opts, *each.secondary_opts))
    return dict(pairs)


@functools.cache
def known_cells(page: Path) -> dict[str, set[str]]:
    """Section -> the cells of all profiles, and of the examples on the page."""
    examples = map(yaml.safe_load, fenced(page, "yaml"))
    found: dict[str, set[str]] = {}
    for content in (*map(load_yaml, (ROOT / "profiles").glob("*.yaml")), *examples):
        for section, cells in (*content.items(),):
            found.setdefault(section, set()).update(cells if isinstance(cells, dict) else ())
    return found


def check_command(line: str, words: list[str], cells: dict[str, set[str]]) -> None:
    """Fail where the words after `repro` name a verb, an option, a choice or a cell that is not there."""
    if (command := find_verb(words)) is None:
        return
    options = options_of(command) | {"--help": None}
    for word, value in itertools.zip_longest(words, words[1:], fillvalue=""):
        if word.startswith("-"):
            assert word in options, f"{line}: {command.name} has no option {word}"
            choices = getattr(getattr(options[word], "type", None), "choices", None)
            if choices and value.islower():
                assert set(value.split("|")) <= set(choices), line
            if word == "--cell" and value.islower():
                verb = command.name.replace("-", "_")
                sections = [name for name in cells if name == verb or (verb == "ablate" and name.startswith("ablate_"))]
                assert any(value in cells[section] for section in sections), line


@each_page
def test_every_command_exists_with_its_options(page):
    for words in commands(page):
        line, program = " ".join(words), words.pop(0)
        if program == "make":
            targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
            assert words[0] in targets, line
        elif program == "dvc":
            for stage, cell in (word.split("@") for word in words if "@" in word):
                assert cell in known_cells(page)[stage], line
        else:
            check_command(line, words, known_cells(page))


@each_page
def test_every_option_that_is_named_exists(page):
    known = {"--help", "--debug"}
    for name in stages.stage_names():
        command = REPRO.get_command(None, stages.verb_of(name))
        for each in (command, *(getattr(command, "commands", None) or {}).values()):
            known |= set(options_of(each))
    named = {span.split()[0].partition("=")[0] for span in spans(page) if span.startswith("--")}
    assert named <= known


@each_page
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    by_hand = re.sub(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", "", text, flags=re.S)
    for target, _, anchor in re.findall(r"\]\((?!http)([^)#\s]*)(#([^)\s]*))?\)", by_hand):
        file = (page.parent / target) if target else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], anchor
    for path in re.findall(r"(?<![\w/<>.-])(?:repro|kernels|stages|tests|docs|profiles)/[\w/-]+\.(?:py|yaml|md)", text):
        assert (ROOT / path).exists() or EXAMPLES.fullmatch(path), path


def test_the_examples_of_params_are_valid():
    own = yaml.safe_load(fenced("data.md", "yaml")[0])
    build(PrepareData, own["prepare_data"]["pets"], "prepare_data.pets")
    params = build(ClassifierParams, own["pretrain"]["vittt_tiny_pets"], "pretrain.vittt_tiny_pets")
    assert params.init is not None and params.data in own["runtime"]["data_roots"]
    assert (ROOT / f"results/golden/{params.family}.json").is_file(), "dvc.yaml reads it from each cell"
    own = yaml.safe_load(fenced("training.md", "yaml")[0])
    build(PrepareData, own["prepare_data"]["pets_latents"], "prepare_data.pets_latents")
    params = build(GenerateParams, own["generate"]["dit3_small_patch2_pets"], "generate.dit3_small_patch2_pets")
    assert params.transform.shape == (4, 32, 32) and params.data in own["runtime"]["data_roots"]
    assert (ROOT / f"results/golden/{params.family}.json").is_file()


def test_an_override_that_is_shown_changes_its_value_to_a_valid_one(tmp_path):
    """DVC drops an override of a mapping that cells share by an anchor; its queue takes each of several values."""
    shown = [word for page in PAGES for words in commands(page) if words[0] == "dvc" for word in words if "=" in word]
    known = load_yaml(ROOT / "params.yaml")["pretrain"]
    given = [each for each in shown if each.split(".")[1] in known]
    overrides = [
        one for each in given for sweep in get_hydra_sweeps({"params.yaml": [each]}) for one in sweep["params.yaml"]
    ]
    assert len(overrides) > len(given) > 0
    for override in overrides:
        params = tmp_path / "params.yaml"
        shutil.copy(ROOT / "params.yaml", params)
        apply_overrides(params, [override])
        section, cell, _ = override.split(".", 2)
        changed = load_section(ClassifierParams, params, section, cell)
        assert changed != load_section(ClassifierParams, ROOT / "params.yaml", section, cell), override


def test_the_example_of_a_paper_loads(tmp_path):
    shutil.copytree(ROOT / "repro", tmp_path / "repro", ignore=shutil.ignore_patterns("__pycache__"))
    room = tmp_path / "repro/papers/deit"
    room.mkdir()
    (room / "__init__.py").write_text('"""DeiT."""\n')
    for name, text in zip(("ledger", "paper"), fenced("extending.md", "yaml")[-2:], strict=True):
        (room / f"{name}.yaml").write_text(text)
    (room / "paper.py").write_text(fenced("extending.md", "python")[-1])
    code = "from repro.papers import load_papers; print(*load_papers()['deit'].ledger.entries)"
    done = run_python("-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*(f"table1.deit_{size}.params_m" for size in "tsb"), "text.abstract.top1_b"]


def test_the_examples_of_inner_loops_run():
    for code in fenced("inner_loops.md", "python"):
        exec(code, {})


README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_page_turns_pascal_voc_into_boxes(tmp_path, monkeypatch):
    """Corners count from 1 and are inside; a picture's size is its own, and its name that of the annotation's file."""
    boxes = {"a": [("cat", 1, 1, 10, 20)], "b": [("dog", 5, 6, 5, 9), (" cat ", 40.5, 2, 64, 48)], "c": []}
    for folder in ("Annotations", "JPEGImages"):
        (tmp_path / "voc" / folder).mkdir(parents=True)
    for stem, of_picture in boxes.items():
        Image.new("RGB", (64, 48)).save(tmp_path / f"voc/JPEGImages/{stem}.jpg")
        keys = ("xmin", "ymin", "xmax", "ymax")
        objects = "".join(
            f"<object><name>{name}</name><bndbox>{''.join(f'<{k}>{v}</{k}>' for k, v in zip(keys, box))}</bndbox></object>"
            for name, *box in of_picture
        )
        text = f"<annotation><filename>x</filename><size><width>0</width></size>{objects}</annotation>"
        (tmp_path / f"voc/Annotations/{stem}.xml").write_text(text)
    monkeypatch.chdir(tmp_path)
    exec(fenced("data.md", "python")[0], {})
    val, train = (read_instances(tmp_path / "rooms", split, boxes_as_masks=True) for split in ("val", "train"))
    assert val.boxes.tolist() == [[0, 0, 10, 20]] and train.boxes.tolist() == [[4, 5, 5, 9], [39.5, 1, 64, 48]]
    assert val.classes == train.classes == ("cat", "dog") and train.labels.tolist() == [2, 1]
    assert [name.decode() for name in train.names] == ["b.jpg", "c.jpg"]


def test_the_python_of_the_readme_runs():
    names = {}
    exec(fenced(ROOT / "README.md", "python")[0], names)
    model, pyramid, variant = (names[name] for name in ("model", "pyramid", "variant"))
    assert type(model).__name__ == "Vittt" and len(pyramid.feature_info.channels()) == 4
    assert (variant.design, variant.pool, variant.chunk_size, variant.w0) == ("dual", "head", 32, "shared")


def test_the_readme_is_short_and_leads_to_every_paper_and_to_the_documentation():
    files = {paper.page for paper in load_papers().values()} | {"docs/README.md"}
    assert all((ROOT / file).is_file() and f"]({file})" in README for file in files)
    assert len(re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", README, flags=re.S).split()) <= 600


def test_the_blocks_of_the_readme_are_those_that_code_writes():
    blocks = dict(re.findall(r"<!-- (\w+) -->\n(.*?)\n<!-- /\1 -->", README, re.S))
    assert set(blocks) == {"claims", "verdict", "picture", "run", "papers", "verbs"}
    assert blocks["verbs"] == describe_verbs(), "put describe_verbs() between the markers"


def test_a_verb_is_in_the_help_and_on_the_page_unless_dvc_alone_calls_it():
    said, page = CliRunner().invoke(app, ["--help"]).output, describe_verbs()
    for name in stages.stage_names():
        word, stage = stages.verb_of(name), stages.load_stages()[name]
        listed = bool(re.search(rf"^\W+{word} ", said, re.M))
        assert listed == (f"`{word}`" in page) == (not stage.hidden), word
        assert CliRunner().invoke(app, [word, "--help"]).exit_code == 0, word


def test_what_the_installation_needs_is_what_it_checks():
    need_gb = re.search(r"^NEED_GB := (\d+)$", (ROOT / "Makefile").read_text(), re.M)[1]
    python = re.search(r'^requires-python = ">=([\d.]+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert f"{need_gb} GB of disk" in README and f"Python {python} or newer" in README


def test_the_pages_are_in_the_index_and_short_together():
    pages = sorted((ROOT / "docs").glob("*.md"))
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    assert [page.name for page in pages if page.name != "README.md" and f"]({page.name})" not in index] == []
    generated = re.compile(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", re.S)
    texts = [generated.sub("", page.read_text(encoding="utf-8")) for page in pages]
    assert sum(len(text.split()) for text in texts) <= 13_000


def arrows() -> dict[str, set[str]]:
    """The diagram of imports in docs/architecture.md: room -> the rooms it points to.

    `graph` and `end` are keywords of Mermaid, with which nothing is drawn; a node `NAME_py` is the room NAME.
    """
    diagram = next(code for code in fenced("architecture.md", "mermaid") if code.startswith("flowchart TD"))
    found: dict[str, set[str]] = {}
    pairs = re.findall(r'^ *(\w+)(?:\["[^"]*"\])? --> (\w+)', diagram, re.M)
    assert not {"graph", "end"} & {name for pair in pairs for name in pair}
    for source, target in ((name.removesuffix("_py") for name in pair) for pair in pairs):
        found.setdefault(source, set()).add(target)
        found.setdefault(target, set())
    return found


def test_imports_follow_the_diagram():
    """A room may import what it reaches along arrows."""
    graph, allowed = arrows(), {}
    for room in graphlib.TopologicalSorter(graph).static_order():  # an error where the diagram has a cycle
        allowed[room] = {room}.union(*(allowed[target] for target in graph[room]))

    def room_of(module: str) -> str:
        return module.removeprefix("repro.").split(".")[0]

    imports = {name: targets - {"repro"} for name, targets in import_graph().items() if name != "repro.__main__"}
    for name, targets in imports.items():
        for target in targets:
            assert room_of(target) in allowed[room_of(name)], f"{name} imports {target}"
    assert set(map(room_of, imports)) - {"repro"} == set(graph)


# pages that speak of results; a number in their prose stands between markers, where code writes it, or is one of these
PAGES_WITH_RESULTS = [ROOT / "README.md", ROOT / "results/speed.md"]
ALLOWED = {
    r"Python \d\.\d+": "a version, equal to pyproject.toml's",
    r"\d+ GB of disk": "what the installation needs, equal to the Makefile's",
    r"D = 64 and chunk 16|16 states|192 channels|heads of 32": "sizes of the paper's models, whose kernels were compiled",
}


def find_typed_numbers(text: str) -> list[tuple[int, str]]:
    """(line, number) of each number in the prose of a page: outside generated blocks, code, links' targets and names,
    but `ALLOWED`.

    A number may be broken over two lines from its unit, so that line breaks count as spaces.
    """

    def blank(match: re.Match) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    for hidden in (r"<!-- ([\w ]+) -->\n.*?<!-- /\1 -->", r"^```.*?^```$", r"`[^`]*`", r"\]\([^)]*\)"):
        text = re.sub(hidden, blank, text, flags=re.S | re.M)
    for allowed in ALLOWED:
        text = re.sub(allowed.replace(" ", r"\s+"), blank, text)
    # items of a list; names: ImageNet-1K, sm_80, Apache-2.0
    text = re.sub(r"^\d+\. |[A-Za-z][\w-]*\d\S*", blank, text, flags=re.M)
    return [(text.count("\n", 0, match.start()) + 1, match[0]) for match in re.finditer(r"\d[\d.,]*\d|\d", text)]


def test_typed_numbers_are_found_where_they_stand():
    page = """# Results of 3 runs

<!-- results -->
| 97.5 % |
<!-- /results -->
1. As the text says, `b = 16` takes 10 GB
of disk; ImageNet-1K has [more](docs/5.md): 1,281,167 images, and 97.5 % are right.

```
repro pretrain --epochs 7
```
A chunk of 16, or 16 states.
"""
    assert find_typed_numbers(page) == [(1, "3"), (7, "1,281,167"), (7, "97.5"), (12, "16")]


def test_no_number_of_a_result_is_typed_by_hand():
    found = [
        f"{page.relative_to(ROOT).as_posix()}, line {line}: {number}"
        for page in PAGES_WITH_RESULTS
        for line, number in find_typed_numbers(page.read_text(encoding="utf-8"))
    ]
    assert not found, found


def test_every_number_that_is_allowed_is_there():
    """A list that only grows would in the end allow everything."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES_WITH_RESULTS)
    assert not [allowed for allowed in ALLOWED if not re.search(allowed.replace(" ", r"\s+"), text)]
