"""Templates of pages, passages that records give them, and tables of records."""

import re
import types

import jinja2
import pytest

from repro.report.dense import compare_without_learning
from repro.report.markdown import cross, number, picture, place_on_page, show_p, table
from repro.report.measured import list_spreads
from repro.report.pages import write_report
from repro.report.paper import list_functions
from repro.report.records import group_by, keep_best
from repro.report.results import Missing
from repro.report.template import render_template
from tests.conftest import ROOT

DETECTOR = {"ap_box_percent": 25.0, "ap50_box_percent": 40.0, "ap_mask_percent": 20.0, "ap50_mask_percent": 35.0}
PRINTED = '{{ printed("table1.vittt_t.top1_percent") }}'
REFERENCE = {"ap_box_percent": 25.5, "ap50_box_percent": 30.0, "ap_mask_percent": 20.5, "ap50_mask_percent": 30.0}
PAGES = sorted(file for folder in ("papers/*", "report") for file in ROOT.glob(f"repro/{folder}/*.md*"))
# digits that are part of a name: of a data set, a place in a paper, an architecture, a dtype, a GPU, an interval, an
# image size, an item of a list; and the settings of the registered trainings, which a test compares with their profile
NAMES = re.compile(
    r"ImageNet-1(?:K|00)|CIFAR-100?|cifar10|Top-1|ADE20K|(?:Table|Fig\.|Eq\.|Section|Insight) [\d.]*\d|[Cc]onv\dd|"
    r"\d×\d (?=convolution)|256×256|fp\d\d|bf16|[HL]\d+S?|95 %|(?:224|1280)²|^\d\. |after 6 epochs|on 32 pixels",
    re.MULTILINE,
)


def lack(report):
    raise Missing("no model is trained yet", "repro train")


PARTS = {
    "half": lambda report, value: value // 2,
    "rows": lambda report: table(["a"], [[7]]),
    "nothing": lambda report: "",
    "further": lambda report: "## Further\n\nmore",
    "lack": lack,
}


@pytest.fixture
def fill(checkout, tmp_path):
    def fill(text: str) -> str:
        file = tmp_path / "page.md"
        file.write_text(text, encoding="utf-8")
        return render_template(file, checkout.report(), PARTS)

    return fill


LACKED = "No model is trained yet: `repro train`."


@pytest.mark.parametrize(
    ("text", "page"),
    [
        (f"Two are {{{{ half(4) }}}}, {{{{ half(3000000) }}}}\nand {PRINTED}.", "Two are 2, 1,500,000 and 77.7."),
        # tables and sections take the place of their paragraph
        ("see\n\n{{ rows() }}\n\n{{ further() }}", "see\n\n| a |\n|---:|\n| 7 |\n\n## Further\n\nmore"),
        ("a\n\n## B\n\n- one\n  more\n- two", "a\n\n## B\n\n- one more\n- two"),
        ("a\n\n1. one\n2. two\n   more", "a\n\n1. one\n2. two more"),
        ("a\n\n{{ nothing() }}\n\n\n\nb", "a\n\nb"),
        ("a\n\n{% set found = nothing() %}\n{% if found %}\n## B\n\n{{ found }}\n{% endif %}\n\nb", "a\n\nb"),
        # a missing number leaves its reason and its command once
        ("kept\n\n{{ lack() }}\n\nIt is {{ lack() }} of {{ half(2) }}.", f"kept\n\n{LACKED}"),
        ("{{ lack() }}\n\nkept\n\n{{ lack() }}", f"{LACKED}\n\nkept\n\n{LACKED}"),
        ("- {{ half(2) }}\n- {{ lack() }}", LACKED),
        ("{% set found = lack() %}\n{% if found %}\n## B\n\n{{ found }}\n{% endif %}", f"## B\n\n{LACKED}"),
    ],
)
def test_a_template_is_filled_by_its_functions(fill, text, page):
    assert fill(f"# A\n\n{text}\n") == f"# A\n\n{page}\n"


@pytest.mark.parametrize("text", ["{{ half( }}", "{{ unknown() }}", "{{ unknown }}", "{% if unknown %}a{% endif %}"])
def test_a_mistake_in_a_page_is_an_error(fill, text):
    with pytest.raises(jinja2.TemplateError):
        fill(text)


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_no_number_is_typed_where_an_expression_could_give_it(file):
    text = re.sub(r"\{[{%].*?[%}]\}", "", file.read_text(encoding="utf-8"))
    assert re.findall(r".*\d.*", NAMES.sub("", text)) == []


def test_a_crossed_table_has_its_columns_in_order_and_says_where_nothing_is():
    cells = {("b", 64): 2.0, ("a", 8): 1.0, ("b", 8): None}
    crossed = cross("model", cells, lambda cell: number(cell, ".1f", " ms"))
    assert crossed.splitlines() == [
        "| model | 8² | 64² |",
        "|---|---:|---:|",
        "| b | – | 2.0 ms |",
        "| a | 1.0 ms | – |",
    ]


