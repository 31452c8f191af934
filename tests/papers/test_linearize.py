"""The room of T5: the ledger against the summary's text, the counts of its models, what it derives, its variants and
its recipe.
"""

import dataclasses
import functools
import json
import re
from pathlib import Path

import pytest
import torch

from repro.bench.flops import cost
from repro.bench.fvcore import fvcore_terms
from repro.core.config import build
from repro.models.registry import build_model
from repro.models.t5 import CHOICES
from repro.papers import describe_recipe, load_papers
from repro.papers.linearize import formulas
from repro.papers.linearize.recipe import RELEASED
from repro.papers.linearize.sections import weigh_inheritance
from repro.papers.variants import load_variants
from repro.report.markdown import render_blocks
from repro.report.results import Results
from repro.report.variants import find_orders, find_variant
from repro.tasks.classification.params import ClassifierParams
from tests.papers.conftest import find_statuses, judge_counts
from tests.report.conftest import JUDGE, SCORES

SET = load_variants("linearize")
VARIANTS, ROWS, ORDERS = SET.options, SET.rows, SET.orders
FROZEN = [name for name in VARIANTS if name.endswith("_frozen")]
ROOT = Path(__file__).parents[2]
PAPER = load_papers()["linearize"]
TINY = "t5_tiny_patch16_224"
INIT = {"weights": "results/pretrain/teacher/weights.safetensors", "weights_hash": "ab"}
# rows of the tables -> parameters by hand: 5,717,032 of a class-free DeiT-T; 147,456 for each matrix of d x d in its 12
# blocks of three heads; 23,040 for each depth-wise convolution of 3x3 with a bias
PARAMS = {
    "table1.linear": 5_717_032,
    "table1.projqk": 6_011_944,
    "table1.gate": 6_011_944,
    "table1.two_layers": 6_011_944,
    "table1.three_layers": 6_159_400,
    "table1.swiglu": 6_159_400,
    "table3.none": 6_159_400,
    "table3.cpe": 6_182_440,
    "table3.dwc_v": 6_182_440,
    "table3.dwc_qk": 6_205_480,
    "table3_nat.nat3": 6_205_480,
    "table3_nat.nat5": 6_205_480,
}


def model_of(row: str) -> str:
    """The model that the ledger asks for in a row."""
    table, _, key = row.partition(".")
    return PAPER.ledger.table(table).records[key]["model"]


def options_of(key: str) -> tuple[str, dict]:
    name, listed = re.fullmatch(r"(\w+)(?:\[(.*)\])?", key).groups()
    pairs = (pair.split("=") for pair in listed.split(",")) if listed else ()
    return name, {option: int(value) if value.isdigit() else value for option, value in pairs}


@functools.cache
def count_rows() -> dict[str, dict]:
    """The rows of `repro complexity` that the ledger asks for."""
    asked = {
        call.args[0]
        for entry in PAPER.ledger.entries.values()
        for call in (entry.ours.calls if entry.ours else ())
        if call.args and "@" in str(call.args[0])
    }
    rows = {}
    for key in sorted(asked):
        (name, options), side = options_of(key.partition("@")[0]), int(key.partition("@")[2])
        counted = cost(name, options, (side, side))
        rows[key] = {
            "model": name,
            "options": options,
            "image_size": [side, side],
            "method": "analytic",
            "num_params": counted.num_params,
            "macs_g": counted.macs_g,
            "macs_g_fvcore": sum(fvcore_terms(name, options, (side, side)).values()) / 1e9,
        }
    return rows


@pytest.fixture
def judged(checkout):
    return judge_counts(checkout, PAPER, count_rows())


def test_numbers_of_the_ledger_are_those_of_the_text():
    """Every table, copied from the text by another hand."""
    printed = {
        table.id: {row: [values[column] for column in table.columns] for row, values in table.records.items()}
        for table in PAPER.ledger.tables
    }
    assert printed["table1_softmax"] == {"softmax": ["1.25", "72.05"]}
    assert printed["table1"] == {
        "linear": ["0", "1.13", "63.30"],
        "projqk": ["0.3", "1.19", "66.23"],
        "gate": ["0.3", "1.25", "67.59"],
        "two_layers": ["0.3", "1.25", "68.14"],
        "three_layers": ["0.5", "1.37", "68.93"],
        "swiglu": ["0.5", "1.34", "69.25"],
    }
    assert [value for (value,) in printed["table1_frozen"].values()] == "3.71 24.39 61.95 65.98 67.09 67.33".split()
    assert [value for (value,) in printed["table2"].values()] == "0.37 57.38 57.25 71.19 71.15 51.43".split()
    assert [
        value for *_, value in (printed["table3"] | printed["table3_nat"]).values()
    ] == "69.25 69.64 70.47 71.19 71.67 72.06".split()
    assert [
        value for _, value, _ in (printed["table3"] | printed["table3_nat"]).values()
    ] == "1.34 1.34 1.34 1.34 1.36 1.39".split()


