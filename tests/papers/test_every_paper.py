"""What holds of every paper: its variants are judged by one rule, and they depend on no report."""

import json
import subprocess
import sys

import pytest

from repro.models.registry import build_model
from repro.papers import find_packages, load_papers
from repro.report.ledger import load_ledger
from repro.report.pages import build_document
from repro.report.results import Results
from repro.report.variants import find_groups, find_orders, judge_group
from stages import stage_names, verb_of
from tests.conftest import ROOT, run_python
from tests.imports import import_closure
from tests.papers.conftest import load_variants, read_key
from tests.report.conftest import JUDGE, SCORES
from tests.slow import first

# package -> the suite on digits whose variants share a recipe
SUITES = {
    "vision_ttt": "ablate/{variant}_digits_7s",
    "kv_binding": "ablate/kv_{variant}_digits_5s",
    "linearize": "ablate_linearize/t5_{variant}_digits_5s",
    "vit3": "ablate/study_{variant}_digits_5s",
}
FROZEN = {"freeze": True, "init": {"weights": "w", "weights_hash": "ab"}}
# package, table, model, its variants from the paper's worst to its best, how many pairs are ordered, further metrics
STUDY, T5, LACT = "study_nano_patch4_32", "t5_nano_patch4_32", "lact_nano_patch4_32"
NORMS = ["norm_none", "no_mean", "layer", "rms", "no_std", "dwc_qk"]
INNER = [f"{name}_frozen" for name in ("projqk", "gate", "2layer", "3layer", "swiglu")]
STEPS = [f"lact_{step}" for step in ("own", "v2", "v3", "v4", "v5", "v6", "v1")]
ORDERED = [
    ("vit3", "Table 1", STUDY, ["mae", "smooth_l1", "rmse", "mlp", "mse"], 10, {}),
    ("linearize", "Table 2", T5, NORMS, 11, {}),
    ("linearize", "Table 1, frozen", T5, INNER, 10, FROZEN),
    ("kv_binding", "Table 2, LaCT", LACT, STEPS, 6, {}),
]


# copied from the papers' texts by another hand: all numbers of a row, or the last ones of a column
PRINTED = """
linearize table1_softmax.softmax 1.25 72.05
linearize table1.new_params_m 0 0.3 0.3 0.3 0.5 0.5
linearize table1.macs_g 1.13 1.19 1.25 1.25 1.37 1.34
linearize table1.top1_percent 63.30 66.23 67.59 68.14 68.93 69.25
linearize table1_frozen.top1_percent 3.71 24.39 61.95 65.98 67.09 67.33
linearize table2.top1_percent 0.37 57.38 57.25 71.19 71.15 51.43
linearize table3.macs_g 1.34 1.34 1.34 1.34
linearize table3.top1_percent 69.25 69.64 70.47 71.19
linearize table3_nat.macs_g 1.36 1.39
linearize table3_nat.top1_percent 71.67 72.06
vit3 table1.rmse 23.5 4.63 1269 78.8
vit3 table2.e4_n1 23.5 5.27 659 57.0
vit3 table3.top1_percent 77.5 78.1 78.7 78.9 78.9 76.7 76.9 78.7
vit3 table4.dwconv 22.9 4.25 1366 80.1
vit3 table5.h_vit3_b 94 16.7 84.9
vit3 table7.vit3_s 24 4.8 81.6
vit3 table8_1x.h_vit3_s 349 49.1 71.5 53.7 44.1 68.4 47.4
vit3 table8_3x.h_vit3_b 510 51.0 72.1 55.9 45.3 69.3 49.1
vit3 table9.h_vit3_b 124 1195 51.7
vit3 table10.dit3_b_2 134 23.35 39.31 36.99 0.51 0.62
kv_binding table1.top1_percent 79.34 79.61 79.18
kv_binding table1.perplexity 16.43 16.19 16.18
kv_binding table2.top1_percent 79.63 79.63 79.39 79.39 79.39 79.54
kv_binding table2_recurrent.tokens_m_per_s 10.60 11.02 12.95 13.31 14.40 89.67
kv_binding table2_parallel.tokens_m_per_s 30.18 49.69 53.99 57.28 124.6
"""
# package -> variants, those that differ in their options, and how many pairs each table orders
VARIANTS = {
    "vision_ttt": (17, 17, [15, 10, 5, 3]),
    "kv_binding": (26, 15, [3, 3, 6]),
    "linearize": (21, 16, [15, 10, 11, 15]),
    "vit3": (31, 31, [10, 6, 6, 9, 6, 5, 3, 8, 5]),
}
BUILT = [(package, name) for package in ("vit3", "linearize") for name in load_papers()[package].variants]


