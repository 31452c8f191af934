"""The search behind the paper's FLOPs: its rows are the ledger's, its counts are those of the models, and its best are the best."""

import csv
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from repro.measure.adapted import adapted_cost
from repro.measure.flops import cost
from repro.papers import load_primary
from repro.papers.vision_ttt import flop_search
from repro.papers.vision_ttt.flop_search import ADDED, AS_WRITTEN, BASELINE, CHAINED, Counter, count_hypothesis, list_rows
from repro.papers.vision_ttt.formulas import vit_g, vittt_g
from repro.report.arithmetic import agreement, saved

ROOT = Path(__file__).parents[3]
LEDGER = load_primary().ledger


@pytest.fixture(scope="module")
def counter() -> Counter:
    return Counter(list_rows())


def place(choices: dict[str, str]) -> tuple:
    """Where a hypothesis lies that departs from Eq. 13 by these choices."""
    parts = [[options.index(choices.get(term, options[0])) for term, options in terms.items()] for terms in (CHAINED, BASELINE, ADDED)]
    return tuple(parts[0]), tuple(parts[1]), int(np.ravel_multi_index(parts[2], [len(options) for options in ADDED.values()]))


def count(counter: Counter, choices: dict[str, str]) -> dict[str, float]:
    return dict(zip((row.entry for row in counter.rows), count_hypothesis(counter, place(choices)), strict=True))


def test_the_rows_are_the_ledgers(counter):
    question = next(each for each in load_primary().questions if "FLOPs" in each.label)
    assert sorted(row.entry for row in counter.rows) == sorted(question.find(LEDGER))
    assert all(row.printed == LEDGER.entries[row.entry].printed for row in counter.rows)
    for design, printed in flop_search.TABLE3_PARAMS_M.items():
        assert LEDGER.entries[f"table3.{design}.params_m"].printed == printed


def test_eq_13_as_it_is_written(counter):
    found = count(counter, {})
    assert place({}) == AS_WRITTEN
    for size, width in (("t", 192), ("s", 384), ("b", 768)):
        assert found[f"table1.vittt_{size}.macs_g"] == pytest.approx(float(vittt_g(width, 196)), rel=1e-15)
        assert found[f"text.5_3.flops_saved_1280_{size}"] == pytest.approx(
            float(saved(vittt_g(width, 6400), vit_g(width, 6401))), rel=1e-14
        )


OURS = dict.fromkeys(("Conv1d", "DWConv", "learning rate"), "counted") | {"last chunk": "its own length"}


def test_our_own_convention_is_one_of_the_hypotheses(counter):
    """Every row of Tables 1, 3 and 4 as the models count themselves."""
    found = count(counter, OURS)
    for table in ("table1", "table3", "table4"):
        for name, record in LEDGER.table(table).records.items():
            if f"{table}.{name}.macs_g" in found:
                model, _, options = record["model"].partition("[")
                options = dict(re.findall(r"(\w+)=(\w+)", options))
                assert found[f"{table}.{name}.macs_g"] == pytest.approx(cost(model, options, (224, 224)).macs_g, rel=1e-14)


def test_our_own_savings_are_one_of_the_hypotheses(counter):
    found = count(counter, OURS)
    for size, name in (("t", "tiny"), ("s", "small"), ("b", "base")):
        ours, baseline = (cost(f"{family}_{name}_patch16_224", {}, (1280, 1280)).macs for family in ("vittt", "deit"))
        assert found[f"text.5_3.flops_saved_1280_{size}"] == pytest.approx(100 * (1 - ours / baseline), rel=1e-12)


def test_the_papers_convention_with_adapters_is_one_of_the_hypotheses(counter):
    """Module hooks count 2 per value of a LayerNorm, and of the biases that of the patch convolution alone."""
    found = count(counter, OURS | {"norms": "outer + post, 2 per value"})
    for row in counter.rows:
        if row.adapter is not None:
            image_size, size = ((800, 1344), (512, 512))["right" in row.table], row.entry.partition("vittt_")[2][0]
            whole = adapted_cost(flop_search.MODELS[size], image_size).macs_g_paper_convention
            assert found[row.entry] + row.patches * row.width / 1e9 == pytest.approx(whole, rel=1e-14)


