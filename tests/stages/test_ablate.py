"""`repro ablate` as a user runs it: the grid counted by hand, and cells that are killed and continue."""

import csv
import dataclasses
import json
import signal
import statistics
from pathlib import Path

import pytest
import yaml

from repro import papers
from repro.bench.flops import cost
from repro.bench.speed import describe_samples, unmeasured_row
from repro.core.config import load_section
from repro.core.hashing import hash_file
from repro.core.paths import Paths
from repro.core.runtime import choose_device, device_slug, load_runtime
from repro.papers.grid import build_variant, choose_variants, vary_recipe
from repro.papers.variants import load_variants
from repro.runs.cells import train_cells
from repro.runs.job import Cell
from repro.tasks.classification.params import MesaParams
from repro.tasks.classification.spec import SPEC
from tests.stages.helpers import ABLATE, add_params, edit, read_metrics, stop_at_state

VARIANTS = load_variants("vision_ttt").options
CELL = Path("results/ablate/conv1d")


@pytest.fixture
def ready(checkout) -> Path:
    """The checkout with one cell more; its pretrain cell is made as short as the grid is to be."""
    edit("    epochs: 2\n", "    epochs: 1\n", "[0, 2]", "[]")
    add_params(checkout, ABLATE)
    return checkout


def make_cell(root: Path, name: str, **changes) -> Cell:
    """The cell of the checkout, to be trained into the folder of this name."""
    paths = Paths(root)
    params = dataclasses.replace(load_section(SPEC.params, paths.params, "ablate", "conv1d"), **changes)
    about = {"params": params, "spec": SPEC, "paths": paths, "runtime": load_runtime(paths)}
    return Cell(stage="ablate", name=name, folder=Path(name), **about)


# Tables 3 and 4 by spec, in thousands: projections 4/3/4/4/6/6 of D², Conv1d, DWConv; a class token and its position
# are 2·D each; W0 of 12 blocks
THOUSANDS = dict(ttt_layer=5877, share_qk=5435, gating=5889, conv1d=5900, dual=6962, conv2d=6983, max=6983)
THOUSANDS |= {"head": 6983.116 + 0.384, "double": 6983.116 + 0.768}
THOUSANDS |= {"w0_shared": 6983.116 - 147.456, "w0_frozen": 6983.116 - 2 * 147.456}
THOUSANDS |= {"chunk4": 6983.116 - 24 * 0.012, "chunk_all": 6983.116 + 24 * 0.180}


@pytest.mark.parametrize("name", THOUSANDS)
def test_parameters_of_the_variants_by_hand(name):
    counted = cost("vittt_tiny_patch16_224", VARIANTS[name], (224, 224)).num_params
    assert counted / 1e3 == pytest.approx(THOUSANDS[name], abs=0.5)


@pytest.mark.slow
def test_a_cell_that_is_killed_between_and_within_seeds_ends_with_the_same_weights(ready, repro_cli):
    train_cells([make_cell(ready, "whole")])
    for seed in (0, 1):
        stop_at_state("ablate", "conv1d", signal.SIGKILL, seed)
        assert not CELL.exists()
    # the first seed's last step: it is not trained again
    assert "continuing after step 8" in repro_cli.run("ablate", "--cell", "conv1d")
    ours, theirs = read_metrics(CELL), read_metrics(Path("whole"))
    assert ours["by_seed"] == theirs["by_seed"] and len({entry["weights_hash"] for entry in ours["by_seed"]}) == 2
    for name in ("weights.safetensors", "curve.csv"):
        assert (CELL / name).read_bytes() == (Path("whole") / name).read_bytes()
    assert not list(Path(".runs").rglob("*.pt")) and not (CELL / "speed.json").exists()
    top1 = [entry["top1_percent"] for entry in ours["by_seed"]]
    assert (ours["top1_percent"], ours["top1_std_percent"]) == (statistics.fmean(top1), statistics.stdev(top1))
    # with two seeds Student's t has one degree of freedom, whose 97.5 % quantile is tan(0.475 pi) = 12.706
    half_width = 12.7062 * statistics.stdev(top1) / 2**0.5
    assert ours["top1_ci95_percent"][1] - ours["top1_percent"] == pytest.approx(half_width, rel=1e-4)
    assert ours["weights_hash"] == hash_file(CELL / "weights.safetensors") == ours["by_seed"][0]["weights_hash"]
    options = {"depth": 1, "design": "conv1d", "num_classes": 10}
    assert ours["num_params"] == cost("vittt_nano_patch16_144", options, (32, 32)).num_params
    assert [row["seed"] for row in csv.DictReader(open(CELL / "curve.csv"))] == ["0", "1"]


