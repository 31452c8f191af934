"""The room of T5: the ledger against the summary's text, the counts of its models, what it derives, its variants and
its recipe.
"""

import dataclasses

import pytest
import torch

from repro.bench.flops import cost
from repro.core.config import build
from repro.models.t5 import CHOICES
from repro.papers import describe_recipe, load_papers
from repro.papers.linearize import formulas
from repro.papers.linearize.sections import find_attention, list_students, weigh_inheritance
from repro.report.variants import find_groups
from repro.tasks.classification.params import ClassifierParams
from tests.papers.conftest import count_model, count_statuses, find_keys, find_statuses, judge, judge_counts, read_key

PAPER = load_papers()["linearize"]
TINY = "t5_tiny_patch16_224"
INIT = {"weights": "artifacts/pretrain/teacher/weights.safetensors", "weights_hash": "ab"}
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


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    return judge_counts(tmp_path_factory.mktemp("counts"), PAPER, {key: count_model(key) for key in find_keys(PAPER)})


@pytest.mark.parametrize(("row", "params"), PARAMS.items())
def test_parameters_by_hand(row, params):
    table, _, key = row.partition(".")
    name, options, _ = read_key(PAPER.ledger.table(table).records[key]["model"])
    assert (name, cost(name, options, (224, 224)).num_params) == (TINY, params)


def test_every_count_is_the_papers(judged):
    """Two windows of neighbourhood attention were fitted, and 0.44 M new parameters are printed as the difference of
    two rounded totals.
    """
    assert len(judged.verdicts) == len(PAPER.ledger.entries) == 101
    assert count_statuses(judged, r"table.*\.(params_m|macs_g)") == {"matched": 17, "fitted": 2}
    assert find_statuses(judged, r"table1\.\w+\.new_params_m") == {
        "matched": [f"table1.{row}.new_params_m" for row in ("linear", "projqk", "gate", "two_layers")],
        "differs, explained": [f"table1.{row}.new_params_m" for row in ("three_layers", "swiglu")],
    }
    fitted = [f"table3_nat.nat{side}.macs_g" for side in (3, 5)]
    assert find_statuses(judged, r"table3_nat\.nat\d\.macs_g") == {"fitted": fitted}
    assert [round(judged.verdicts[f"table3_nat.nat{side}.macs_g"].ours, 3) for side in (3, 5)] == [1.361, 1.389]
    # as every other product is counted, once, they would differ
    fvcore = [count_model(f"{TINY}[neighbours={side}]@224")["macs_g_fvcore"] for side in (3, 5)]
    assert [round(macs, 2) for macs in fvcore] == [1.35, 1.37]
    assert not find_statuses(judged, ".*").get("differs, unexplained")
    for name in ("text.large.dit_share_percent", "text.shift.ratio_random"):
        assert judged.verdicts[name].status == "declared"


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


@pytest.mark.parametrize("what", ["softmax", *CHOICES["key_norm"]])
def test_a_shift_of_the_keys(what):
    """Gone where the mean over the tokens is subtracted, and in softmax; by what it is defined, nowhere else."""
    error = formulas.shift_error(what)
    assert error < 1e-12 if what in ("softmax", "instance", "no_std") else error > 0.1


def test_students_on_two_data_sets_stand_in_two_tables(checkout):
    """The teacher's accuracy on digits is no measure of a student on another set; an evaluation of it is no training."""
    trained = {"by_seed": [{"seed": 0, "top1_percent": 50.0, "untrained_top1_percent": 9.0}]}
    trained |= {"top1_percent": 50.0, "untrained_top1_percent": 9.0}
    teacher = {"weights_hash": "ab", "top1_percent": 80.0, "held_out_images": 10}
    checkout.train("pretrain/teacher", "softvittt", "digits", **teacher)
    checkout.record(
        "replications/a/evaluate/teacher", teacher | {"model": "softvittt", "kind": "digits", "data": "digits"}
    )
    for data in ("digits", "digits_wild"):
        checkout.train(f"linearize/{data}", TINY, data, init=INIT, held_out_images=10, **trained)
    digits, wild = list_students(checkout.report()).split("Students of the softmax model")[1:]
    assert "All on digits, 10 images" in digits and "| 62.5 % |" in digits
    assert "All on digits_wild, 10 images" in wild and "62.5" not in wild


def test_layers_that_look_farther_or_have_a_lower_peak_than_the_teacher_are_counted(checkout):
    layers = {"teacher": [2.0, 4.0, 3.0], "after": [2.5, 3.5, 3.5]}
    by_layer = {state: {"reach_patches": reach, "peak_percent": [5.0, 1.0, 1.0]} for state, reach in layers.items()}
    by_layer["after"]["peak_percent"] = [1.0, 2.0, 1.0]
    about = {"model": TINY, "options": {}, "weights_hash": "a", "teacher_hash": "b"}
    checkout.record("replications/attention", about | {"by_layer": by_layer})
    # the same student, looked at with other pictures
    checkout.record("replications/again", about | {"by_layer": by_layer, "held_out_images": 9})
    # linear attention is no inner learner
    linear = {"options": {"inner": "linear"}, "weights_hash": "c"}
    checkout.record("replications/linear", about | linear | {"by_layer": by_layer})
    report = checkout.report()
    assert [find_attention(report, key) for key in ("layers", "farther", "lower")] == [3, 2, 1]


