"""`repro tune` as a user runs it: a real search, its rule by hand, and every wrong input as one line."""

import json
import math
from pathlib import Path

import pytest

from repro.core.config import find_cell, load_section, load_yaml
from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.record import read_json, write_json
from repro.papers.grid import build_variant, choose_variants, find_variant_searches, use_own_rates
from repro.runs.tune import STAGE, TuneParams, _list_open, _trial_file, choose, find_searches, widen
from repro.tasks.classification.spec import SPEC
from tests.conftest import ROOT
from tests.stages.helpers import accept_data, edit

# the second rate is so high that its training ends
SEARCH = "tune: {lr: [3.0e-3, 1.0e+30], warmup_epochs: [0], seed: 7}\n"


@pytest.fixture
def ready(checkout) -> Path:
    """The checkout with a search of two trials of one epoch."""
    edit("    epochs: 2\n", "    epochs: 1\n    max_bad_steps: 2\n", "[0, 2]", "[]")
    edit("warmup_epochs: 0}", "warmup_epochs: 0, clip_grad_norm: null}")
    with open("params.yaml", "a") as stream:
        stream.write(SEARCH)
    return checkout


def trial(score, lr, warmup_epochs, diverged=False):
    return {"top1_percent": score, "lr": lr, "warmup_epochs": warmup_epochs, "diverged": diverged}


def test_the_rule_by_hand():
    """The highest score; among equals the lower rate, then the shorter warm-up; one that diverged never."""
    best = trial(90.0, 1e-3, 1)
    others = [trial(89.0, 5e-4, 1), trial(90.0, 2e-3, 1), trial(90.0, 1e-3, 2), trial(None, 5e-4, 1, diverged=True)]
    assert choose([*others, best], "top1_percent") is best and choose([best, *others], "top1_percent") is best
    assert choose(others[-1:], "top1_percent") is None


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
    found = widen(TuneParams(lr=rates, warmup_epochs=warmups), trial(90.0, *best), epochs=4)
    assert (found and ({*found.lr}, {*found.warmup_epochs})) == wider


@pytest.mark.parametrize(("peak", "rates"), [(1, [1, 2, 0.5]), (64, [1, 2, 4, 8, 16])])
def test_a_search_goes_on_until_its_best_is_inside(ready, peak, rates):
    """The score falls with the distance of the rate from a peak; after three widenings the search ends."""
    edit("lr: [3.0e-3, 1.0e+30]", "lr: [1.0, 2.0]")
    (search,) = find_searches(SPEC, "digits", None)
    while len(done := search.find_finished()) < len(search.trials):
        for number, each in enumerate(search.trials, 1):
            if number not in done:
                lr = each.params.optim.lr
                found = trial(-abs(math.log2(lr / peak)), lr, 0)
                write_json(_trial_file(each), {"origin": search.find_origin(each), "trial": found})
    trials = [content["trial"] for content in search.find_finished().values()]
    assert [each["lr"] for each in trials] == rates


def test_a_search_is_recorded_continues_and_never_sees_test(ready, repro_cli):
    for image in Path("data/digits/test").rglob("*.png"):  # whoever read it would end with an error
        image.write_bytes(b"\0" * image.stat().st_size)
    accept_data()
    for number, says in ((1, "nano_lr0.003_warmup0: "), (2, "nano_lr1e+30_warmup0: diverged")):
        assert says in repro_cli.run("tune", "--data", "digits", "--cell", "nano", "--trial", str(number))
    out = repro_cli.run("tune", "--data", "digits")
    assert "1 open cells, 3 trials: 1 trainings to do" in out
    (file,) = Path("results/measured").glob("*/tune/nano.json")
    metrics = json.loads(file.read_text())["metrics"]
    first, second, third = metrics["trials"]  # the lower rate was the better one, so that one below was tried
    assert third["lr"] == pytest.approx(3e-3**2 / 1e30, abs=0)
    assert (first["lr"], first["warmup_epochs"], first["diverged"]) == (3e-3, 0, False)
    assert 5 < first["top1_percent"] <= 100 and first["train_loss"] > 0
    assert second["diverged"] and second["top1_percent"] is None and "not finite" in second["reason"]
    assert metrics["chosen"] == {"lr": 3e-3, "warmup_epochs": 0} and (metrics["split"], metrics["seed"]) == ("tune", 7)
    assert "chosen" in out and not list(Path(".runs/tune").glob("*/*"))
    before = file.stat().st_mtime_ns
    assert "0 trainings to do" in repro_cli.run("tune", "--data", "digits") and file.stat().st_mtime_ns == before
    edit("seed: 7", "seed: 8")
    assert "holds a search with other params; move the file away" in repro_cli.refuse("tune", "--data", "digits")


def test_the_rates_of_the_mini_profile_are_those_that_were_chosen():
    """Those of params.yaml are the profile's, see test_profile.py."""
    profile = ROOT / "profiles/mini.yaml"
    load_section(TuneParams, profile, "tune")
    searches: dict[str, list] = {}
    for file in ROOT.glob("results/measured/*/tune/*.json"):
        if not file.name.endswith(".run.json"):
            metrics = read_json(file)["metrics"]
            searches.setdefault(metrics["cell"], []).append(metrics)
    if not searches:
        pytest.skip("no search is recorded")
    for name, found in searches.items():
        stage, cell = name.split(".")
        assert stage == STAGE
        optim = load_section(SPEC.params, profile, *find_cell(profile, stage, cell)).optim
        # of one of its searches, of which some are wider: the page says which cell is trained by a narrower one
        assert any({key: getattr(optim, key) for key in each["chosen"]} == each["chosen"] for each in found), name


def test_a_cell_outside_the_pipeline_is_searched_where_it_is_named(ready):
    content = load_yaml(Path("params.yaml"))
    ((name, cell),) = content["pretrain"].items()
    Path("params.yaml").write_text(json.dumps(content | {"by_hand": {"pretrain": {"other": cell}}}))
    assert [search.cell.name for search in find_searches(SPEC, "digits", "other")] == ["other"]
    assert [search.cell.name for search in find_searches(SPEC, "digits", None)] == [name]


def test_the_variants_of_a_paper_are_searched_around_the_rate_of_their_recipe_and_trained_at_their_own(ready):
    """Without a record of the search there is no rate, and one line says how to get it."""
    grid, path = choose_variants("vision_ttt"), Paths(ready)
    (search,) = find_variant_searches(grid, "digits", "head")
    tried = [trial.params.optim.lr for trial in search.trials]
    assert search.cell.where == "ablate.digits_head"
    assert tried == pytest.approx([1.5e-3, 3e-3, 6e-3]) and search.trials[0].params.options["pool"] == "head"
    (work, *_) = _list_open(search).values()
    assert work.arguments == (*"tune --data digits --paper vision_ttt --cell head --trial 1".split(),)
    with pytest.raises(UserError, match="no search of head on digits; run `repro tune"):
        use_own_rates(grid, "digits", "head")
    chosen = {"trials": [{}, {}, {}], "chosen": {"lr": 6e-3, "warmup_epochs": 0}}
    write_json(ready / "results/measured/any/tune/variants/digits_head.json", {"metrics": chosen})
    own = use_own_rates(grid, "digits", "head")
    cell = build_variant(own, "head", path, data="digits", seeds=2, epochs=None).cell
    assert (cell.params.optim.lr, cell.params.options["pool"]) == (6e-3, "head")
    assert cell.folder.parts[-4:] == ("ablate", "own_rates", "digits", "head")
    assert cell.name == "own_rates_digits_head"