# what each choice adds to Vittt-T at 224x224, by hand: 12 layers, 196 tokens, D = 192, d = 64, b = 16, 2 directions
LAYER = 12 * 196 * 192
BY_HAND = {
    ("tokens", "T + 1"): 12 * (6 * 36_864 + 6 * 192 * 64 + 4 * 16 * 192 + 294_912),
    ("last chunk", "its own length"): 12 * 2 * 2 * 192 * (12 * 256 + 16 - 196 * 16),
    ("last chunk", "filled up to b"): 12 * 2 * 12 * (3 * 192 * 64 + 2 * 16 * 192),
    ("products d x d", "two"): -2 * LAYER * 64,
    ("products d x d", "none"): -6 * LAYER * 64,
    ("products b x b", "one in full"): -2 * LAYER * 16,
    ("products b x b", "half of one"): -3 * LAYER * 16,
    ("products b x b", "none"): -4 * LAYER * 16,
    ("products b x b", "triangles of both"): 4 * LAYER * 17 // 2 - 4 * LAYER * 16,
    ("products b x b", "triangle of one"): 2 * LAYER * 17 // 2 - 4 * LAYER * 16,
    ("patch convolution", "left out"): -196 * 768 * 192,
    ("head", "left out"): -192_000,
    ("Conv1d", "counted"): 2 * 2 * 4 * LAYER,
    ("Conv1d", "with bias"): 2 * 2 * 5 * LAYER,
    ("DWConv", "counted"): 9 * LAYER,
    ("learning rate", "counted"): 3 * LAYER,
    ("inner bias", "counted"): 2 * 3 * LAYER,
    ("norms", "outer, 1 per value"): 25 * 196 * 192,
    ("norms", "post, 2 per value"): 2 * LAYER,
    ("norms", "inner, 5 per value"): 5 * 4 * LAYER,
    ("norms", "outer + post + inner, 5 per value"): 5 * (25 * 196 * 192 + 5 * LAYER),
    ("gate", "once"): LAYER,
    ("gate", "per direction"): 2 * LAYER,
    ("sum of directions", "counted"): LAYER,
    ("biases", "counted"): 196 * 192 + 12 * 196 * (2 * 512 + 192) + 1000,
}


@pytest.mark.parametrize(("term", "choice"), BY_HAND, ids=lambda each: each)
def test_a_choice_adds_what_it_adds_by_hand(counter, term, choice):
    entry = "table1.vittt_t.macs_g"
    added = count(counter, {term: choice})[entry] - count(counter, {})[entry]
    assert round(added * 1e9) == BY_HAND[term, choice]


def test_class_tokens_and_deit_by_hand(counter):
    left_out = count(counter, {"class tokens": "left out"})
    assert left_out["table4.double.macs_g"] == left_out["table4.mean.macs_g"] == count(counter, {})["table1.vittt_t.macs_g"]
    found = count(counter, {"DeiT's tokens": "T", "DeiT's softmax": "5 per score"})["text.1.flops_saved_1280_t"]
    # DeiT-T at 6400 tokens: Eq. 13, MLP, patch convolution, head, and 5 for each of 3·6400² scores in 12 layers
    deit = 12 * (12 * 6400 * 36_864 + 2 * 6400**2 * 192) + 6400 * 768 * 192 + 192_000 + 5 * 12 * 3 * 6400**2
    assert found == pytest.approx(100 * (1 - float(vittt_g(192, 6400)) * 1e9 / deit), rel=1e-14)


