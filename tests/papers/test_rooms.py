"""What holds in the room of every paper: its variants are judged by one rule, and they depend on no report."""

import dataclasses
import re
from pathlib import Path

import pytest

from repro.core.hashing import import_closure
from repro.papers import load_papers
from repro.report.comparison import list_errata
from repro.report.ledger import load_ledger
from repro.report.markdown import render_markdown
from repro.report.pages import build_document
from repro.report.results import Results
from repro.report.variants import find_groups, judge_group
from tests.report.conftest import JUDGE, SCORES

ROOT = Path(__file__).parents[2]
FROZEN = {"freeze": True, "init": {"weights": "w", "weights_hash": "ab"}}
# room, table, model, its variants from the paper's worst to its best, how many pairs are ordered, further metrics
LADDERS = [
    ("vit3", "Table 1", "study_nano_patch4_32", ["mae", "smooth_l1", "rmse", "mlp", "mse"], 10, {}),
    ("linearize", "Table 2", "t5_nano_patch4_32", ["norm_none", "no_mean", "layer", "rms", "no_std", "dwc_qk"], 11, {}),
    (
        "linearize",
        "Table 1, frozen",
        "t5_nano_patch4_32",
        ["projqk_frozen", "gate_frozen", "2layer_frozen", "3layer_frozen", "swiglu_frozen"],
        10,
        FROZEN,
    ),
    (
        "kv_binding",
        "Table 2, LaCT",
        "lact_nano_patch4_32",
        [f"lact_{step}" for step in ("own", "v2", "v3", "v4", "v5", "v6", "v1")],
        6,
        {},
    ),
]


@pytest.mark.parametrize(
    ("room", "place", "model", "ladder", "pairs", "more"), LADDERS, ids=lambda each: str(each)[:20]
)
def test_trained_variants_are_judged_by_one_rule(checkout, room, place, model, ladder, pairs, more):
    """Three seeds whose accuracies are in the paper's order, four points apart."""
    paper = load_papers()[room]
    for rank, name in enumerate(ladder):
        about = {"options": paper.variants.options[name], "image_size": 32, "epochs": 8, "macs_g": 1.0, **more}
        folder = f"measured/cpu/ablate/{room}/digits/{name}"
        top1 = tuple(60 + 4 * rank + noise for noise in (0.0, 0.1, 0.2))
        checkout.train(folder, model, "digits", held_out_images=100_000, top1=top1, **about)
    results = Results(checkout.paths, [checkout.paper, paper], SCORES)
    (group,) = find_groups(results, paper.variants)
    where = next(table for table in paper.compared if table.place == place)
    found = judge_group(group, where, paper.ledger)
    assert set(group.variants) == set(ladder)
    assert (found.word, len(found.pairs), found.tau) == ("ordering seen", pairs, 1.0)
    page = render_markdown(build_document(JUDGE(paper, results)))
    assert "**ordering seen**" in page and page.startswith(f"# {paper.name}: ")
    # they are no variants of Vittt
    assert not [each for each in find_groups(results, checkout.paper.variants) if len(each.variants) > 1]


def test_every_accuracy_of_a_model_that_is_built_names_its_command(checkout):
    """But for linear attention with nothing new to train."""
    papers = load_papers()
    checkout.write("profiles/paper.yaml", (ROOT / "profiles" / "paper.yaml").read_text(encoding="utf-8"))
    results = Results(checkout.paths, papers.values(), {**SCORES, "linearize": SCORES["pretrain"]})
    judged = [verdict for paper in papers.values() for verdict in JUDGE(paper, results).all]
    asked = [each for each in judged if each.entry.ours and any(c.name == "accuracy" for c in each.entry.ours.calls)]
    without = [each.entry.id for each in asked if not each.command.startswith("repro ")]
    assert len(asked) > 300 and without == ["table1_frozen.linear.top1_percent"]


def test_the_errata_have_every_contradiction_and_the_answer_to_it(checkout):
    paper = load_papers()["kv_binding"]
    name = next(claim.id for claim in paper.ledger.claims if claim.contradiction)
    text = paper.ledger_file.read_text(encoding="utf-8")
    dated = re.sub("(?m)^errata:.*", f"errata: {{as_of: 2026-01-02, answers: {{{name}: a misprint}}}}", text)
    file = checkout.write("answered.yaml", dated)
    report = JUDGE(dataclasses.replace(paper, ledger_file=file), Results(checkout.paths, [paper], SCORES))
    wrong = [each for each in report.all if each.entry.contradiction]
    page = render_markdown(list_errata([report]))
    rows = [line for line in page.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert len(wrong) > 5 and all(any(each.evidence in row for row in rows) for each in wrong)
    assert [row for row in rows if "a misprint" in row] == [row for row in rows if wrong[0].evidence in row]
    assert "2026-01-02" in page


def test_an_answer_to_what_is_no_entry_is_refused(tmp_path):
    file = tmp_path / "ledger.yaml"
    file.write_text("paper: {title: A, version: B}\nerrata: {as_of: 2026-01-02, answers: {table9: yes}}\n")
    with pytest.raises(ValueError, match="table9"):
        load_ledger(file)


@pytest.mark.parametrize("room", load_papers())
@pytest.mark.parametrize("module", ["variants", "recipe", "grid"])
def test_what_a_stage_trains_depends_on_no_report(room, module):
    assert not [file for file in import_closure(ROOT, [f"repro.papers.{room}.{module}"]) if "repro/report" in file]
