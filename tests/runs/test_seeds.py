"""Registered trainings: their order and files, searches before seeds, hits that explain the score."""

import base64
import datetime

import numpy as np
import pytest

from repro.core.config import load_yaml
from repro.core.errors import UserError
from repro.core.paths import Paths, find_root
from repro.core.record import pack_hits, read_json, unpack_hits, write_json
from repro.core.runtime import Runtime
from repro.data.manifest import write_manifest
from repro.data.prepare import scan_manifest
from repro.runs import seeds

ROOT = find_root().root
QUESTIONS = load_yaml(ROOT / "repro/papers/vision_ttt/cifar10.yaml")
PROFILE = load_yaml(ROOT / "profiles/cifar10.yaml")
CELL = """
  {name}:
    model: deit_nano_patch16_144
    options: {{patch_size: 16, embed_dim: 16, depth: 1}}
    data: made
    seeds: [0, 1]
    epochs: 2
    batch_size: 4
    drop_path: 0.0
    precision: fp32
    optim: {{lr: {rate}, lr_batch_size: 4, warmup_epochs: 0}}
    mix: {{mixup: 0.0, cutmix: 0.0}}
    transform: {{image_size: 32, hflip: 0.0, crop_pct: 1.0}}
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose data are the committed pictures, with two cells, and which has no code of its own."""
    (tmp_path / "dvc.yaml").touch()
    pictures = ROOT / "results/golden/pictures/classes"
    write_manifest(tmp_path / "results/prepare_data/made/manifest.json", scan_manifest(pictures, "folder"))

    def write(**rates):
        cells = "".join(CELL.format(name=f"{name}_made", rate=rate) for name, rate in rates.items())
        (tmp_path / "params.yaml").write_text(f"prepare_data: {{made: {{kind: folder}}}}\npretrain_seeds:{cells}")
        runtime = Runtime(device="cpu", threads=1, data_roots={"made": str(pictures)})
        return list(seeds.list_trainings(Paths(tmp_path), runtime))

    write.root = tmp_path
    return write


def test_all_searches_come_first_then_each_seed_of_every_cell(checkout):
    listed = [(each.cell.name, each.rate, each.cell.params.seeds) for each in checkout(one=1e-3, two=1e-3)]
    searches = [(f"{name}_made", rate, (100,)) for rate in seeds.RATES for name in ("one", "two")]
    assert listed == [*searches, *((f"{name}_made", None, (seed,)) for seed in (0, 1) for name in ("one", "two"))]


def test_a_trial_never_sees_the_reported_split_and_a_seed_waits_for_all_trials(checkout):
    trainings = checkout(one=1e-3)
    with pytest.raises(UserError, match="is missing; a seed is trained after all searches"):
        seeds.train_all(trainings[-1:], trainings)
    assert all(not each.cell.reported and each.cell.params.epochs == 2 for each in trainings if each.rate)


def test_a_seed_is_trained_at_the_rate_that_its_search_chose(checkout):
    trainings = checkout(one=1e-3)
    for training, score in zip(trainings, (10.0, 30.0, 30.0, 20.0), strict=False):
        write_json(training.file, {"rate": training.rate, "top1_percent": score, **hashes_of(training)})
    seeds.require_best_rate(trainings[-1], trainings)
    other = checkout(one=2e-3)
    with pytest.raises(UserError, match=r"one_made\.optim\.lr: 0\.002, and its search chose 0\.001"):
        seeds.require_best_rate(other[-1], other)


def hashes_of(training):
    return {
        "params_hash": seeds.params_hash(training.cell.params),
        "data_hash": seeds.hash_file(training.cell.inputs[0]),
    }


def test_a_seed_leaves_its_score_its_hits_and_what_explains_them_and_is_not_trained_again(checkout, capsys):
    training = checkout(one=1e-3)[-1]
    seeds.train(training)
    found = read_json(checkout.root / "results/seeds/made/one/1.json")
    hits = unpack_hits(found["hits"], found["images"])
    assert found["images"] == 8 and 100 * np.mean(hits) == found["top1_percent"]
    assert found["seed"] == 1 and found["split"] == "val" and found["core_hours"] > 0 and found["rate"] == 1e-3
    before = training.file.read_bytes()
    seeds.train_all([training], [training])
    assert training.file.read_bytes() == before
    changed = checkout(one=2e-3)[-1]
    with pytest.raises(UserError, match=r"1\.json: has another params_hash; discard the files of all seeds"):
        seeds.train_all([changed], [changed])


def test_nothing_starts_that_would_not_end_in_time(checkout, monkeypatch):
    trainings = checkout(one=1e-3)
    monkeypatch.setattr(seeds, "train", lambda training: pytest.fail("was started"))
    seeds.train_all(trainings[:1], trainings, until=datetime.datetime.now() + datetime.timedelta(seconds=5))


def test_hits_are_a_bit_an_image_the_first_one_highest():
    assert pack_hits([True, False, False, False, False, False, False, True, True]) == "gYA="  # 0x81 0x80
    random = np.random.default_rng(0).random(10_000) < 0.5
    assert unpack_hits(pack_hits(random), 10_000) == random.tolist()
    assert len(base64.b64decode(pack_hits(random))) == 1250


def test_the_questions_name_the_cells_and_the_search_of_the_profile():
    cells = {name.removesuffix("_cifar10") for name in PROFILE["pretrain_seeds"]}
    named = set()
    for question in QUESTIONS["questions"].values():
        for kind in ("pairs", "not_worse", "shown"):
            named |= {name for pair in question.get(kind, []) for name in pair}
    assert named == cells
    assert tuple(QUESTIONS["search"]["rates"]) == seeds.RATES and QUESTIONS["search"]["seed"] == seeds.SEARCH_SEED
    assert all(cell["seeds"] == QUESTIONS["seeds"] for cell in PROFILE["pretrain_seeds"].values())


@pytest.mark.parametrize(("pairs", "word"), [(4, "four pairs"), (2, "two pairs")])
def test_the_stated_differences_are_seen_four_times_in_five(pairs, word):
    """By the noncentral t distribution: the variance of a difference of two seeds is twice that of one."""
    from scipy.stats import nct, t

    for spread, difference in QUESTIONS["detects"][word].items():
        shift = difference / (spread * 2**0.5) * len(QUESTIONS["seeds"]) ** 0.5
        power = 1 - nct.cdf(t.ppf(1 - 0.05 / pairs / 2, 4), 4, shift)
        assert power == pytest.approx(0.8, abs=0.005)