def test_every_width_makes_the_three_readings_of_swiglu_one_number():
    for width in flop_search.WIDTHS.values():
        assert 3 * width * (8 * width // 3) == 8 * width**2 == 2 * width * 4 * width and 8 * width % 3 == 0


def test_the_first_designs_lack_what_comes_later(counter):
    plain = count(counter, {})
    for term, choice, designs in (
        ("gate", "per direction", {"ttt_layer", "share_qk"}),
        ("Conv1d", "counted", {"ttt_layer", "share_qk"}),
        ("sum of directions", "counted", {"ttt_layer", "share_qk", "gating", "conv1d"}),
        ("DWConv", "counted", {"ttt_layer", "share_qk", "gating", "conv1d", "dual"}),
    ):
        found = count(counter, {term: choice})
        same = {name.split(".")[1] for name, value in found.items() if name.startswith("table3.") and value == plain[name]}
        assert same == designs


@pytest.fixture(scope="module")
def searched(counter) -> tuple[dict, list, list]:
    """The record and the best hypotheses of a search in three frames, and these."""
    frames = [(0, 0, 0, 0, 0), (1, 0, 2, 0, 1), (0, 1, 1, 0, 4)]
    return *flop_search.run_flop_search(frames), frames


def test_the_search_tries_all_and_counts_as_agreement_does(searched, counter):
    record, kept, frames = searched
    sizes = [len(options) for options in (*ADDED.values(), *BASELINE.values())]
    assert record["entries"] == 25 and record["hypotheses"] == len(frames) * int(np.prod(sizes))
    best = record["best"]["either"]
    agreeing = [row for row in best["rows"] if agreement(row["computed"], row["printed"])]
    assert len(agreeing) == best["explained"] == kept[0]["by_either"] == max(row["by_either"] for row in kept)
    assert [row["entry"] for row in best["rows"] if row["off_by"]] == [row["entry"] for row in best["rows"] if row["agreement"] == "none"]
    by_rounding = record["best"]["rounding"]
    assert sum(row["agreement"] == "rounding" for row in by_rounding["rows"]) == by_rounding["explained"] <= best["explained"]
    assert len(kept) == flop_search.KEPT
    assert kept == sorted(kept, key=lambda row: (-row["by_either"], -row["by_rounding"], row["departures"]))


def test_no_hypothesis_of_a_sample_is_better(searched, counter):
    record, _, frames = searched
    random, most = np.random.default_rng(0), np.prod([len(options) for options in ADDED.values()])
    baselines = list(itertools.product(range(2), range(3)))
    for _ in range(200):
        at = frames[random.integers(len(frames))], baselines[random.integers(len(baselines))], int(random.integers(most))
        found = [agreement(float(value), row.printed) for value, row in zip(count_hypothesis(counter, at), counter.rows, strict=True)]
        assert len(found) - found.count(None) <= record["best"]["either"]["explained"]
        assert found.count("rounding") <= record["best"]["rounding"]["explained"]


def test_the_steps_of_table_3(counter):
    """A weight that meets all of 196 tokens is 196 multiply-adds."""
    steps = {step["step"]: step for step in flop_search.list_table3_steps(counter.rows)}
    assert steps["share_qk"]["weights_g"] == steps["share_qk"]["full_g"] == -12 * 36_864 * 196 / 1e9
    assert steps["share_qk"]["printed_g"] == [-0.08, -0.06] and steps["share_qk"]["printed_mixed_g"] == [-0.085, -0.055]
    assert steps["share_qk"]["printed_params_g"] == pytest.approx([-0.45 * 0.196, -0.43 * 0.196])
    # a back direction: 2D² + 8D + 3Dd per token, and 2D for each of 12·256 + 16 pairs
    dual = 12 * (196 * (2 * 36_864 + 8 * 192 + 3 * 192 * 64) + 2 * 192 * (12 * 256 + 16))
    assert steps["dual"]["full_g"] == pytest.approx(dual / 1e9, rel=1e-12)
    for flag, names in (
        ("impossible", {"share_qk", "conv2d"}),
        ("impossible_mixed", {"share_qk", "conv2d"}),
        ("impossible_by_table", {"share_qk", "conv2d"}),
        ("impossible_for_eq13", {"share_qk", "conv1d", "dual", "conv2d"}),
    ):
        assert {name for name, step in steps.items() if step[flag]} == names


def test_the_record_is_of_the_whole_search(counter):
    search = json.loads((ROOT / "results/theory/metrics.json").read_text())["metrics"]["flop_search"]
    sizes = [len(options) for options in (*CHAINED.values(), *ADDED.values(), *BASELINE.values())]
    assert search["hypotheses"] == int(np.prod(sizes)) and search["status"].startswith("fitted")
    for rule, best in search["best"].items():
        computed = list(count_hypothesis(counter, place(best["departures"])))
        assert [row["computed"] for row in best["rows"]] == pytest.approx(computed, rel=1e-9), rule
    with (ROOT / "results/theory/flop_terms.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == flop_search.KEPT and int(rows[0]["by_either"]) == search["best"]["either"]["explained"]