def test_neighbourhood_attention_costs_what_the_model_counts():
    for side in (3, 5):
        difference = cost(TINY, {"neighbours": side}, (224, 224)).macs - cost(TINY, {}, (224, 224)).macs
        assert formulas.neighbours_macs_g(side) * 10**9 == difference


def test_frozen_and_fine_tuned_trainings_are_told_apart(checkout):
    """On ImageNet-1K by the ledger, and on other data by the tables of variants."""
    gate, two_layers = ({"inner": name, "dwc": "none"} for name in ("gate", "2layer"))
    full = {"classes": 1000, "data": "imagenet", "init": INIT, "held_out_images": 50_000, "options": gate}
    checkout.train("pretrain/tuned", TINY, "imagenet", top1=67.6, **full)
    checkout.train("pretrain/frozen", TINY, "imagenet", top1=62.0, freeze=True, **full)
    checkout.train("pretrain/scratch", TINY, "imagenet", top1=70.0, **full | {"init": None, "options": two_layers})
    small = {"init": INIT, "held_out_images": 1000, "options": gate, "top1": 80.0}
    for name, freeze in (("gate", False), ("gate_frozen", True)):
        place = f"replications/cpu/ablate_linearize/t5_{name}_digits_5s"
        checkout.train(place, "t5_nano_patch4_32", "digits", freeze=freeze, **small)
    report = judge(checkout, PAPER)
    found = report.verdicts
    asked = ("table1.gate", "table1_frozen.gate", "table1.two_layers", "table1_frozen.two_layers")
    assert [found[f"{row}.top1_percent"].ours for row in asked] == [67.6, 62.0, None, None]
    (group,) = find_groups(report.results, PAPER)
    changes = {name: group.list_changes(name) for name in group.variants}
    assert changes == {"gate": {}, "gate_frozen": {"freeze": True}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linearization(ClassifierParams):
    """A classifier with what a linearization adds."""

    freeze: bool = False
    new_lr_factor: float = 20.0
    decay_all: bool = True


OPTIM = {"lr": 2e-5, "warmup_lr": 5e-9, "min_lr": 5e-8, "lr_batch_size": 512, "weight_decay": 0.05}
OPTIM |= {"warmup_epochs": 5, "clip_grad_norm": None}


def describe(dtype: str = "fp16", images: int = 1_281_167, **changes) -> tuple[dict, list[str]]:
    """The released recipe, but for `changes`."""
    released = {"model": TINY, "data": "imagenet", "epochs": 30, "batch_size": 2048, "drop_path": 0.0}
    released |= {"ema_decay": 0.99996, "init": {"weights": INIT["weights"]}, "optim": OPTIM}
    released |= {"mix": {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1}}
    transform = {"image_size": 224, "auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25, "crop_pct": 0.875}
    params = build(Linearization, {**released, "transform": transform, **changes}, "a linearization")
    facts = {"world_size": 1, "micro_batch": params.batch_size, "accumulate": 1, "train_images": images}
    return describe_recipe(params, {**facts, "device": "cuda", "dtype": dtype, "backend": "torch"})


def test_the_released_recipe_departs_by_its_order_of_images_alone():
    described, listed = describe()
    assert described["departures_from_the_paper"] == [
        "repeated augmentation: none, the release has three views of an image in a batch"
    ]
    recipe = described["recipe"]
    assert recipe["learning_rate"]["peak"] == pytest.approx(8e-5)
    assert recipe["optimizer"]["exempt_from_weight_decay"] == "nothing"
    assert recipe["linearize"] == {"freeze": False, "new_lr_factor": 20.0, "decay_all": True}
    assert listed[0] == "trained        all weights, the new ones at 20 times the rate"
    described, listed = describe(freeze=True)
    assert described["recipe"]["linearize"]["freeze"] and "the new weights alone" in listed[0]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model": "t5_nano_patch4_32"}, "model: t5_nano_patch4_32, "),
        ({"images": 1079}, "data: imagenet (1,079 training images), "),
        ({"batch_size": 1024}, "batch_size: 1024, the release has 2048"),
        ({"optim": OPTIM | {"lr": 1e-3}}, "optim.lr: 0.001 at batch 512, the release has 8e-05 at batch 2048"),
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


def test_a_student_stands_beside_its_model_from_random_weights(checkout):
    """Differences of 10 ± 1 points over three seeds: 10 ± 4.303 · 1/√3, and p of t = 10 √3 with 2 degrees of freedom."""
    options = {"neighbours": 5}
    shared = {"held_out_images": 1000, "options": options, "steps": 165, "split": "test"}
    runs = [{"seed": seed, "top1_percent": 90.0 + seed, "untrained_top1_percent": 50.0} for seed in range(3)]
    student = {"by_seed": runs, "top1_percent": 91.0, "untrained_top1_percent": 50.0, "init": INIT}
    place = "replications/cpu/ablate_linearize/t5_nat5_digits_5s"
    checkout.train(place, "t5_nano_patch4_32", "digits", **shared | student)
    for name, top1, steps in (("scratch", (80.0, 80.0, 83.0), 165), ("longer", (90.0, 91.0, 92.0), 660)):
        more = shared | {"steps": steps, "recipe_hash": name}
        checkout.train(f"replications/cpu/ablate/{name}", "t5_nano_patch4_32", "digits", top1=top1, **more)
    text = weigh_inheritance(judge(checkout, PAPER))
    # 10, 11 and 9 points; against the longer training none
    equal, longer = text.splitlines()
    assert "+10.0 [+7.5, +12.5] points" in equal and equal.endswith("p 0.0033.")
    assert "660" in longer and "+0.0 [" in longer