NUMBERS = ("+1,024.5", "78 %", "224²", "9.5e-01", "< 1e-12", "97.03 ± 0.70", "33.33 ms", "4 of 24", "**12**")
NUMBERS += ("50.1 [49.0, 51.2]", "13.5× (12.5 to 14.9)", "2.50× (one process)")
TEXTS = ("V6: one", "2 heads of 3", "`7`", "7 → 6.98 ✓", "800x1344", "3 trials")


@pytest.mark.parametrize(("cell", "right"), [*((each, True) for each in NUMBERS), *((each, False) for each in TEXTS)])
def test_a_column_of_numbers_is_aligned_to_the_right(cell, right):
    """Cells without a number count for neither."""
    rule = table(["a"], [[cell], ["–"], [""]]).splitlines()[1]
    assert rule == ("|---:|" if right else "|---|")


@pytest.mark.parametrize(
    ("text", "page", "placed"),
    [
        ("[a](README.md)", "results/tables.md", "[a](../README.md)"),
        ("[a](results/papers/a.md)", "results/papers/b.md", "[a](a.md)"),
        ("[a](#b) [c](https://d.org/e)", "docs/b.md", "[a](#b) [c](https://d.org/e)"),
        ("![a](results/c%20d.png)", "docs/deep/b.md", "![a](../../results/c%20d.png)"),
        ("p < 0.1, `<a>`", "README.md", "p < 0.1, `<a>`"),
        ("<!-- a --> <x@y.z>", "README.md", "&lt;!-- a --> &lt;x@y.z>"),
        ("`a` <b> `c`", "README.md", "`a` &lt;b> `c`"),
    ],
)
def test_links_lead_from_their_page_and_nothing_opens_a_tag(text, page, placed):
    assert place_on_page(text, page) == placed


def test_the_first_with_the_most_seeds_is_kept_of_each_name():
    listed = (("a", 1, 0), ("a", 3, 1), ("b", 2, 2), ("a", 3, 3), ("a", 2, 4))
    found = [types.SimpleNamespace(name=name, most_seeds=seeds, place=place) for name, seeds, place in listed]
    assert [each.place for each in keep_best(found, lambda each: each.name)] == [1, 2]
    assert list(group_by("bab", str.upper).items()) == [("B", ["b", "b"]), ("A", ["a"])]


def test_a_module_offers_what_it_defines_itself_and_names_in_public():
    module = types.ModuleType("made_up")
    exec("from math import sqrt\nLIMIT = 3\ndef shown(): ...\ndef _hidden(): ...", vars(module))
    assert list(list_functions(module)) == ["shown"]


def passage(build, checkout) -> str:
    return build(checkout.report())


def detector(checkout, path="detect/nano_scenes", **more):
    about = {"epochs": 7, "held_out_images": 100, "without_learning": REFERENCE}
    checkout.train(path, "nano", "scenes", **{**about, **DETECTOR, **more})


def test_the_report_writes_them_where_the_markers_are_and_nowhere_else(checkout):
    """Without a record a passage is one sentence with the command."""
    for file, passages in checkout.paper.passages.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        assert all(text.count(f"<!-- {name} -->\n") == text.count(f"<!-- /{name} -->\n") == 1 for name in passages)
    said = passage(list_spreads, checkout)
    assert "`repro efficiency`" in said and said.count(".") == said.count("\n") + 1 == 1
    checkout.speed({"model": "a"}, device=checkout.CPU)
    file = checkout.write("results/speed.md", "a\n<!-- spread -->\nold\n<!-- /spread -->\nb\n")
    other = checkout.write("docs/architecture.md", "c\n")
    write_report([checkout.paper], checkout.results(), with_html=False)
    said = passage(list_spreads, checkout)
    assert file.read_text(encoding="utf-8") == f"a\n<!-- spread -->\n{said}\n<!-- /spread -->\nb\n"
    assert other.read_text(encoding="utf-8") == "c\n" and "batch" in said


def test_a_picture_of_any_name_is_linked():
    assert picture("figures/a b.png", "a") == "![a](results/figures/a%20b.png)"


