"""The sections of Vision-TTT's page and its page of readings, from made-up records: for the paper, against it, and what
is left out.
"""

import pytest

from repro.core.csvfile import parse_csv
from repro.papers.vision_ttt.paper import PAPER as VISION_TTT
from repro.papers.vision_ttt.readings import load_choices
from repro.papers.vision_ttt.readings_page import BY_COUNTS, count_fits, find_trained
from repro.papers.vision_ttt.sections import BY_DESIGN, COUNTERS_FILE, NOT_SEEN, describe_models, list_findings
from repro.report.arithmetic import agreement
from repro.report.template import render_template
from tests.report.conftest import visualized

AGAINST = "**against the paper**"


def findings(checkout) -> dict[str, tuple[str, str]]:
    """What the paper says -> our numbers, and for whom they speak."""
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in list_findings(checkout.report()).splitlines()
        if "| Fig" in line
    ]
    return {says: (ours, word) for _, says, ours, word in rows}


def test_what_speaks_for_the_paper_is_said(checkout):
    checkout.record("visualize", visualized())
    checkout.train("pretrain/v", "vittt_nano_patch16_144", "digits", top1=97.5, held_out_images=8)
    found = findings(checkout)
    assert len(found) == 9 and {word for _, word in found.values()} == {"for the paper", "open", BY_DESIGN}
    # half of the field's side is 72 pixels, a quarter 36; that 40 is more says nothing about all pixels
    assert found["DeiT, Vim and Vittt cover all pixels"] == (
        "90 % of the field within DeiT 40, Vim 40, Vittt 40 pixels of 144",
        "open",
    )
    assert found["the reconstruction loss rises, then falls"][0] == "2.0 at epoch 0, 6.0 at epoch 3, 3.0 at epoch 12"
    report = checkout.report()
    text = list_findings(report) + describe_models(report)
    assert f"Of 9 findings: 6 for the paper; 1 open; 2 {BY_DESIGN}." in text and "8 held-out images" in text
    assert "Vanilla TTT 97.5 %" in text and f"{checkout.CPU}; the pipeline" in text


@pytest.mark.parametrize(
    ("path", "value", "says", "word"),
    [
        # before the training an enlarged digit's blank border holds no gradient
        ("gradient_magnitude/after/top30_share_percent", 34.9, "the gradients are relatively uniform", NOT_SEEN),
        ("gradient_magnitude/after/ink/later_percent", 70.1, "after training, the tokens with the largest", AGAINST),
        ("gradient_magnitude/before/ink/later_top30_percent", 77.0, "and more so than before", NOT_SEEN),
        ("receptive_fields/Vanilla TTT/share_ahead", 0.01, "vanilla TTT sees one direction", AGAINST),
        ("receptive_fields/+ Dual/share_ahead", 0, "“+ Dual” sees both", AGAINST),
        ("receptive_fields/+ Conv2d/anisotropy", 0.21, "“+ Conv2d” is globally radial", AGAINST),
        ("receptive_fields/DeiT/radius_90_px", 35.0, "DeiT, Vim and Vittt cover all pixels", NOT_SEEN),
        # the paper's loss turns between epochs 20 and 30, and this one is trained for 12, or 40
        ("reconstruction_loss/epoch_12/mean_by_layer", [6.0, 8.0], "the reconstruction loss rises", NOT_SEEN),
        ("reconstruction_loss/epoch_40", {"mean_by_layer": [9.0], "smallest": 1.0}, "the reconstruction loss", AGAINST),
        ("reconstruction_loss/epoch_12/smallest", 0.0, "it stays above zero", AGAINST),
    ],
)
def test_a_finding_speaks_against_the_paper_only_where_it_could_speak_for_it(checkout, path, value, says, word):
    record = metrics = visualized()
    *folders, last = path.split("/")
    for name in folders:
        metrics = metrics[name]
    metrics[last] = value
    checkout.record("visualize", record)
    usual = ("for the paper", "open", BY_DESIGN)
    found = {name: said for name, (_, said) in findings(checkout).items() if said not in usual}
    ((name, said),) = found.items()
    assert name.startswith(says) and said == word


