"""`repro ablate` as a user runs it: variants counted by hand, the sections it trains, and cells that are killed and
continue.
"""

import csv
import dataclasses
import signal
import statistics
from pathlib import Path

import pytest
import yaml

from repro.bench.flops import cost
from repro.core.config import load_section, load_yaml
from repro.core.hashing import hash_file
from repro.core.paths import Paths
from repro.core.runtime import load_runtime
from repro.runs.cells import train_cells
from repro.runs.job import Cell
from repro.tasks.classification.params import MesaParams
from repro.tasks.classification.spec import SPEC
from stages import load_stages
from tests.conftest import ROOT
from tests.stages.helpers import ABLATE, add_params, read_metrics, stop_at_state, use_profile

PROFILE = ROOT / "profiles/digits.yaml"
DIGITS = load_yaml(PROFILE)
SECTIONS = ("ablate", "ablate_linearize", "ablate_detect", "ablate_segment", "ablate_generate", "ablate_inherit")
RECORD, CELL = Path("results/ablate/conv1d/metrics.json"), Path("artifacts/ablate/conv1d")


@pytest.fixture
def ready(checkout) -> Path:
    """The checkout with one cell more."""
    add_params(checkout, ABLATE)
    return checkout


def make_cell(root: Path, name: str, **changes) -> Cell:
    """The cell of the checkout, by another name."""
    paths = Paths(root)
    params = dataclasses.replace(load_section(SPEC.params, paths.params, "ablate", "conv1d"), **changes)
    about = {"params": params, "spec": SPEC, "paths": paths, "runtime": load_runtime(paths)}
    return Cell(stage="ablate", name=name, record=paths.cell("ablate", name) / "metrics.json", **about)


# Tables 3 and 4 by spec, in thousands: projections 4/3/4/4/6/6 of D², Conv1d, DWConv; a class token and its position
# are 2·D each; W0 of 12 blocks
THOUSANDS = dict(ttt_layer=5877, share_qk=5435, gating=5889, conv1d=5900, dual=6962, conv2d=6983, max=6983)
THOUSANDS |= {"head": 6983.116 + 0.384, "double": 6983.116 + 0.768}
THOUSANDS |= {"w0_shared": 6983.116 - 147.456, "w0_frozen": 6983.116 - 2 * 147.456}
THOUSANDS |= {"chunk4": 6983.116 - 24 * 0.012, "chunk_all": 6983.116 + 24 * 0.180}


@pytest.mark.parametrize("name", THOUSANDS)
def test_parameters_of_the_variants_by_hand(name):
    params = load_section(SPEC.params, PROFILE, "ablate", f"{name}_digits_7s")
    counted = cost("vittt_tiny_patch16_224", params.options, (224, 224)).num_params
    assert counted / 1e3 == pytest.approx(THOUSANDS[name], abs=0.5)


@pytest.mark.slow
def test_a_cell_that_is_killed_between_and_within_seeds_ends_with_the_same_weights(ready, repro_cli):
    whole = make_cell(ready, "whole")
    train_cells([whole])
    for seed in (0, 1):
        stop_at_state("ablate", "conv1d", signal.SIGKILL, seed)
        assert not CELL.exists() and not RECORD.exists()
    # the first seed's last step: it is not trained again
    assert "continuing after step 8" in repro_cli.run("ablate", "--cell", "conv1d")
    ours, theirs = read_metrics(RECORD), read_metrics(whole.record)
    assert ours["by_seed"] == theirs["by_seed"] and len({entry["weights_hash"] for entry in ours["by_seed"]}) == 2
    for name in ("weights.safetensors", "curve.csv"):
        assert (CELL / name).read_bytes() == (whole.folder / name).read_bytes()
    assert not list(Path(".runs").rglob("*.pt"))
    top1 = [entry["top1_percent"] for entry in ours["by_seed"]]
    assert (ours["top1_percent"], ours["top1_std_percent"]) == (statistics.fmean(top1), statistics.stdev(top1))
    # with two seeds Student's t has one degree of freedom, whose 97.5 % quantile is tan(0.475 pi) = 12.706
    half_width = 12.7062 * statistics.stdev(top1) / 2**0.5
    assert ours["top1_ci95_percent"][1] - ours["top1_percent"] == pytest.approx(half_width, rel=1e-4)
    assert ours["weights_hash"] == hash_file(CELL / "weights.safetensors") == ours["by_seed"][0]["weights_hash"]
    options = {"depth": 1, "design": "conv1d", "num_classes": 10}
    assert ours["num_params"] == cost("vittt_nano_patch16_144", options, (32, 32)).num_params
    assert [row["seed"] for row in csv.DictReader(open(CELL / "curve.csv"))] == ["0", "1"]


