"""`repro ablate` as a user runs it: the grid counted by hand, cells that are killed and continue, and every wrong input
as one line.
"""

import csv
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from repro import papers
from repro.bench.flops import cost
from repro.core.config import load_section
from repro.core.paths import Paths
from repro.core.record import read_record
from repro.core.runtime import load_runtime
from repro.papers.grid import build_variant, choose_variants, vary_recipe
from repro.papers.variants import load_variants
from repro.runs.cells import train_cells
from repro.runs.job import Cell
from repro.tasks.classification.params import MesaParams
from repro.tasks.classification.spec import SPEC
from tests.stages.helpers import ABLATE

VARIANTS = load_variants("vision_ttt").options
CELL = Path("results/ablate/conv1d")
COMMAND = [sys.executable, "-m", "repro", "ablate"]


@pytest.fixture
def ready(checkout) -> Path:
    """The checkout with one cell more; its pretrain cell is made as short as the grid is to be."""
    text = Path("params.yaml").read_text().replace("    epochs: 2\n", "    epochs: 1\n", 1).replace("[0, 2]", "[]")
    Path("params.yaml").write_text(text + ABLATE)
    return checkout


def record(folder: Path) -> dict:
    return read_record(folder / "metrics.json")


@pytest.mark.parametrize(
    ("name", "thousands"),
    # Tables 3 and 4 by spec: projections 4/3/4/4/6/6 of D², Conv1d, DWConv; a class token and its position are 2·D
    # each; W0 of 12 blocks
    [
        ("ttt_layer", 5877),
        ("share_qk", 5435),
        ("gating", 5889),
        ("conv1d", 5900),
        ("dual", 6962),
        ("conv2d", 6983),
        ("head", 6983.116 + 0.384),
        ("double", 6983.116 + 0.768),
        ("max", 6983),
        ("w0_shared", 6983.116 - 147.456),
        ("w0_frozen", 6983.116 - 2 * 147.456),
        ("chunk4", 6983.116 - 24 * 0.012),
        ("chunk_all", 6983.116 + 24 * 0.180),
    ],
)
def test_parameters_of_the_variants_by_hand(name, thousands):
    assert cost("vittt_tiny_patch16_224", VARIANTS[name], (224, 224)).num_params / 1e3 == pytest.approx(
        thousands, abs=0.5
    )