def test_a_model_that_has_not_learnt_is_left_out_where_another_record_of_it_has(checkout):
    """DeiT's small radius is of a model with 29.5 %; another training of the same model and data has 96.8 %."""
    metrics = visualized()
    metrics["receptive_fields"]["DeiT"] |= {"radius_90_px": 9.0, "weights": "artifacts/pretrain/d/weights.safetensors"}
    checkout.record("visualize", metrics)
    checkout.train("pretrain/d", "deit_nano_patch16_144", "digits", top1=29.5)
    checkout.train("pretrain/other", "deit_nano_patch16_96", "digits", top1=96.8)
    ours, word = findings(checkout)["DeiT, Vim and Vittt cover all pixels"]
    assert "DeiT 9" in ours and word == NOT_SEEN
    about = {"top1": 96.8, "epochs": 224}
    checkout.train("ablate/of_other_options", "deit_nano_patch16_144", "digits", options={"pool": "mean"}, **about)
    ours, _ = findings(checkout)["DeiT, Vim and Vittt cover all pixels"]
    assert "DeiT 9" in ours
    checkout.train("replications/cpu/ablate/d_224e", "deit_nano_patch16_144", "digits", **about)
    ours, word = findings(checkout)["DeiT, Vim and Vittt cover all pixels"]
    assert "DeiT" not in ours and word == "open"
    assert "96.8 %" in describe_models(checkout.report())


def test_an_evaluation_is_no_training_that_a_figure_lacks(checkout):
    checkout.record("visualize", visualized())
    checkout.train("pretrain/v", "vittt_nano_patch16_144", "digits", top1=40.0, held_out_images=8)
    evaluated = {"model": "vittt_nano_patch16_144", "kind": "digits", "data": "digits", "top1_percent": 99.0}
    checkout.record("replications/cpu/evaluate/v", evaluated)
    assert "left out" not in describe_models(checkout.report())


def test_fields_that_were_not_drawn_are_no_findings(checkout):
    """Without a rival, that of Vittt is left; without one of the three designs, none of Fig. 8 is."""
    metrics = visualized()
    del metrics["receptive_fields"]["Vim"]
    checkout.record("visualize", metrics)
    ours, _ = findings(checkout)["DeiT, Vim and Vittt cover all pixels"]
    assert "DeiT" in ours and "Vim" not in ours
    del metrics["receptive_fields"]["+ Dual"]
    checkout.record("visualize", metrics)
    assert len(findings(checkout)) == 5


@pytest.mark.parametrize("ink", [None, {"top30_percent": 50.0}])
def test_of_pictures_without_ink_nothing_is_said_about_the_object(checkout, ink):
    """Of other pictures than digits it is not known, and where all tokens are in first chunks none comes later."""
    metrics = visualized()
    for state in metrics["gradient_magnitude"].values():
        state |= {"ink": ink, "ink_reason": "not known"}
    checkout.record("visualize", metrics)
    found = [said for says, (_, said) in findings(checkout).items() if "object" in says or "more so" in says]
    assert found == ["open", "open"]


def test_two_snapshots_show_no_peak(checkout):
    metrics = visualized()
    del metrics["reconstruction_loss"]["epoch_3"]
    checkout.record("visualize", metrics)
    assert findings(checkout)["the reconstruction loss rises, then falls"][1] == "open"


def test_what_is_said_of_the_search_stands_in_its_table():
    """Every counter leaves as many numbers unexplained as it says, and what it gives for them is not what the paper
    prints.
    """
    rows = parse_csv(COUNTERS_FILE.read_text(encoding="utf-8"), "counters")
    entries = VISION_TTT.ledger.entries
    for row, counts in zip(rows, (("rounding", "truncation"), ("rounding",), ("rounding", "truncation")), strict=False):
        left = [pair.split() for pair in row["unexplained"].split("; ")]
        assert row["explained"] == row["entries"] - len(left)
        assert not [name for name, ours in left if agreement(float(ours), entries[name].printed) in counts]
    relations = [relation.expression for entry in entries.values() for relation in entry.relations]
    steps = {call.args[0] for expression in relations for call in expression.calls if call.name == "table3_step_g"}
    assert steps == {"share_qk", "conv2d"}


def test_every_question_is_about_the_papers_own_model(checkout):
    """23 of 24 counts of parameters and 2 of 25 of FLOPs is what an audit by hand found; the numbers of entries are
    its.
    """
    paper, report = checkout.paper, checkout.report()
    found = [[verdict.entry.id for verdict in report.select(question)] for question in paper.questions]
    assert [len(names) for names in found[:2]] == [24, 25]
    assert not any("vim" in name or "deit" in name or "vit3" in name for names in found for name in names)
    assert all(name in paper.ledger.entries for question in paper.questions for name in question.shown)


def page(checkout) -> str:
    paper = checkout.paper
    (document,) = [each for each in paper.documents if each.text.name == "readings.md"]
    return render_template(document.text, checkout.report(), paper.parts)