@pytest.mark.parametrize(("row", "params"), PARAMS.items())
def test_parameters_by_hand(row, params):
    name, options = options_of(model_of(row))
    assert (name, cost(name, options, (224, 224)).num_params) == (TINY, params)


def test_every_count_is_the_papers(judged):
    """Two windows of neighbourhood attention were fitted, and 0.44 M new parameters are printed as the difference of
    two rounded totals.
    """
    assert len(judged.verdicts) == len(PAPER.ledger.entries) == 101
    counts = {word: len(names) for word, names in find_statuses(judged, r"table.*\.(params_m|macs_g)").items()}
    assert counts == {"matched": 17, "fitted": 2}
    assert find_statuses(judged, r"table1\.\w+\.new_params_m") == {
        "matched": [f"table1.{row}.new_params_m" for row in ("linear", "projqk", "gate", "two_layers")],
        "differs, explained": [f"table1.{row}.new_params_m" for row in ("three_layers", "swiglu")],
    }
    assert find_statuses(judged, r"table3_nat\.nat\d\.macs_g") == {
        "fitted": ["table3_nat.nat3.macs_g", "table3_nat.nat5.macs_g"]
    }
    assert [round(judged.verdicts[f"table3_nat.nat{side}.macs_g"].ours, 3) for side in (3, 5)] == [1.361, 1.389]
    # as every other product is counted, once, they would differ
    assert [round(count_rows()[f"{TINY}[neighbours={side}]@224"]["macs_g_fvcore"], 2) for side in (3, 5)] == [
        1.35,
        1.37,
    ]
    assert not find_statuses(judged, ".*").get("differs, unexplained")
    assert (
        judged.verdicts["text.large.dit_share_percent"].status
        == judged.verdicts["text.shift.ratio_random"].status
        == "declared"
    )


def test_where_the_text_contradicts_itself(judged):
    assert find_statuses(judged, ".*")["paper inconsistent"] == [
        "text.structure.inherited",
        "text.structure.three_over_swiglu",
        "text.shift.nan",
        "text.locality.dwc_params_m",
    ]
    assert judged.verdicts["text.locality.dwc_params_m"].ours == pytest.approx(0.04608)


def test_what_it_derives_is_shown(judged):
    shown = find_statuses(
        judged,
        r"text\.structure\.(softmax|linear|ttt|complexity)",
        r"text\.shift\.(softmax|gradient|formula|instance|token_level)",
    )
    assert shown.pop("declared") == ["text.structure.linear", "text.shift.formula"]  # the definitions of both sides
    assert {word: len(names) for word, names in shown.items()} == {"matched": 7}


def test_a_weight_that_is_not_inherited_is_found(judged, monkeypatch):
    from repro.models import linearize

    assert judged.verdicts["text.training.inherited"].status == "matched"

    def forget(student, shell, where):
        inherit(student, shell, where)
        with torch.no_grad():
            student.blocks[3].mlp.fc1.weight[5, 7] += 1e-3

    inherit = linearize.inherit
    monkeypatch.setattr(linearize, "inherit", forget)
    assert formulas.foreign_weights.__wrapped__("swiglu") == 1


@pytest.mark.parametrize("name", formulas._IDENTITIES)
def test_equations_of_the_text(name):
    assert formulas.identity_error(name) < 1e-12


def test_an_equation_that_is_none():
    with pytest.raises(ValueError, match="'eq5': no equation of the text"):
        formulas.identity_error("eq5")


@pytest.mark.parametrize("what", ["softmax", *CHOICES["key_norm"]])
def test_a_shift_of_the_keys(what):
    """Gone where the mean over the tokens is subtracted, and in softmax; by what it is defined, nowhere else."""
    error = formulas.shift_error(what)
    assert error < 1e-12 if what in ("softmax", "instance", "no_std") else error > 0.1


