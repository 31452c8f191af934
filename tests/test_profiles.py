"""The profiles agree: they have the same sections, and a cell's name means one training wherever it stands. Every cell of
`digits`, which nothing else trains within a test, is one that its parameters accept.
"""

import itertools
import json
import re
from typing import Any

import pytest

from repro.core.config import build, load_yaml
from repro.runs.golden import read_cases
from stages import load_stages
from tests.conftest import ROOT

PROFILES = {file.stem: load_yaml(file) for file in sorted((ROOT / "profiles").glob("*.yaml"))}
DIGITS = PROFILES["digits"]
FAMILIES = set(read_cases()["families"])
TASKS = {name: stage.task for name, stage in load_stages().items() if stage.task}
CELLS = [(section, name) for section in TASKS for name in DIGITS.get(section, ())]
TRAINED = [pytest.param(section, name, id=f"{section}-{name}") for section, name in CELLS]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_has_every_section(profile):
    """A section that is missing breaks dvc.yaml."""
    assert PROFILES[profile].keys() == PROFILES["mini"].keys()


@pytest.mark.parametrize("profile", PROFILES)
def test_every_data_set_has_a_folder(profile):
    """Without one, `repro doctor` and `repro prepare-data` fail."""
    roots = PROFILES[profile]["runtime"]["data_roots"]
    assert not [name for name, cell in PROFILES[profile]["prepare_data"].items() if not {name, cell["kind"]} & {*roots}]


@pytest.mark.parametrize("section", [*TASKS, "prepare_data", "tune"])
@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(PROFILES, 2)])
def test_a_name_means_one_cell_in_all_profiles(one, other, section):
    cells = [
        {name for name, cell in PROFILES[each][section].items() if isinstance(cell, dict)} for each in (one, other)
    ]
    for name in set.intersection(*cells):
        assert PROFILES[one][section][name] == PROFILES[other][section][name], name


@pytest.mark.parametrize("profile", PROFILES)
def test_the_counts_of_the_report_are_the_same_in_every_profile(profile):
    """They depend on no device and no data; fewer would take the place of the committed ones."""
    assert PROFILES[profile]["complexity"] == PROFILES["mini"]["complexity"]


@pytest.mark.parametrize("section", ["efficiency", "visualize", "resolution"])
@pytest.mark.parametrize("profile", ["digits", "cifar10"])
def test_a_stage_without_cells_computes_the_same_in_the_profiles_of_a_cpu(profile, section):
    """Else `profile use` would make it old."""
    assert PROFILES[profile][section] == PROFILES["mini"][section]


@pytest.mark.parametrize("section", ["visualize", "resolution"])
@pytest.mark.parametrize("profile", PROFILES)
def test_a_stage_that_reads_weights_names_their_files_each_of_a_cell(profile, section):
    """dvc.yaml has six places for them."""
    params = PROFILES[profile][section]
    named = set(re.findall(r"artifacts/[\w/]+\.safetensors", json.dumps({**params, "reads": []})))
    if "cell" in params:
        named.add(f"artifacts/pretrain/{params['cell']}/weights.safetensors")
    assert len(params["reads"]) == 6 and set(params["reads"]) == named
    cells = PROFILES[profile]["pretrain"].keys() | PROFILES["mini"]["pretrain"].keys()  # cifar10 has mini's section
    assert {file.split("/")[2] for file in named} <= cells


@pytest.mark.parametrize("profile", PROFILES)
def test_the_receptive_fields_have_the_labels_that_the_page_judges(profile):
    """Fig. 8 shows these three designs of TTT; with another label, a design's statements would be left out silently."""
    assert PROFILES[profile]["visualize"]["receptive_fields"].keys() >= {"Vanilla TTT", "+ Dual", "+ Conv2d"}


def test_digits_holds_every_suite():
    """17 variants twice and 3 of them on other data, 28 readings and ours, 31 of the study, twice 26 of KV binding, twice
    21 of T5.
    """
    counts = {
        r"_digits_7s$": 17,
        r"_digits_own_7s$": 17,
        r"_connect_7s$": 3,
        r"^reading_": 29,
        r"^study_": 31,
        r"^kv_.*_digits_5s$": 26,
        r"^kv_.*_connect_5s$": 26,
        r"^t5_(?!deep_).*_digits_5s$": 21,
        r"^t5_deep_.*_digits_2s$": 21,
    }
    names = [name for section in ("ablate", "ablate_linearize") for name in DIGITS[section] if "scratch" not in name]
    assert {pattern: sum(bool(re.search(pattern, name)) for name in names) for pattern in counts} == counts


