"""The readings of the paper: complete, counted as an audit by hand counted them, and a page that follows its record."""

import dataclasses
import re
import typing

import pytest
import torch

from repro.core.config import load_section, load_yaml
from repro.models.reading import Reading
from repro.models.registry import build_model
from repro.papers.vision_ttt.paper import PAPER as VISION_TTT
from repro.papers.vision_ttt.readings import (
    count_reading,
    fit_readings,
    list_alternatives,
    list_trained,
    load_choices,
    pair_readings,
)
from repro.papers.vision_ttt.readings_page import describe_choices, load_fixed_choices
from repro.report.arithmetic import agreement
from repro.tasks.classification.params import ClassifierParams
from tests.conftest import ROOT

D, L, H = 192, 12, 3


@pytest.fixture(scope="module")
def fits():
    return fit_readings(VISION_TTT.ledger)


def test_every_switch_with_all_of_its_values_is_explained():
    choices, hints = {choice.switch: choice for choice in load_choices()}, typing.get_type_hints(Reading)
    assert set(choices) == {field.name for field in dataclasses.fields(Reading)}
    for name, choice in choices.items():
        readings = [Reading.of(f"{name}={value}") for value in choice.values]
        assert readings[0] == Reading() and len(set(readings)) == len(readings) > 1, name
        known = (False, True) if hints[name] is bool else typing.get_args(hints[name])
        assert not known or {getattr(reading, name) for reading in readings} == set(known), name
        assert choice.because.endswith(".") and choice.asks.endswith("?") and choice.refuted_by


def test_the_counts_that_a_reading_is_compared_with():
    """Table 3's six designs, S and B; the 3×3 convolution of three sizes; what sharing saves."""
    found = count_reading(Reading())
    assert [len(counts) for counts in found.values()] == [12, 8]
    assert found["params_m"]["text.4_3.dwconv_params_b"] == 12 * 9 * 768 / 1e6
    assert found["params_m"]["text.5_4.share_params_t"] == pytest.approx(12 * D * D / 1e6)
    # one Conv1d of one direction: a kernel of 4 and a bias for 192 channels
    together = count_reading(Reading(conv1d_arrival="together"))
    change = found["params_m"]["table3.gating.params_m"] - together["params_m"]["table3.gating.params_m"]
    assert change == pytest.approx(L * 5 * D / 1e6)
    assert {name for name in found["params_m"] if found["params_m"][name] != together["params_m"][name]} == {
        "table3.gating.params_m"
    }


# alternative -> how many of Table 3's six rows fit by the audit, which counted with both Conv1d in the row named after
# them
AUDIT = dict.fromkeys(("", "post_norm=per_direction", "post_norm=none", "inner_norm=shared", "token_scale=shared"), 5)
AUDIT |= dict.fromkeys(("token_scale=fixed", "gate_bias=true", "out_bias=true", "positions=patches_and_class"), 5)
AUDIT |= {"learning_rate=per_direction": 4, "conv1d_bias=false": 3, "conv1d_kernel=3": 3, "conv1d_count=1": 2}


@pytest.mark.parametrize("text", AUDIT)
def test_rows_of_table_3_that_fit_as_an_audit_by_hand_found(text):
    entries = VISION_TTT.ledger.entries
    counts = count_reading(Reading.of(",".join(filter(None, ("conv1d_arrival=together", text)))))["params_m"]
    rows = {name: value for name, value in counts.items() if name.startswith("table3.")}
    assert sum(agreement(value, entries[name].printed) is not None for name, value in rows.items()) == AUDIT[text]


def test_ours_fits_all_and_what_arrives_together_does_not(fits):
    assert fits["params_entries"] == 12 and fits["readings"][""]["params_fit"] == 12
    assert fits["readings"]["conv1d_arrival=together"]["missed"][0] == "table3.gating.params_m"
    assert fits["readings"]["dwconv_bias=true"]["missed"][0] == "text.4_3.dwconv_params_b"


def test_pairs_are_of_two_switches(fits):
    assert pair_readings(["a=1", "a=2", "b=1"]) == ["a=1,b=1", "a=2,b=1"]
    assert "gate_bias=true,post_norm=none" in fits["pairs"]
    assert not any("gate_activation" in text for text in fits["pairs"])  # it changes no count


def test_trained_are_those_that_change_vittt_itself():
    trained = list_trained()
    assert trained["ours"] == "" and trained["post_norm_none"] == "post_norm=none"
    assert len(trained) == len(set(trained)) == 1 + len(list_alternatives()) - 4
    assert not any(text.startswith(("conv1d_arrival", "dwconv_class_tokens")) for text in trained.values())


def test_every_trained_reading_is_a_cell_of_the_profile_digits():
    cells = load_yaml(ROOT / "profiles/digits.yaml")["ablate"]
    for name, text in list_trained().items():
        options = cells[f"reading_{name.replace('.', '_')}_digits_3s"].get("options", {})
        assert options == ({"reading": text} if text else {}), name


def find_fixed(word: str):
    return next(choice for choice in load_fixed_choices() if word in choice.asks)


def test_choices_without_a_switch_stand_beside_those_with_one():
    fixed = load_fixed_choices()
    assert all(choice.because.endswith(".") and choice.asks.endswith("?") and choice.refuted_by for choice in fixed)
    headings = re.findall(r"(?m)^### (.*)", describe_choices(None))
    assert headings == [choice.asks for choice in (*load_choices(), *fixed)] and len(fixed) == 3


@pytest.mark.parametrize(("word", "factor"), [("divided", 64), ("½", 2)])
def test_a_reading_that_comes_to_another_fixed_choice_makes_its_step(word, factor):
    """The rate multiplies the step, and a head of the nano is 64 wide."""
    x, reading = torch.randn(2, 81, 64), find_fixed(word).instead
    ours, other = (build_model("vittt_nano_patch16_144", reading=text).blocks[0].mixer for text in ("", reading))
    other.load_state_dict(ours.state_dict())
    torch.testing.assert_close(other.learning_rate(x), factor * ours.learning_rate(x))
    if word == "divided":
        torch.testing.assert_close(other.learning_rate(x), torch.sigmoid(ours.lr_proj(x)))


def test_no_common_width_of_swiglu_but_ours_fits_the_printed_parameters():
    entries, terms = VISION_TTT.ledger.entries, {"t": (192, "table3.conv2d"), "s": (384, "table1.vittt_s")}
    for size, (dim, row) in (terms | {"b": (768, "table1.vittt_b")}).items():
        ours = count_reading(Reading())["params_m"][f"{row}.params_m"]
        for width in (2 * dim, 8 * dim // 3, 3 * dim, 4 * dim):
            counted = ours + L * (3 * dim + 2) * (width - 8 * dim // 3) / 1e6
            fits = agreement(counted, entries[f"{row}.params_m"].printed) is not None
            assert fits == (width == 8 * dim // 3), (size, width)


def test_a_small_vittt_with_more_than_one_head_can_be_trained():
    params = load_section(ClassifierParams, ROOT / "profiles/digits.yaml", "ablate", "vittt_nano_digits_heads2")
    model = build_model(params.model, num_classes=10, img_size=params.transform.image_size, **params.options)
    mixer = model.blocks[0].mixer
    assert (mixer.num_heads, mixer.head_dim) == (2, 32)
    assert mixer.learning_rate(torch.randn(1, 4, 64)).shape == (1, 4, 2)