def test_independent_keys_have_the_ratio_of_a_random_start():
    """‖mean‖ / mean ‖k‖ of 196 normal keys, whose mean is √196 times as short as they are."""
    keys = torch.randn(64, 196, 192, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ratio = (keys.mean(1).norm(dim=-1) / keys.norm(dim=-1).mean(1)).mean().item()
    assert ratio == pytest.approx(196**-0.5, rel=0.03) and round(ratio, 2) == float(
        PAPER.ledger.entries["text.shift.ratio_random"].printed
    )


def test_neighbourhood_attention_costs_what_the_model_counts():
    for side in (3, 5):
        difference = cost(TINY, {"neighbours": side}, (224, 224)).macs - cost(TINY, {}, (224, 224)).macs
        assert formulas.neighbours_macs_g(side) * 10**9 == difference


def test_the_variants_are_the_rows_of_the_tables():
    assert len(VARIANTS) == 21 and {name for rows in ROWS.values() for name in rows} == set(VARIANTS)
    tuned = [json.dumps(options) for name, options in VARIANTS.items() if name not in FROZEN]
    assert len(set(tuned)) == len(tuned) == 16 and len(FROZEN) == 5
    for name in FROZEN:
        assert VARIANTS[name] == VARIANTS[name.removesuffix("_frozen")]
    for place, rows in ROWS.items():
        for name, row in rows.items():
            assert f"{row}.top1_percent" in PAPER.ledger.entries
            options = ",".join(f"{option}={value}" for option, value in sorted(VARIANTS[name].items()))
            assert model_of(row) == TINY + (f"[{options}]" if options else ""), (place, name)
            build_model("t5_nano_patch4_32", num_classes=10, img_size=32, **VARIANTS[name])


def test_the_orders_are_those_of_the_tables():
    orders = {table.place: find_orders(table, PAPER.ledger) for table in PAPER.compared}
    counts = {"Table 1, fine-tuned": 15, "Table 1, frozen": 10, "Table 2": 11, "Table 3": 15}
    assert {place: len(found) for place, found in orders.items()} == counts and set(ORDERS) <= set(ROWS)
    for place, pairs in orders.items():
        for better, worse in pairs:
            theirs = [
                float(PAPER.ledger.entries[f"{ROWS[place][name]}.top1_percent"].printed) for name in (better, worse)
            ]
            assert theirs[0] > theirs[1], (place, better, worse)


def test_frozen_and_fine_tuned_trainings_are_told_apart(checkout):
    """On ImageNet-1K by the ledger, and on other data by the tables of variants."""
    full = {"classes": 1000, "data": "imagenet", "init": INIT, "held_out_images": 50_000, "options": VARIANTS["gate"]}
    checkout.train("pretrain/tuned", TINY, "imagenet", top1=67.6, **full)
    checkout.train("pretrain/frozen", TINY, "imagenet", top1=62.0, freeze=True, **full)
    checkout.train(
        "pretrain/scratch", TINY, "imagenet", top1=70.0, **full | {"init": None, "options": VARIANTS["2layer"]}
    )
    results = Results(checkout.paths, [PAPER], SCORES)
    found = JUDGE(PAPER, results).verdicts
    asked = ("table1.gate", "table1_frozen.gate", "table1.two_layers", "table1_frozen.two_layers")
    assert [found[f"{row}.top1_percent"].ours for row in asked] == [67.6, 62.0, None, None]
    metrics = {source.path.split("/")[-2]: source.metrics for source in results.sources}
    names = [find_variant(results, PAPER.variants, metrics[name]) for name in ("tuned", "frozen")]
    assert names == ["gate", "gate_frozen"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linearization(ClassifierParams):
    """A classifier with what a linearization adds."""

    freeze: bool = False
    new_lr_factor: float = 20.0
    decay_all: bool = True


def describe(dtype: str = "fp16", images: int = 1_281_167, **changes) -> tuple[dict, list[str]]:
    """The released recipe on eight GPUs, but for `changes`."""
    released = {
        "model": TINY,
        "data": "imagenet",
        "epochs": 30,
        "batch_size": 2048,
        "drop_path": 0.0,
        "ema_decay": 0.99996,
        "init": {"weights": INIT["weights"]},
        "optim": {
            "lr": 2e-5,
            "warmup_lr": 5e-9,
            "min_lr": 5e-8,
            "lr_batch_size": 512,
            "weight_decay": 0.05,
            "warmup_epochs": 5,
            "clip_grad_norm": None,
        },
        "mix": {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1},
        "transform": {"image_size": 224, "auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25, "crop_pct": 0.875},
    }
    params = build(Linearization, {**released, **changes}, "a linearization")
    world = {"world_size": 8, "micro_batch": params.batch_size // 8, "accumulate": 1}
    return describe_recipe(
        params, {**world, "device": "cuda", "dtype": dtype, "backend": "torch", "train_images": images}
    )


def test_the_released_recipe_departs_by_its_order_of_images_alone():
    described, listed = describe()
    assert described["departures_from_the_paper"] == [
        "repeated augmentation: none, the release has three views of an image in a batch"
    ]
    recipe = described["recipe"]
    assert (
        recipe["learning_rate"]["peak"] == pytest.approx(8e-5)
        and recipe["optimizer"]["exempt_from_weight_decay"] == "nothing"
    )
    assert recipe["linearize"] == {"freeze": False, "new_lr_factor": 20.0, "decay_all": True}
    assert listed[0] == "trained        all weights, the new ones at 20 times the rate"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model": "t5_nano_patch4_32"}, "model: t5_nano_patch4_32, "),
        ({"data": "digits"}, "data: digits (1,281,167 training images), "),
        ({"images": 1079}, "data: imagenet (1,079 training images), "),
        ({"epochs": 20}, "epochs: 20, the release has 30"),
        ({"batch_size": 1024}, "batch_size: 1024, the release has 2048"),
        ({"new_lr_factor": 1.0}, "new_lr_factor: 1, the release has 20"),
        ({"decay_all": False}, "decay_all: False, the release has True"),
        ({"ema_decay": None}, "ema_decay: none, the release has 0.99996"),
        ({"dtype": "bf16"}, "precision: bf16, the release has fp16 autocast"),
    ],
)
def test_a_departure_has_a_line(changes, line):
    described, listed = describe(**changes)
    found = described["departures_from_the_paper"]
    assert len(found) == 2 and found[0].startswith(line)
    assert f"departs from the paper: {found[0]}" in listed


def test_a_rate_is_compared_at_the_released_batch():
    described, _ = describe(
        optim={
            "lr": 1e-3,
            "lr_batch_size": 512,
            "warmup_lr": 5e-9,
            "min_lr": 5e-8,
            "warmup_epochs": 5,
            "clip_grad_norm": None,
        }
    )
    assert (
        described["departures_from_the_paper"][0] == "optim.lr: 0.001 at batch 512, the release has 8e-05 at batch 2048"
    )
    assert len(described["departures_from_the_paper"]) == 2


def test_frozen_weights_are_said_to_be():
    described, listed = describe(freeze=True)
    assert described["recipe"]["linearize"]["freeze"] and "the new weights alone" in listed[0]
    assert set(RELEASED) >= {"new_lr_factor", "decay_all"}


def test_a_student_stands_beside_its_model_from_random_weights(checkout):
    """Differences of 10 ± 1 points over three seeds: 10 ± 4.303 · 1/√3, and p of t = 10 √3 with 2 degrees of freedom."""
    options = {"neighbours": 5}
    shared = {"held_out_images": 1000, "options": options, "steps": 165, "split": "test"}
    runs = [{"seed": seed, "top1_percent": 90.0 + seed, "untrained_top1_percent": 50.0} for seed in range(3)]
    student = {"by_seed": runs, "top1_percent": 91.0, "untrained_top1_percent": 50.0, "init": INIT}
    checkout.train("measured/cpu/ablate/linearize/digits/nat5", "t5_nano_patch4_32", "digits", **shared | student)
    for name, top1, steps in (("scratch", (80.0, 80.0, 83.0), 165), ("longer", (90.0, 91.0, 92.0), 660)):
        more = shared | {"steps": steps, "recipe_hash": name}
        checkout.train(f"measured/cpu/pretrain/{name}", "t5_nano_patch4_32", "digits", top1=top1, **more)
    text = render_blocks(weigh_inheritance(JUDGE(PAPER, Results(checkout.paths, [PAPER], SCORES))))
    # 10, 11 and 9 points; against the longer training none
    equal, longer = text.splitlines()
    assert "+10.0 [+7.5, +12.5] points" in equal and equal.endswith("p 0.0033.")
    assert "660" in longer and "+0.0 [" in longer