@pytest.mark.parametrize(("section", "name"), TRAINED)
def test_a_cell_of_digits_is_what_its_name_says(section, name):
    """It builds its parameters, names golden losses, data and weights that there are, and its seeds and epochs."""
    params = build(TASKS[section].params, DIGITS[section][name], f"{section}.{name}")
    assert params.family in FAMILIES
    assert params.data in DIGITS["prepare_data"]
    for weights in (params.init, getattr(params, "judge", None)):
        if weights is not None:
            folder, stage, start, _ = weights.weights.split("/")
            assert folder == "artifacts" and start in DIGITS[stage] and not stage.startswith("ablate")
    seeds, epochs = re.search(r"_(\d+)s$", name), re.search(r"_(\d+)e_\d+s$", name)
    assert params.seeds == tuple(range(int(seeds[1]) if seeds else 1))
    assert epochs is None or params.epochs == int(epochs[1])
    # what starts from no weights and what inherits a teacher's is in sections of their own, whose graphs differ
    starts = ("linearize", "detect", "segment", "ablate_linearize", "ablate_inherit")
    assert (params.init is not None) == (section in starts)


def without(cell: dict[str, Any], *paths: str) -> dict[str, Any]:
    """A cell without some of its values."""
    left = json.loads(json.dumps(cell))
    for *sections, key in (path.split(".") for path in paths):
        held = left
        for section in sections:
            held = held[section]
        held.pop(key, None)
    return left


# what a group of cells differs in from another one: section, name -> name of the other cell, the values
GROUPS = [
    ("ablate", r"(.*_digits)_own_7s", r"\1_7s", ("optim.lr",)),
    ("ablate", r"(.*)_(?:28|112|224|80|5)e_5s", r"\1_5s", ("epochs",)),
    ("ablate_linearize", r"t5_deep_(.*)_2s", r"t5_\1_5s", ("model", "init", "seeds")),
    ("ablate_detect", r"(.*)_8e_3s", r"\1_3s", ("epochs", "optim.milestones")),
    ("ablate_segment", r"(.*)_12e_3s", r"\1_3s", ("epochs",)),
    ("detect", r"(.*)_8e_3s", r"\1_3s", ("epochs", "optim.milestones")),
    ("segment", r"(.*)_12e_3s", r"\1_3s", ("epochs",)),
]
PAIRS = [
    pytest.param(section, name, re.sub(f"^{ours}$", theirs, name), values, id=f"{section}-{name}")
    for section, ours, theirs, values in GROUPS
    for name in DIGITS[section]
    if re.fullmatch(ours, name) and re.sub(f"^{ours}$", theirs, name) in DIGITS[section]
]


@pytest.mark.parametrize(("section", "name", "other", "values"), PAIRS)
def test_a_cell_differs_from_its_like_in_what_its_name_says(section, name, other, values):
    assert without(DIGITS[section][name], *values) == without(DIGITS[section][other], *values)


def test_the_pairs_cover_their_groups():
    assert len(PAIRS) == 17 + 12 + 21 + 3 + 3 + 1 + 1


@pytest.mark.parametrize(("section", "name"), [(s, name) for s in ("detect", "segment") for name in DIGITS[s]])
def test_random_weights_are_all_that_a_cell_differs_in_from_the_pretrained_one(section, name):
    other = DIGITS[f"ablate_{section}"][name.replace("_scenes", "_scenes_random")]
    assert without(DIGITS[section][name], "init") == without(other, "init")


@pytest.mark.parametrize("name", DIGITS["tune"])
def test_a_search_is_of_a_cell_on_seeds_that_nobody_reports(name):
    search = DIGITS["tune"][name]
    section, _, cell = search["cell"].partition(".")
    searched = DIGITS[section][cell]
    assert [search[key] for key in ("family", "data")] == [searched[key] for key in ("family", "data")]
    assert search["seed"] not in searched["seeds"]
    # a rate that the search can come to: of its own, or one of these doubled or halved
    assert any(searched["optim"]["lr"] == rate * 2.0**step for rate in search["lr"] for step in range(-3, 4))
    assert re.match(rf"{name}(_|$)", cell)