def test_packages_are_found_by_lying_there_and_load_nothing_heavy():
    assert list(load_papers()) == ["vision_ttt", "kv_binding", "linearize", "vit3"]
    assert find_packages() == ["kv_binding", "linearize", "vision_ttt", "vit3"]
    heavy = "{'torch', 'timm', 'pandas', 'matplotlib', 'scipy', 'numpy'}"
    code = f"import sys; from repro.papers import load_papers; load_papers(); assert not {heavy} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("line", PRINTED.strip().splitlines(), ids=lambda line: " ".join(line.split()[:2]))
def test_numbers_of_the_ledgers_are_those_of_the_texts(line):
    package, where, *printed = line.split()
    name, key = where.split(".")
    table = load_papers()[package].ledger.table(name)
    row = table.records.get(key)
    values = [row[column] for column in table.columns] if row else [each[key] for each in table.records.values()]
    assert values[-len(printed) :] == printed


@pytest.mark.parametrize("package", load_papers())
def test_the_variants_and_their_orders_are_those_of_the_tables(package):
    """A row of the ledger asks for the model of its variant, and no order is against the printed numbers."""
    paper = load_papers()[package]
    options = {name: params.options for name, params in load_variants(paper, SUITES[package]).items()}
    orders = {
        table.place: [*find_orders(table, paper.ledger), *(pair[::-1] for pair in table.margins)]
        for table in paper.compared
    }
    different = {json.dumps(each, sort_keys=True) for each in options.values()}
    assert options.keys() == set(paper.variants)
    assert (len(options), len(different), [len(pairs) for pairs in orders.values()]) == VARIANTS[package]
    for where in paper.compared:
        place, pairs = where.place, orders[where.place]
        table_rows = {name: row for name, row in where.rows.items() if row}
        for name, row in table_rows.items():
            table, _, key = row.partition(".")
            if model := paper.ledger.table(table).records[key]["model"]:
                assert read_key(model)[1] == options[name], (place, name)
        for pair in pairs:
            known = [paper.ledger.entries[f"{table_rows[name]}.top1_percent"] for name in pair if name in table_rows]
            printed = [float(entry.printed) for entry in known]
            assert len(printed) < 2 or printed[0] > printed[1], (place, pair)


@pytest.mark.parametrize(("package", "name"), first(BUILT, 3))
def test_every_variant_is_a_model_at_the_recipe_of_its_suite(package, name):
    params = load_variants(load_papers()[package], SUITES[package])[name]
    model = build_model(params.model, num_classes=10, img_size=params.transform.image_size, **params.options)
    assert params.data == "digits" and model.grid_size == (8, 8)


@pytest.mark.parametrize(
    ("package", "formula", "arguments"),
    [
        ("kv_binding", "identity_error", ("eq5",)),
        ("kv_binding", "theorem_error", ("eq5",)),
        ("kv_binding", "lact_error", ("eq5",)),
        ("kv_binding", "momentum_error", (4, "eq5")),
        ("linearize", "identity_error", ("eq5",)),
        ("vision_ttt", "vittt_design_g", ("eq5",)),
        ("vit3", "identity_error", ("eq5",)),
    ],
)
def test_formulas_refuse_a_name_that_is_none(package, formula, arguments):
    with pytest.raises(ValueError, match="'eq5': no .*; they are "):
        load_papers()[package].formulas()[formula](*arguments)