def fits() -> dict:
    """Every reading with the same made-up counts, but for one that fits less and one pair that fits by rounding alone."""
    row = {"params_m": 7.0, "params_fit": 11, "params_truncated": 1, "missed": []}
    row |= {"macs_g": 1.4, "macs_fit": 2, "macs_truncated": 0}
    readings = {"": row} | {text: row for choice in load_choices() for text in choice.alternatives}
    readings["conv1d_count=1"] = row | {"params_fit": 9}
    pairs = {"gate_bias=true,post_norm=none": row | {"params_fit": 12, "params_truncated": 0, "macs_fit": 3}}
    return {"readings": readings, "pairs": pairs, "params_entries": 12, "macs_entries": 8}


def test_the_page_of_readings_counts_what_fits(checkout):
    checkout.record("readings", fits())
    report = checkout.report()
    alternatives = sum(len(choice.alternatives) for choice in load_choices())
    keys = ("params_fit", "params_truncated", "macs_fit", "alternatives", "as_many")
    assert [count_fits(report, key) for key in keys] == [11, 1, 2, alternatives, alternatives - 1]
    text = page(checkout)
    assert count_fits(report, "best") == 3 and "`gate_bias=true,post_norm=none`." in text
    assert "| `conv1d_count=1` |" in text and "9 of 12" in text and "Top-1 (%)" not in text


def train(checkout, name: str, reading: str, top1: tuple[float, ...], *, device: str = "cpu_some", **more) -> None:
    about = {"options": {"reading": reading} if reading else {}, "held_out_images": 1000, "epochs": 7, "top1": top1}
    place = f"replications/{device}/ablate/reading_{name}_digits_3s"
    checkout.train(place, "vittt_nano_patch16_144", "digits", **about, **more)


def test_trained_readings_are_compared_with_ours_seed_by_seed(checkout):
    """Differences of 10 ± 0.1 points are far beyond chance, and of +1, -1 and 0 points are not."""
    checkout.record("readings", fits())
    train(checkout, "ours", "", (60.0, 61.0, 62.0))
    train(checkout, "post_norm_none", "post_norm=none", (50.0, 51.1, 51.9))
    train(checkout, "gate_bias_true", "gate_bias=true", (61.0, 60.0, 62.0))
    train(checkout, "ours", "", (90.0, 91.0, 92.0), device="other")  # a twin, which stands in no pair
    report = checkout.report()
    assert set(find_trained(report)) == {"", "post_norm=none", "gate_bias=true"}
    text = page(checkout)
    assert "**1 of 2 alternatives differ significantly from ours:** `post_norm=none` (-10.0 points)." in text
    # means of 61, 51 and 61 %; at their mean two accuracies on 1000 images differ by 1.96 √(2 · 0.577 · 0.423 / 1000)
    # by chance
    assert "within 10.0 points" in text and "makes 4.3 on 1000 images." in text
    assert "3 seeds, 1000 held-out images" in text and "Top-1 (%)" in text and "61.0 %" in text


def test_readings_that_nothing_separates_say_so_and_one_seed_says_nothing(checkout):
    train(checkout, "ours", "", (60.0, 61.0, 62.0))
    train(checkout, "gate_bias_true", "gate_bias=true", (61.0, 60.0, 62.0))
    text = page(checkout)
    assert "**No power: 3 seeds and 1000 images separate no pair.**" in text
    assert "within 0.0 points" in text and "cannot tell them apart" in text
    train(checkout, "ours", "", (60.0,))
    train(checkout, "gate_bias_true", "gate_bias=true", (90.0,))
    assert "`repro profile use digits && dvc repro ablate`." in page(checkout)


def test_a_reading_of_another_recipe_is_not_compared(checkout):
    train(checkout, "ours", "", (60.0, 61.0))
    train(checkout, "gate_bias_true", "gate_bias=true", (90.0, 91.0), recipe_hash="another")
    assert set(find_trained(checkout.report())) == {""}


def test_of_two_records_of_a_reading_the_pipelines_counts(checkout):
    """Their recipes differ, else one of them would stand for both."""
    train(checkout, "ours", "", (60.0, 61.0))
    about = {"held_out_images": 1000, "top1": (70.0, 71.0)}
    checkout.train("ablate/reading_ours_digits_3s", "vittt_nano_patch16_144", "digits", **about)
    with checkout.edit("ablate/reading_ours_digits_3s/metrics.json") as record:
        record["identity"]["recipe"] |= {"lr": 1}
    assert find_trained(checkout.report())[""].path == "results/ablate/reading_ours_digits_3s/metrics.json"


def test_the_choices_by_counts_are_those_whose_reason_names_the_printed_parameters():
    assert {choice.switch for choice in load_choices() if "missed" in choice.because} == set(BY_COUNTS)
