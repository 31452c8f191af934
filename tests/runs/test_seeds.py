"""Registered trainings: their order and files, searches before seeds, hits that explain the score, and the record that is
collected from the files. A trained cell of the graph, whose record no training reads either.
"""

import base64
import dataclasses
import datetime
import json
import shutil

import numpy as np
import pytest
import torch

from repro.core.config import load_yaml
from repro.core.errors import Interrupted, RunError, UserError
from repro.core.paths import Paths, find_root
from repro.core.record import DETAILS_FILE, pack_hits, read_json, read_record, unpack_hits, write_json
from repro.core.runtime import Runtime
from repro.data import loader
from repro.data.manifest import write_manifest
from repro.data.prepare import scan_manifest
from repro.runs import seeds
from repro.runs.cells import train_cells
from repro.training.checkpoint import Checkpointer
from tests.conftest import link_code

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
    searches = [training for training in trainings if training.rate is not None]
    for training, score in zip(searches, (10.0, 10.0, 30.0, 30.0, 20.0, 20.0), strict=True):
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
    before, state = training.file.read_bytes(), training.cell.state_folder(1)
    assert not state.exists()
    state.mkdir()
    (state / "step_000000002.0123456789abcdef.pt").touch()  # as a kill after the file was written leaves it
    seeds.train_all([training], [training])
    assert training.file.read_bytes() == before and not state.exists()
    changed = checkout(one=2e-3)[-1]
    with pytest.raises(UserError, match=r"1\.json: has another params_hash; discard the files of all seeds"):
        seeds.train_all([changed], [changed])


@pytest.mark.parametrize("of_graph", [False, True])
def test_a_stopped_training_has_the_time_and_the_steps_of_every_call(checkout, monkeypatch, of_graph):
    """Also where another rate of the cell is trained in between."""
    now, save = [0.0], Checkpointer.save

    def stop(self, step, state):
        now[0] += 3600.0
        save(self, step, state)
        raise Interrupted(15, "saved")

    def train(rate):
        training = checkout(one=rate)[-1]
        cell = dataclasses.replace(training.cell, runtime=dataclasses.replace(training.cell.runtime, jsonl=True))
        if of_graph:
            train_cells([dataclasses.replace(cell, record=cell.paths.cell(cell.stage, cell.name) / FILES[0])])
        else:
            seeds.train(dataclasses.replace(training, cell=cell))
        return training

    monkeypatch.setattr("repro.training.checkpoint.read_clocks", lambda: (now[0], now[0]))
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Checkpointer, "save", stop)
        train(1e-3)
    train(2e-3)
    training = train(1e-3)
    if of_graph:
        assert 3600 <= read_json(training.cell.record.with_name("run.json"))["seconds"] < 3660
    else:
        assert read_json(training.file)["core_hours"] == 1.0
    logs = [file.read_text().splitlines() for file in (checkout.root / ".runs/logs").rglob("train.jsonl")]
    rows = [[json.loads(line) for line in log] for log in logs]
    assert [[row["step"] for row in log] for log in rows] == [list(range(1, 11))] * 2
    assert sorted(max(row["lr"] for row in log) for log in rows) == [1e-3, 2e-3]


@pytest.mark.parametrize(("warmup_epochs", "said"), [(1, False), (2, True)])
def test_a_training_that_is_all_warm_up_says_so(checkout, capsys, warmup_epochs, said):
    cell = checkout(one=1e-3)[-1].cell
    params = dataclasses.replace(cell.params, optim=dataclasses.replace(cell.params.optim, warmup_epochs=warmup_epochs))
    train_cells([dataclasses.replace(cell, params=params)])
    assert ("warmup_epochs: 2" in capsys.readouterr().out) == said


def test_hits_are_found_as_the_training_evaluates_and_explain_its_score(checkout, monkeypatch):
    training, made, init = checkout(one=1e-3)[-1], [], loader.EvalLoader.__init__

    def note(self, dataset, *, batch_size, device, **order):
        made.append((batch_size, device))
        init(self, dataset, batch_size=batch_size, device=device, **order)

    runtime = dataclasses.replace(training.cell.runtime, micro_batch=2)
    training = dataclasses.replace(training, cell=dataclasses.replace(training.cell, runtime=runtime))
    monkeypatch.setattr(loader.EvalLoader, "__init__", note)
    seeds.train(training)
    assert len(made) == 2 and made[0] == made[1] == (2, torch.device("cpu"))
    monkeypatch.setattr(seeds, "find_hits", lambda weights, job: [True] * 8)
    with pytest.raises(RunError, match=r"seed_1-\w+: .*100.0 %") as caught:
        seeds.train(training)
    assert "\n" not in str(caught.value)