def choose_two(section: str) -> list[str]:
    """Cells of a section: its first and its last one."""
    names = list(DIGITS[section])
    return [*dict.fromkeys((names[0], names[-1]))]


@pytest.fixture
def asked(bare_checkout, monkeypatch) -> list[list[Cell]]:
    """The cells of each call of `train_cells`, which trains none, in a checkout with two cells of each section."""
    params = {name: DIGITS[name] for name in ("runtime", "prepare_data")}
    params |= {section: {name: DIGITS[section][name] for name in choose_two(section)} for section in SECTIONS}
    Path("params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    calls = []
    monkeypatch.setattr("repro.runs.cells.train_cells", lambda cells, gpus: calls.append(cells))
    return calls


def test_cells_are_trained_as_their_sections_say_by_one_call(asked, repro_cli):
    """One call, since several processes run the whole command again; a name alone is enough where one section has it."""
    repro_cli.run("ablate", "--gpus", "2")
    repro_cli.run("ablate", "--cell", choose_two("ablate_linearize")[0])
    repro_cli.run("ablate", "--cell", f"ablate_inherit.{choose_two('ablate_inherit')[0]}")
    every, (one,), (other,) = asked
    names = [(section, name) for section in SECTIONS for name in choose_two(section)]
    for cell, (section, name) in zip(every, names, strict=True):
        assert (cell.where, cell.spec) == (f"{section}.{name}", load_stages()[section].task)
        assert cell.params == load_section(cell.spec.params, PROFILE, section, name)
        assert cell.is_of_graph and cell.record == cell.paths.cell(section, name) / "metrics.json"
        # a paper's recipe is printed of classifiers
        assert (cell.recipe is not None) == (section in ("ablate", "ablate_linearize"))
    assert one.where == f"ablate_linearize.{choose_two('ablate_linearize')[0]}"
    assert other.where == f"ablate_inherit.{choose_two('ablate_inherit')[0]}"


def test_a_profile_without_such_cells_names_the_one_that_has_them(bare_checkout, repro_cli):
    use_profile("mini")
    assert "repro profile use digits" in repro_cli.refuse("ablate")


def test_another_papers_variant_by_its_own_recipe(ready, repro_cli):
    """`pretrain` has no model of the study here."""
    study = DIGITS["ablate"]["study_fc_digits_5s"] | {"seeds": [0], "epochs": 1, "steps_per_epoch": 2}
    study |= {"optim": study["optim"] | {"warmup_epochs": 0}}
    add_params(ready, yaml.safe_dump({"ablate": {"study_fc": study}}))
    out = repro_cli.run("ablate", "--cell", "study_fc")
    assert "departs from the paper: model: study_nano_patch4_32" in out and "epochs: 1, the paper has 300" in out
    metrics = read_metrics(Path("results/ablate/study_fc/metrics.json"))
    found = metrics["model"], metrics["options"], metrics["image_size"]
    assert found == ("study_nano_patch4_32", {"inner_model": "fc"}, 32) and "mesa" not in metrics


def test_the_record_of_a_training_with_mesa_says_so(ready):
    mesa = MesaParams(weight=1.5, start_fraction=0.0)
    train_cells([taught := make_cell(ready, "taught", seeds=(0,), steps_per_epoch=2, ema_decay=0.9, mesa=mesa)])
    assert read_metrics(taught.record)["mesa"] == {"weight": 1.5, "temperature": 1.0, "start_fraction": 0.0}
