"""`repro tune` as a user runs it: a real search, its rule by hand, and the searches of the profile digits."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from repro.core.config import load_yaml
from repro.core.errors import RunError
from repro.core.paths import Paths
from repro.core.record import read_json
from repro.papers.vision_ttt.paper import PAPER
from repro.runs import tune
from repro.runs.tune import TuneParams, choose_trial, read_searches, run_search, widen
from repro.tasks.classification.spec import SPEC
from tests.conftest import ROOT
from tests.stages.helpers import accept_data, add_params, edit, read_metrics, use_profile

# the second rate is so high that its training ends
SEARCH = "tune: {nano: {cell: pretrain.nano, family: vittt, data: digits, lr: [3.0e-3, 1.0e+30], seed: 7}}"
RECORD = Path("results/tune/nano/metrics.json")
SPECS = {"pretrain": SPEC, "ablate": SPEC}
DIGITS = load_yaml(ROOT / "profiles/digits.yaml")


@pytest.fixture
def ready(checkout) -> Path:
    """The checkout with a search of two trials of one epoch."""
    edit("    epochs: 2\n", "    epochs: 1\n    max_bad_steps: 2\n", "[0, 2]", "[]")
    edit("warmup_epochs: 0}", "warmup_epochs: 0, clip_grad_norm: null}")
    add_params(checkout, SEARCH)
    return checkout


def trial(score, lr, warmup_epochs, diverged=False):
    return {"top1_percent": score, "lr": lr, "warmup_epochs": warmup_epochs, "diverged": diverged}


def test_the_rule_by_hand():
    """The highest score; among equals the lower rate, then the shorter warm-up; one that diverged never."""
    best = trial(90.0, 1e-3, 1)
    others = [trial(89.0, 5e-4, 1), trial(90.0, 2e-3, 1), trial(90.0, 1e-3, 2), trial(None, 5e-4, 1, diverged=True)]
    assert (
        choose_trial([*others, best], "top1_percent") is best and choose_trial([best, *others], "top1_percent") is best
    )
    assert choose_trial(others[-1:], "top1_percent") is None


RATES = (1e-3, 2e-3, 4e-3)


@pytest.mark.parametrize(
    ("rates", "warmups", "best", "wider"),
    [
        (RATES, (1, 2), (2e-3, 1), ({*RATES}, {0, 1, 2})),
        (RATES, (1, 2), (2e-3, 2), ({*RATES}, {1, 2, 3})),
        (RATES, (1, 2), (4e-3, 2), ({*RATES, 8e-3}, {1, 2, 3})),
        (RATES, (1, 2), (1e-3, 2), ({*RATES, 5e-4}, {1, 2, 3})),
        # the best one inside, a warm-up as long as the training or of 0, and a rate that was given alone
        (RATES, (0, 1, 2), (2e-3, 1), None),
        (RATES, (1, 2, 3), (2e-3, 3), None),
        (RATES, (0, 1, 2), (2e-3, 0), None),
        ((1e-3,), (1,), (1e-3, 1), None),
    ],
)
def test_a_grid_is_widened_where_something_lies_beyond_its_best(rates, warmups, best, wider):
    grid = TuneParams(cell="pretrain.nano", family="vittt", data="digits", lr=rates, warmup_epochs=warmups)
    found = widen(grid, trial(90.0, *best), epochs=4)
    assert (found and ({*found.lr}, {*found.warmup_epochs})) == wider


@pytest.mark.parametrize(
    ("peak", "rates"), [(1, [1, 2, 0.5]), (0.25, [1, 2, 0.5, 0.25, 0.125]), (64, [1, 2, 4, 8, 16])]
)
def test_a_search_goes_on_until_its_best_is_inside(ready, monkeypatch, peak, rates):
    """The score falls with the distance of the rate from a peak; after three widenings the search ends."""
    (search,) = read_searches(SPECS, "nano")
    search = dataclasses.replace(search, tune=dataclasses.replace(search.tune, lr=(1.0, 2.0)))
    trained = []

    def run(_, cell):
        trained.append(lr := cell.params.optim.lr)
        found = trial(-abs(math.log2(lr / peak)), lr, 0) | {"train_loss": 1.0}
        return {"place": {"device": "cpu", "dtype": "fp32", "backend": "torch"}, "trial": found}

    monkeypatch.setattr(tune, "_run_trial", run)
    run_search(search)
    assert trained == [each["lr"] for each in read_metrics(RECORD)["trials"]] == rates


def test_a_search_is_recorded_continues_and_never_sees_test(ready, monkeypatch, repro_cli):
    for image in Path("data/digits/test").rglob("*.png"):  # whoever read it would end with an error
        image.write_bytes(b"\0" * image.stat().st_size)
    accept_data()
    run_job, trained = tune.run_job, []

    def stop_at_the_second(job):
        trained.append(job.params.optim.lr)
        if len(trained) == 2:
            raise RunError("stopped")
        return run_job(job)

    monkeypatch.setattr(tune, "run_job", stop_at_the_second)
    assert "stopped" in repro_cli.refuse("tune", "--cell", "nano", code=1)
    assert not RECORD.exists()
    out = repro_cli.run("tune", "--cell", "nano")
    assert "nano_lr1e+30_warmup0: diverged" in out and "chosen" in out
    # the lower rate was the better one, so that one below was tried
    below = pytest.approx(3e-3**2 / 1e30, abs=0)
    assert trained == [3e-3, 1e30, 1e30, below]
    metrics = read_metrics(RECORD)
    first, second, third = metrics["trials"]
    assert third["lr"] == below
    assert (first["lr"], first["warmup_epochs"], first["diverged"]) == (3e-3, 0, False)
    assert 5 < first["top1_percent"] <= 100 and first["train_loss"] > 0
    assert second["diverged"] and second["top1_percent"] is None and "not finite" in second["reason"]
    assert metrics["chosen"] == {"lr": 3e-3, "warmup_epochs": 0} and (metrics["split"], metrics["seed"]) == ("tune", 7)
    assert read_json(RECORD)["identity"]["params_hash"] and not list(Path(".runs/tune").glob("*/*"))


def test_a_trial_counts_for_its_initial_weights_alone(tmp_path, monkeypatch):
    runs, weights, manifest = [], tmp_path / "weights", tmp_path / "manifest"
    for file in (weights, manifest):
        file.write_text("before")
    monkeypatch.setattr(tune, "params_hash", lambda params: "p")
    monkeypatch.setattr(tune, "hash_golden", lambda paths, params: "g")
    monkeypatch.setattr(tune, "build_job", lambda trial, seed: trial.state_folder(seed).mkdir(parents=True))
    monkeypatch.setattr(tune, "find_place", lambda job: {})
    found = SimpleNamespace(metrics={"top1_percent": 50.0, "train_loss": 1.0, "split": "tune"})
    monkeypatch.setattr(tune, "run_job", lambda job: runs.append(weights.read_text()) or found)
    params = SimpleNamespace(optim=SimpleNamespace(lr=0.1, warmup_epochs=0), init="weights")
    of = {"name": "t", "paths": None, "inputs": (manifest, weights), "init": weights, "spec": SPEC}
    cell = SimpleNamespace(params=params, state_folder=lambda seed: tmp_path / "t" / f"seed_{seed}", **of)
    search = SimpleNamespace(score="top1_percent", tune=SimpleNamespace(seed=7))
    for text in ("before", "before", "after"):
        weights.write_text(text)
        tune._run_trial(search, cell)
    assert runs == ["before", "after"]


# a machine's searches stand beside each other; some are wider
PLACES = ("results/tune/{}/metrics.json", "results/replications/*/tune/{}.json")
SEARCHES = {name: [file for place in PLACES for file in ROOT.glob(place.format(name))] for name in DIGITS["tune"]}


@pytest.mark.parametrize("name", [name for name, files in SEARCHES.items() if files])
def test_the_rates_of_the_profile_digits_are_those_that_were_chosen(name):
    section, _, cell = DIGITS["tune"][name]["cell"].partition(".")
    optim, found = DIGITS[section][cell]["optim"], [read_metrics(file) for file in SEARCHES[name]]
    assert {(each["model"], each["data"]) for each in found} == {
        (DIGITS[section][cell]["model"], DIGITS["tune"][name]["data"])
    }
    assert any({key: optim[key] for key in each["chosen"]} == each["chosen"] for each in found)


@pytest.mark.slow
def test_the_variants_of_a_paper_are_searched_around_the_rate_of_their_recipe(bare_checkout):
    paths = use_profile("digits")
    for variant in PAPER.variants:
        (search,) = read_searches(SPECS, f"{variant}_digits")
        recipe = DIGITS["ablate"][f"{variant}_digits_7s"]
        trials = search.list_trials(search.tune)
        lr = recipe["optim"]["lr"]
        assert [each.params.optim.lr for each in trials] == pytest.approx([lr / 2, lr, lr * 2])
        assert search.cell.where == f"ablate.{variant}_digits_own_7s"
        assert search.cell.record == Paths(bare_checkout).results / f"tune/{variant}_digits/metrics.json"
        for each in trials:
            params = each.params
            assert (params.options, params.epochs) == (recipe["options"], recipe["epochs"]) and not each.reported
            assert not {*params.seeds} & {*recipe["seeds"]}
            assert each.state_folder(100).is_relative_to(paths.root / ".runs/tune")