def test_nothing_starts_that_would_not_end_in_time(checkout, monkeypatch):
    trainings = checkout(one=1e-3)
    monkeypatch.setattr(seeds, "train", lambda training: pytest.fail("was started"))
    assert not seeds.train_all(trainings[:1], trainings, until=datetime.datetime.now() + datetime.timedelta(seconds=5))


def test_hits_are_a_bit_an_image_the_first_one_highest():
    assert pack_hits([True, False, False, False, False, False, False, True, True]) == "gYA="  # 0x81 0x80
    random = np.random.default_rng(0).random(10_000) < 0.5
    assert unpack_hits(pack_hits(random), 10_000) == random.tolist()
    assert len(base64.b64decode(pack_hits(random))) == 1250
    for images in (10_001, 9_992):
        with pytest.raises(ValueError):
            unpack_hits(pack_hits(random), images)


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


RIGHT = (6, 5)  # of 8 images, by seed: 75 and 62.5 %
FILES = ("metrics.json", DETAILS_FILE)


def machine(cpu, threads=1):
    return {"cpu": cpu, "threads": threads, "flags": ["avx"]}


@pytest.fixture
def collected(checkout):
    """A checkout with the files of both seeds of a cell, made up; `collected()` collects them and returns the record."""
    trainings = checkout(one=1e-3, two=1e-3)
    own = [each for each in trainings if each.cell.name == "one_made" and each.rate is None]

    def change(seed, **values):
        own[seed].file.write_text(json.dumps(read_json(own[seed].file) | values))

    for training, right in zip(own, RIGHT, strict=True):
        found = {"cell": "one_made", "seed": training.cell.params.seeds[0], "rate": 1e-3, "split": "val"}
        found |= {"hits": pack_hits([True] * right + [False] * (8 - right)), "images": 8, "top1_percent": 12.5 * right}
        found |= {"held_out_loss": 1.5, "train_loss": 1.0, "num_params": 1234, "skipped_steps": right, "epochs": 2}
        found |= {"train_images": 16, "weights_hash": f"{right}", "core_hours": 0.5, "commit": "c", "params": {}}
        write_json(training.file, found | {"device": machine("A"), "versions": {"torch": "2"}} | hashes_of(training))

    def collect():
        seeds.collect("one_made", trainings)
        return read_record(collect.folder / "metrics.json")

    collect.trainings = trainings
    collect.folder, collect.files, collect.change = own[0].cell.record.parent, [each.file for each in own], change
    return collect


def bytes_of(folder):
    return [(folder / name).read_bytes() for name in FILES]


def test_the_record_has_the_statistics_of_the_files_and_leaves_them(collected):
    """Of 75 and 62.5: the mean 68.75, the deviation 12.5 / sqrt(2), Student's t of one degree of freedom 12.7062."""
    before = [file.read_bytes() for file in collected.files]
    record = collected()
    metrics, identity = record["metrics"], record["identity"]
    assert read_json(collected.folder / "metrics.json") == {"top1_percent": 68.75}
    assert metrics["top1_std_percent"] == pytest.approx(8.8388, abs=1e-4)
    assert metrics["top1_ci95_percent"] == [0.0, 100.0]  # 68.75 -+ 12.7062 * 6.25 leaves the range of a share
    about = {"seeds": [0, 1], "kind": "folder", "classes": 4, "num_params": 1234, "epochs": 2, "held_out_images": 8}
    assert metrics | about == metrics and metrics["skipped_steps"] == 11 and metrics["weights_hash"] == "6"
    assert [run["top1_percent"] for run in metrics["by_seed"]] == [75.0, 62.5] and "hits" not in metrics["by_seed"][0]
    assert identity["command"] == "repro seeds --cell one_made" and identity["device"] == "cpu: A, 1 thread"
    assert (identity["parent_commit"], identity["versions"], identity["machine"]["cpu"]) == ("c", {"torch": "2"}, "A")
    assert read_json(collected.folder / "run.json")["seconds"] == 3600.0
    assert [file.read_bytes() for file in collected.files] == before


@pytest.mark.parametrize(
    ("name", "named", "values"),
    [
        ("device", "machine", [machine("A"), machine("B", threads=2)]),
        ("commit", "parent_commit", ["c", "d"]),
        ("versions", "versions", [{"torch": "2"}, {"torch": "3"}]),
    ],
)
def test_what_the_seeds_do_not_share_is_said_of_each(collected, name, named, values):
    collected.change(1, **{name: values[1]})
    identity = collected()["identity"]
    assert identity[named] is None and identity[f"{named}_by_seed"] == values
    assert identity["device"] == "cpu: A, 1 thread" + " and cpu: B, 2 threads" * (name == "device")