def test_a_run_is_ahead_or_behind_by_its_interval_and_one_seed_by_its_sign(checkout):
    detector(checkout)
    ends = {"ap_box": [24.0, 26.0], "ap50_box": [39.0, 41.0], "ap_mask": [19.0, 20.4], "ap50_mask": [34.0, 36.0]}
    intervals = {f"{name}_ci95_percent": interval for name, interval in ends.items()}
    seeds = [{"seed": seed} for seed in range(5)]
    path = "replications/cpu/detect/nano_scenes_5seeds"
    detector(checkout, path, init={"weights": "w"}, by_seed=seeds, **intervals)
    said = passage(compare_without_learning, checkout)
    ahead = "ahead of it in box AP50 (+10.0 points) and mask AP50 (+5.0 points); "
    one = "behind it in box AP (-0.5 points) and mask AP (-0.5 points)"
    several = "behind it in mask AP (-0.5 points); not separated from it in box AP (-0.5 points)"
    assert f"{ahead}{one} (one seed)." in said and f"{ahead}{several} (5 seeds)." in said
    row = "| `detect/nano_scenes` | random | 7 | 1 | 100 | 25.0 % | 40.0 % | 20.0 % | 35.0 % |"
    assert f"{row} {checkout.CPU}; the pipeline |" in said
    assert "| pretrained | 7 | 5 | 100 | 25.0 % [24.0, 26.0] |" in said and "outside the pipeline" in said
    assert said.count("| without learning | – | – | – | – | 25.5 % | 30.0 % | 20.5 % | 30.0 % | – |") == 1


def test_first_weights_are_compared_after_as_many_epochs(checkout):
    """30 points against 25 with ends that meet, and against 21 with ends that do not; one seed has no ends."""
    for epochs, random, ends in ((2, 21.0, [19.0, 23.0]), (8, 25.0, [22.0, 28.5])):
        for name, weights, score, interval in (("p", {"weights": "w"}, 30.0, [28.0, 32.0]), ("r", None, random, ends)):
            scores = {"epochs": epochs, "ap_box_percent": score, "ap_box_ci95_percent": interval, "init": weights}
            detector(checkout, f"replications/cpu/detect/nano_scenes_{name}{epochs}", **scores)
    detector(checkout, epochs=4)
    said = passage(compare_without_learning, checkout)
    assert (
        "`nano` after 2 epochs, one seed: +9.0 points of box AP" in said and "the 95 % intervals do not meet." in said
    )
    assert "`nano` after 8 epochs, one seed: +5.0 points of box AP" in said and "the 95 % intervals meet." in said
    assert "after 4 epochs" not in said


def test_first_weights_are_compared_for_one_model_with_its_options(checkout):
    """A dual model with pretrained weights is no pair with a Conv2d model without."""
    for name, design, weights, score in (("p", "dual", {"weights": "w"}, 30.0), ("r", "conv2d", None, 50.0)):
        scores = {"ap_box_percent": score, "ap_box_ci95_percent": [score - 1, score + 1], "init": weights}
        detector(checkout, f"replications/cpu/detect/nano_scenes_{name}", options={"design": design}, **scores)
    assert "by pretrained first weights" not in passage(compare_without_learning, checkout)


def test_runs_with_other_references_are_apart_and_classes_are_means_over_seeds(checkout):
    by_seed = [
        {"seed": 0, "class_iou_percent": {"sky": 90.0, "7": 0.0}},
        {"seed": 1, "class_iou_percent": {"sky": 80.0, "7": None, "7_reason": "not there"}},
    ]
    scores = {"miou_percent": 20.0, "aacc_percent": 80.0, "epochs": 3, "held_out_images": 100, "by_seed": by_seed}
    for name, reference in (("a", 22.0), ("b", 22.0), ("c", 23.0)):
        without = {"miou_percent": reference, "aacc_percent": 30.0}
        checkout.train(f"segment/{name}", "nano", "scenes", without_learning=without, **scores)
    said = passage(compare_without_learning, checkout)
    assert said.count("| segment, scenes |") == 2 and said.count("| without learning |") == 2
    assert "| IoU (%) by class | 7 | sky |" in said and "| `segment/a` | 0.0 | 85.0 |" in said


def test_how_far_processes_lie_apart_is_said_by_device(checkout):
    """10.5 / 9.5 is 11 % more, 12 / 8 is 50 %."""
    narrow, wide = {"model": "a", "ends": (0.95, 1.05)}, {"model": "b", "ends": (0.8, 1.2)}
    checkout.speed(narrow, wide, narrow | {"model": "c"}, device=checkout.H200)
    checkout.speed({**narrow, "batch_size": 1, "ends": None}, device=checkout.CPU, path="cpu")
    said = passage(list_spreads, checkout)
    assert f"| {checkout.H200}, batch 64, fp16, infer | 3 | 3 | 11 % | 50 % |" in said
    assert f"| {checkout.CPU}, batch 1, fp16, infer | 1 | 1 | – | – |" in said


@pytest.mark.parametrize(("p", "shown"), [(2e-5, "< 0.001"), (0.00099, "< 0.001"), (0.001, "0.001"), (0.0496, "0.050")])
def test_a_p_value_is_never_zero(p, shown):
    assert show_p(p) == shown