@pytest.mark.slow
def test_a_cell_that_is_killed_between_and_within_seeds_ends_with_the_same_weights(ready, repro_cli):
    paths, whole = Paths(ready), Path("whole")
    params = load_section(SPEC.params, paths.params, "ablate", "conv1d")
    cell = Cell(
        stage="ablate", name="whole", params=params, spec=SPEC, paths=paths, runtime=load_runtime(paths), folder=whole
    )
    train_cells([cell])
    for seed in (0, 1):
        process = subprocess.Popen([*COMMAND, "--cell", "conv1d"], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 1800
        while not list(Path(".runs").glob(f"ablate/conv1d/seed_{seed}-*/step_*.pt")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not CELL.exists()
    code, out, err = repro_cli("ablate", "--cell", "conv1d")
    assert code == 0 and "continuing after step 8" in out, err  # the first seed's last step: it is not trained again
    ours, theirs = record(CELL)["metrics"], record(whole)["metrics"]
    assert (CELL / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()
    assert ours["by_seed"] == theirs["by_seed"] and len({entry["weights_hash"] for entry in ours["by_seed"]}) == 2
    assert (CELL / "curve.csv").read_bytes() == (whole / "curve.csv").read_bytes()
    assert not list(Path(".runs").rglob("*.pt"))
    top1 = [entry["top1_percent"] for entry in ours["by_seed"]]
    assert (ours["top1_percent"], ours["top1_std_percent"]) == (statistics.fmean(top1), statistics.stdev(top1))
    # with two seeds Student's t has one degree of freedom, whose 97.5 % quantile is tan(0.475 pi) = 12.706
    assert ours["top1_ci95_percent"][1] - ours["top1_percent"] == pytest.approx(
        12.7062 * statistics.stdev(top1) / 2**0.5, rel=1e-4
    )
    digest = hashlib.sha256((CELL / "weights.safetensors").read_bytes()).hexdigest()[:16]
    assert ours["weights_hash"] == digest == ours["by_seed"][0]["weights_hash"]
    assert (
        ours["num_params"]
        == cost("vittt_nano_patch16_144", {"depth": 1, "design": "conv1d", "num_classes": 10}, (32, 32)).num_params
    )
    assert not (CELL / "speed.json").exists()
    assert [row["seed"] for row in csv.DictReader(open(CELL / "curve.csv"))] == ["0", "1"]


@pytest.mark.parametrize("paper", ["vision_ttt", "vit3", "linearize", "kv_binding"])
def test_the_variants_are_those_of_the_paper_that_is_named(ready, monkeypatch, repro_cli, paper):
    asked = []
    monkeypatch.setattr("repro.papers.grid.run_variants", lambda *chosen, **lengths: asked.append(chosen))
    assert repro_cli("ablate", "--paper", paper, "--all")[0] == 0
    ((found, variant),) = asked
    own = yaml.safe_load((Path(papers.__file__).parent / paper / "variants.yaml").read_text())
    assert list(found.variants) == list(own["variants"]) and variant is None
    # what each of its processes is asked to train, and where that goes
    assert found.flags == ("--paper", paper) and found.folder == own["folder"]


def test_two_jobs_stopped_continued_one_that_fails_and_more_seeds(ready, monkeypatch, repro_cli):
    """Two variants in two processes, which a signal stops; then one finds its folder in the way; then it gets a seed
    more.
    """
    from repro.core.runtime import choose_device, device_slug

    every = load_variants("vision_ttt")
    two = dataclasses.replace(every, variants={name: every.variants[name] for name in ("conv1d", "head")})
    monkeypatch.setattr("repro.papers.grid.load_variants", lambda room: two)
    arguments = ("ablate", "--all", "--seeds", "1", "--jobs", "2", "--no-speed")
    stopper = threading.Thread(target=stop_when_begun, daemon=True)
    stopper.start()
    code, out, err = repro_cli(*arguments)
    stopper.join()
    assert code == 143 and err.count("\n") == 1 and "the same command continues" in err
    assert "2 variants of vittt_nano_patch16_144 on digits, 1 epochs, 1 seed(s): 2 trainings to do" in out
    blocked = Paths(ready).measured(device_slug(choose_device("cpu"))) / "ablate" / "digits" / "head"
    blocked.parent.mkdir(parents=True, exist_ok=True)
    if blocked.exists():  # stopped after its last step
        shutil.rmtree(blocked)
    blocked.write_text("in the way")
    code, out, err = repro_cli(*arguments)
    assert (
        code == 1
        and err.count("\n") == 1
        and "1 of 2 failed, the others are done: head: " in err
        and "ablate/digits/head" in err
    )
    folder = blocked.parent / "conv1d"
    weights = (folder / "weights.safetensors").read_bytes()
    assert repro_cli("ablate", "--variant", "conv1d", "--seeds", "2")[0] == 0
    metrics = record(folder)["metrics"]
    assert [entry["seed"] for entry in metrics["by_seed"]] == metrics["seeds"] == [0, 1]
    speed = json.loads((folder / "speed.json").read_text())["metrics"]
    # a machine that is too busy gives no speed, but says so
    assert (speed["throughput_img_per_s"] or 0) > 0 or speed["throughput_img_per_s_reason"]
    assert (speed["batch_size"], speed["weights_hash"]) == (64, metrics["weights_hash"])
    assert [row["seed"] for row in csv.DictReader(open(folder / "curve.csv"))] == ["0", "1"]
    assert (folder / "weights.safetensors").read_bytes() == weights
    code, _, err = repro_cli("ablate", "--variant", "conv1d", "--seeds", "2", "--epochs", "3")
    assert code == 2 and err.count("\n") == 1 and "holds a run with other params (1 epochs, seeds 0, 1)" in err


def stop_when_begun() -> None:
    deadline = time.monotonic() + 1800
    while not list(Path(".runs").glob("ablate/digits_*/seed_0-*/step_*.pt")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def test_data_without_a_recipe_of_its_own_is_not_cropped(ready):
    params = vary_recipe(choose_variants("vision_ttt"), "head", Paths(ready), data="imagenet", seeds=(0,), epochs=None)
    assert params.options == {"depth": 1, "pool": "head"} and params.data == "imagenet" and params.epochs == 1
    assert params.transform.scale == (1.0, 1.0) and params.transform.re_prob == 0.0
    assert (
        vary_recipe(
            choose_variants("vision_ttt"), "head", Paths(ready), data=None, seeds=(0,), epochs=7
        ).transform.re_prob
        == 0.25
    )


def test_another_papers_variant_by_its_own_recipe(ready, repro_cli):
    """`pretrain` has no model of the study here; the results do not meet those of Vittt's variants, nor its names in
    .runs.
    """
    from repro.core.runtime import choose_device, device_slug

    arguments = ("ablate", "--paper", "vit3", "--variant", "fc", "--seeds", "1", "--epochs", "1", "--no-speed")
    code, out, err = repro_cli(*arguments)
    assert code == 0, err
    assert "departs from the paper: model: study_nano_patch4_32" in out and "epochs: 1, the paper has 300" in out
    folder = Paths(ready).measured(device_slug(choose_device("cpu"))) / "ablate" / "vit3" / "digits" / "fc"
    metrics = record(folder)["metrics"]
    assert (
        metrics["model"] == "study_nano_patch4_32"
        and metrics["options"] == {"inner_model": "fc"}
        and metrics["image_size"] == 32
    )
    built = build_variant(choose_variants("vit3"), "fc", Paths(ready), data=None, seeds=1, epochs=1)
    assert built.cell.name == "vit3_digits_fc" and built.arguments[:4] == ("--paper", "vit3", "--variant", "fc")
    assert repro_cli(*arguments) == (0, "", "")  # it is there


def test_the_record_of_a_training_with_mesa_says_so(ready):
    """And that of one without does not."""
    paths, params = Paths(ready), load_section(SPEC.params, Paths(ready).params, "ablate", "conv1d")
    params = dataclasses.replace(params, seeds=(0,))
    taught = dataclasses.replace(params, ema_decay=0.9, mesa=MesaParams(weight=1.5, start_fraction=0.0))
    for folder, each in ((Path("plain"), params), (Path("taught"), taught)):
        cell = Cell(
            stage="ablate",
            name=folder.name,
            params=each,
            spec=SPEC,
            paths=paths,
            runtime=load_runtime(paths),
            folder=folder,
        )
        train_cells([cell])
    assert "mesa" not in record(Path("plain"))["metrics"]
    assert record(Path("taught"))["metrics"]["mesa"] == {"weight": 1.5, "temperature": 1.0, "start_fraction": 0.0}