def test_seeds_that_are_missing_leave_no_record_and_are_named(collected):
    collected.files[1].unlink()
    with pytest.raises(UserError, match=r"one/1\.json: is missing; 1 of 2 seeds of one_made") as caught:
        collected()
    assert "\n" not in str(caught.value) and not collected.folder.exists()


@pytest.mark.parametrize(
    ("seed", "change", "named"),
    [
        (0, {"params_hash": None}, "params_hash"),
        (1, {"data_hash": "0" * 16}, "data_hash"),
        (0, {"top1_percent": 87.5}, "top1_percent"),
        (1, {"top1_percent": float("nan")}, "top1_percent"),
        (0, {"hits": pack_hits([True] * 8)}, "hits"),
        (0, {"hits": "A"}, "hits"),
        (1, {"images": 0}, "images"),
        (0, {"device": {}}, "device"),
        (0, {"epochs": "2"}, "epochs"),
    ],
)
def test_a_file_of_another_training_or_spoiled_is_refused_and_named(collected, seed, change, named):
    collected()
    before = bytes_of(collected.folder)
    collected.change(seed, **change)
    with pytest.raises(UserError, match=rf"one/{seed}\.json: .*{named}"):
        collected()
    assert bytes_of(collected.folder) == before


@pytest.mark.parametrize("text", ["[]", "{}", "{"])
def test_a_file_that_is_no_mapping_is_refused_and_named(collected, text):
    collected.files[0].write_text(text)
    with pytest.raises(UserError, match=r"one/0\.json: "):
        collected()


def spoil(file, *keys, value):
    """Write another value at a place of a JSON file."""
    found = content = json.loads(file.read_text())
    for key in keys[:-1]:
        content = content[key]
    content[keys[-1]] = value
    file.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("name", "keys", "value"),
    [
        ("metrics.json", ("top1_percent",), 99.0),
        ("metrics.json", ("top5_percent",), 99.0),
        (DETAILS_FILE, ("metrics",), None),
        (DETAILS_FILE, ("identity", "machine", "cpu"), "B"),
        (DETAILS_FILE, ("curve",), ["seed,epoch"]),
    ],
)
def test_a_record_is_the_same_when_collected_again_whatever_became_of_it(collected, name, keys, value):
    collected()
    before = bytes_of(collected.folder)
    spoil(collected.folder / name, *keys, value=value)
    collected()
    assert bytes_of(collected.folder) == before


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("text", [None, "not JSON"])
def test_a_record_that_is_lost_or_no_record_is_made_again(collected, name, text):
    collected()
    before, file = bytes_of(collected.folder), collected.folder / name
    file.unlink() if text is None else file.write_text(text)
    collected()
    assert bytes_of(collected.folder) == before


def test_the_command_collects_a_trained_cell_and_waits_for_the_seeds_of_another(
    collected, checkout, monkeypatch, repro_cli
):
    """The trials of one cell are there; of the other, nothing is, and there is no time to train it."""
    link_code(checkout.root)
    with open(checkout.root / "params.yaml", "a") as file:
        file.write(
            f"runtime: {{device: cpu, threads: 1, data_roots: {{made: {ROOT / 'results/golden/pictures/classes'}}}}}\n"
        )
    monkeypatch.chdir(checkout.root)
    for training in collected.trainings:
        if training.rate is not None and training.cell.name == "one_made":
            write_json(training.file, hashes_of(training))
    repro_cli.run("seeds", "--cell", "one_made", "--seed", "0")
    assert not collected.folder.exists()
    assert "68.75 ± 8.84 % on the 8 val images" in repro_cli.run("seeds", "--cell", "one_made")
    assert read_record(collected.folder / "metrics.json")["metrics"]["seeds"] == [0, 1]
    soon = datetime.datetime.now() + datetime.timedelta(minutes=2)  # a minute that does not pass before it is read
    assert "two/rate_" in repro_cli.run("seeds", "--cell", "two_made", "--until", f"{soon:%H:%M}")


def test_a_cell_of_the_graph_never_reads_its_own_record(checkout):
    """A score that was spoiled is mended by the next run."""
    trained = checkout(one=1e-3)[-1].cell
    cell = dataclasses.replace(trained, stage="pretrain", record=trained.paths.cell("pretrain", "one_made") / FILES[0])
    train_cells([cell])
    before = bytes_of(cell.record.parent)
    spoil(cell.record, "top1_percent", value=99.0)
    spoil(cell.record.with_name(DETAILS_FILE), "metrics", "by_seed", 0, "top1_percent", value=99.0)
    shutil.rmtree(cell.folder)
    train_cells([cell])
    assert bytes_of(cell.record.parent) == before