@pytest.mark.parametrize(
    ("package", "place", "model", "ordered", "pairs", "more"), ORDERED, ids=lambda each: str(each)[:20]
)
def test_trained_variants_are_judged_by_one_rule(checkout, package, place, model, ordered, pairs, more):
    """Three seeds whose accuracies are in the paper's order, four points apart."""
    paper = load_papers()[package]
    variants = load_variants(paper, SUITES[package])
    for rank, name in enumerate(ordered):
        about = {"options": variants[name].options, "image_size": 32, "epochs": 8, "macs_g": 1.0, **more}
        record = f"replications/cpu/{SUITES[package].format(variant=name)}"
        top1 = tuple(60 + 4 * rank + noise for noise in (0.0, 0.1, 0.2))
        checkout.train(record, model, "digits", held_out_images=100_000, top1=top1, **about)
    results = Results(checkout.paths, [checkout.paper, paper], SCORES)
    (group,) = find_groups(results, paper)
    where = next(table for table in paper.compared if table.place == place)
    found = judge_group(group, where, paper.ledger)
    assert set(group.variants) == set(ordered)
    assert (found.word, len(found.pairs), found.tau) == ("ordering seen", pairs, 1.0)
    page = build_document(JUDGE(paper, results))
    assert "**ordering seen**" in page and page.startswith(f"# {paper.name}: ")
    # they are no variants of Vittt
    assert not [each for each in find_groups(results, checkout.paper) if len(each.variants) > 1]


def test_every_accuracy_of_a_model_that_is_built_names_its_command(checkout):
    """But for linear attention with nothing new to train."""
    papers = load_papers()
    checkout.write("profiles/paper.yaml", (ROOT / "profiles" / "paper.yaml").read_text(encoding="utf-8"))
    results = Results(checkout.paths, papers.values(), {**SCORES, "linearize": SCORES["pretrain"]})
    judged = [verdict for paper in papers.values() for verdict in JUDGE(paper, results).all]
    commands = [each.command for each in judged if (each.command or "").startswith("repro ")]
    assert {command.split()[1] for command in commands} <= set(map(verb_of, stage_names()))
    asked = [each for each in judged if each.entry.ours and any(c.name == "accuracy" for c in each.entry.ours.calls)]
    without = [each.entry.id for each in asked if not each.command.startswith("repro ")]
    assert len(asked) > 300 and without == ["table1_frozen.linear.top1_percent"]


def test_an_answer_to_what_is_no_entry_is_refused(tmp_path):
    file = tmp_path / "ledger.yaml"
    file.write_text("paper: {title: A, version: B}\nerrata: {as_of: 2026-01-02, answers: {table9: yes}}\n")
    with pytest.raises(ValueError, match="table9"):
        load_ledger(file)


@pytest.mark.parametrize("module", ["stages.ablate", *(f"repro.papers.{package}.recipe" for package in load_papers())])
def test_what_a_stage_trains_depends_on_no_report(module):
    assert not [file for file in import_closure(ROOT, [module]) if "repro/report" in file]


def test_a_training_imports_no_report_to_print_its_recipe():
    """For every family of the default run; the modules of the report are looked for in the process itself."""
    code = """
import sys
from pathlib import Path
from repro.core.config import load_section, section_keys
from repro.papers import describe_recipe
from repro.tasks.classification.params import ClassifierParams

file = Path("params.yaml")
facts = {"world_size": 1, "accumulate": 1, "device": "cpu", "dtype": "fp32", "backend": "torch", "train_images": 9}
for cell in section_keys(file, "pretrain"):
    params = load_section(ClassifierParams, file, "pretrain", cell)
    recipe, lines = describe_recipe(params, facts | {"micro_batch": params.batch_size})
    assert recipe["recipe"] and lines
print(*[name for name in sys.modules if name.startswith(("repro.report", "repro.bench"))])
"""
    done = run_python("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