@pytest.mark.parametrize("paper", ["vision_ttt", "vit3", "linearize", "kv_binding"])
def test_the_variants_are_those_of_the_paper_that_is_named(ready, monkeypatch, repro_cli, paper):
    asked = []
    monkeypatch.setattr("repro.papers.grid.run_variants", lambda *chosen, **lengths: asked.append(chosen))
    repro_cli.run("ablate", "--paper", paper, "--all")
    ((found, variant),) = asked
    own = yaml.safe_load((Path(papers.__file__).parent / paper / "variants.yaml").read_text())
    assert list(found.variants) == list(own["variants"]) and variant is None
    # what each of its processes is asked to train, and where that goes
    assert found.flags == ("--paper", paper) and found.folder == own["folder"]


def measure_32(spec):
    """A row as a machine gives it on which 32 images fit, and no more."""
    if spec.batch_size > 32:
        return unmeasured_row(spec, "oom", "made up")
    counted = unmeasured_row(spec, "failed", "made up")
    return {**counted, **describe_samples([2.0] * 10), "throughput_img_per_s": 16e3}


def test_two_jobs_one_that_fails_and_more_seeds(ready, monkeypatch, repro_cli):
    """Two variants in two processes, of which one finds its folder in the way; then the other gets a seed more."""
    every = load_variants("vision_ttt")
    two = dataclasses.replace(every, variants={name: every.variants[name] for name in ("conv1d", "head")})
    monkeypatch.setattr("repro.papers.grid.load_variants", lambda room: two)
    blocked = Paths(ready).measured(device_slug(choose_device("cpu"))) / "ablate/digits/head"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("in the way")
    code, out, err = repro_cli("ablate", "--all", "--seeds", "1", "--jobs", "2", "--no-speed")
    assert code == 1 and err.count("\n") == 1 and "ablate/digits/head" in err
    assert "1 of 2 failed, the others are done: head: " in err
    assert "2 variants of vittt_nano_patch16_144 on digits, 1 epochs, 1 seed(s): 2 trainings to do" in out
    folder = blocked.parent / "conv1d"
    weights = (folder / "weights.safetensors").read_bytes()
    monkeypatch.setattr("repro.papers.grid.measure", measure_32)
    repro_cli.run("ablate", "--variant", "conv1d", "--seeds", "2")
    metrics = read_metrics(folder)
    assert [entry["seed"] for entry in metrics["by_seed"]] == metrics["seeds"] == [0, 1]
    speed = json.loads((folder / "speed.json").read_text())["metrics"]
    found = speed["throughput_img_per_s"], speed["batch_size"], speed["weights_hash"]
    assert found == (16e3, 32, metrics["weights_hash"])
    assert [row["seed"] for row in csv.DictReader(open(folder / "curve.csv"))] == ["0", "1"]
    assert (folder / "weights.safetensors").read_bytes() == weights
    err = repro_cli.refuse("ablate", "--variant", "conv1d", "--seeds", "2", "--epochs", "3")
    assert "holds a run with other params (1 epochs, seeds 0, 1)" in err


def test_data_without_a_recipe_of_its_own_is_not_cropped(ready):
    chosen, pairs = choose_variants("vision_ttt"), (("imagenet", None), (None, 7))
    params, own = (vary_recipe(chosen, "head", Paths(ready), data=d, seeds=(0,), epochs=n) for d, n in pairs)
    assert params.options == {"depth": 1, "pool": "head"} and params.data == "imagenet" and params.epochs == 1
    assert params.transform.scale == (1.0, 1.0) and params.transform.re_prob == 0.0
    assert own.transform.re_prob == 0.25 and own.epochs == 7


def test_another_papers_variant_by_its_own_recipe(ready, repro_cli):
    """`pretrain` has no model of the study here; its results and names do not meet those of Vittt's variants."""
    arguments = ("ablate", "--paper", "vit3", "--variant", "fc", "--seeds", "1", "--epochs", "1", "--no-speed")
    out = repro_cli.run(*arguments)
    assert "departs from the paper: model: study_nano_patch4_32" in out and "epochs: 1, the paper has 300" in out
    (folder,) = ready.glob("results/measured/*/ablate/vit3/digits/fc")
    metrics = read_metrics(folder)
    found = metrics["model"], metrics["options"], metrics["image_size"]
    assert found == ("study_nano_patch4_32", {"inner_model": "fc"}, 32) and "mesa" not in metrics
    built = build_variant(choose_variants("vit3"), "fc", Paths(ready), data=None, seeds=1, epochs=1)
    assert built.cell.name == "vit3_digits_fc" and built.arguments[:4] == ("--paper", "vit3", "--variant", "fc")
    assert repro_cli(*arguments) == (0, "", "")  # it is there


def test_the_record_of_a_training_with_mesa_says_so(ready):
    mesa = MesaParams(weight=1.5, start_fraction=0.0)
    train_cells([make_cell(ready, "taught", seeds=(0,), ema_decay=0.9, mesa=mesa)])
    assert read_metrics(Path("taught"))["mesa"] == {"weight": 1.5, "temperature": 1.0, "start_fraction": 0.0}
