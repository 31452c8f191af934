"""`repro evaluate`: image sizes, --limit, --dtype, published weights and Table 1, on real digits with random weights."""

import contextlib
import csv
import dataclasses
import types
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import ImageNetInfo

import repro.models  # noqa: F401  registers the family
from repro.core.errors import UserError
from repro.core.hashing import hash_file
from repro.core.record import read_record
from repro.data.settings import TransformSettings
from repro.data.tree import scan_tree
from repro.inference.classifier import require_same_classes, subsample
from repro.inference.evaluate import _Evaluation, check_limit
from repro.inference.params import EvaluateRequest
from repro.models.published import find_published, is_only_imagenet_1k
from repro.models.weights import save_weights
from repro.papers.vision_ttt.published import find_table1_models, find_table1_top1
from tests.conftest import run_python
from tests.stages.helpers import DIGITS, NANO, edit, prepare_cell, save_model, save_official

DEIT = "deit_tiny_patch16_224"


@pytest.fixture
def weights(checkout):
    """Random weights of a small Vittt, with the digits' class names."""
    return save_model(checkout / "w.safetensors", NANO, depth=1, img_size=32)


def records():
    files = Path("results/replications").glob("*/evaluate/*.json")
    return {file.stem: read_record(file) for file in files if not file.name.endswith("run.json")}


def test_several_sizes_give_a_record_each_and_a_curve(weights, repro_cli):
    command = ("evaluate", "--weights", weights, "--data", "digits")
    out = repro_cli.run(*command, *sizes(48, 16))
    assert len(out.splitlines()) == 3 and "at 48, fp32: top-1 " in out and "img/s" in out
    found, digest = records(), hash_file(Path(weights))
    assert {r["metrics"]["weights_hash"] for r in found.values()} == {digest}
    assert set(found) == {f"vittt_nano_patch16_144_digits_{size}_{digest[:8]}" for size in (16, 48)}
    folder = next(Path("artifacts/replications").rglob("curve.csv")).parent
    assert folder.name == f"vittt_nano_patch16_144_digits_{digest[:8]}" and folder.parent.name == "evaluate"
    rows = list(csv.DictReader(open(folder / "curve.csv")))
    assert [row["image_size"] for row in rows] == ["16", "48"]
    for row in rows:
        metrics = found[f"vittt_nano_patch16_144_digits_{row['image_size']}_{digest[:8]}"]["metrics"]
        assert float(row["top1_percent"]) == metrics["top1_percent"] and metrics["train_image_size"] == 32
        assert (metrics["held_out_images"], metrics["data"], metrics["kind"]) == (359, "digits", "digits")
        assert "limit" not in metrics
    before = (folder / "curve.png").read_bytes()
    with Image.open(folder / "curve.png") as image:
        assert image.width >= 400
    repro_cli.run(*command, "--sha256", digest, *sizes(16, 48))
    assert (folder / "curve.png").read_bytes() == before


def sizes(*values):
    return [word for value in values for word in ("--image-size", str(value))]


def test_a_limited_look_is_seeded_and_says_so(weights, repro_cli):
    for _ in range(2):
        out = repro_cli.run("evaluate", "--weights", weights, "--data", "digits", "--limit", "30")
        assert "on 30 test images (--limit: not a full score)" in out
    ((name, limited),) = records().items()
    found = [limited["metrics"][key] for key in ("held_out_images", "limit", "limit_seed")]
    assert name.endswith("_limit30") and found == [30, 30, 0]
    tree = scan_tree(Path("data/digits"), "digits")
    part = subsample(tree, 100, seed=0)
    names = part.splits["test"].names.tolist()
    assert len(set(part.splits["test"].targets.tolist())) == 10 and len(names) == len(set(names)) == 100
    assert all(part.path("test", index).is_file() for index in range(100))
    assert part.splits["train"] is tree.splits["train"] and subsample(tree, 359, seed=0) is tree


def test_low_precision_is_recorded_and_close(weights, repro_cli):
    command = ("evaluate", "--weights", weights, "--data", "digits", "--limit", "40", "--dtype")
    for dtype in ("fp32", "bf16", "fp16"):
        repro_cli.run(*command, dtype)
    losses = {record["identity"]["dtype"]: record["metrics"]["held_out_loss"] for record in records().values()}
    assert len(set(losses.values())) == 3
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=2e-2) == pytest.approx(losses["fp16"], rel=2e-2)
    assert {name.rpartition("_")[2] for name in records()} >= {"bf16", "fp16"}


@pytest.fixture
def published(monkeypatch, tmp_path):
    """Let timm's published weights of models be local files of random weights with ten classes."""

    def publish(name, *, damaged=False):
        model, _, tag = name.partition(".")
        torch.manual_seed(1)
        file = tmp_path / f"{name}.safetensors"
        save_file(timm.create_model(model, num_classes=10, img_size=32).state_dict(), file)
        if damaged:
            file.write_bytes(file.read_bytes()[:1000])
        known = timm.models._registry
        size = {"input_size": (3, 32, 32), "num_classes": 10, "crop_pct": 1.0}
        local = {"file": str(file), "url": "", "hf_hub_id": None, "custom_load": False}
        config = dataclasses.replace(timm.get_pretrained_cfg(name), **size, **local)
        for key in (name, model):
            monkeypatch.setitem(known._model_pretrained_cfgs, key, config)
        monkeypatch.setitem(known._model_default_cfgs[model].cfgs, tag, config)

    return publish


def test_published_weights_at_two_sizes(checkout, published, repro_cli):
    published(f"{DEIT}.fb_in1k")
    command = ("evaluate", "--model", DEIT, "--pretrained", "--data", "digits", "--limit", "30")
    out = repro_cli.run(*command, *sizes(32, 48))
    assert f"{DEIT} (fb_in1k) on digits at 48" in out
    about = {"model": DEIT, "weights_hash": "timm", "weights_tag": "fb_in1k", "weights_license": "apache-2.0"}
    assert all({**about, "train_image_size": 32}.items() <= r["metrics"].items() for r in records().values())
    assert {r["metrics"]["image_size"] for r in records().values()} == {32, 48}
    assert next(Path("artifacts/replications").rglob("curve.png")).parent.name == f"{DEIT}_digits_timm_limit30"


def test_several_models_go_on_past_one_that_fails(checkout, published, repro_cli):
    published(f"{DEIT}.fb_in1k", damaged=True)
    published("deit_small_patch16_224.fb_in1k")
    both = ("--models", DEIT, "--models", "deit_small_patch16_224")
    code, out, err = repro_cli("evaluate", *both, "--pretrained", "--data", "digits", "--limit", "20")
    assert code == 1 and out.count("top-1") == 1 and len(records()) == 1
    assert err.splitlines()[-1] == f"repro: evaluate: 1 of 2 models were not evaluated: {DEIT}"
    assert len(err.splitlines()) == 2 and err.startswith(f"repro: {DEIT}.fb_in1k: weights cannot be loaded")


def test_an_official_file_scores_as_its_weights_do(checkout, repro_cli):
    """A ViT3 as its authors publish it, and the same in a file of this project."""
    name, theirs, own = "vit3_nano_patch16_144", "vit3.pth", "own.safetensors"
    preprocessing = TransformSettings(image_size=144, crop_pct=0.875).preprocessing()
    about = {"name": name, "options": {"num_classes": 10}, "preprocessing": preprocessing, "classes": DIGITS}
    save_weights(Path(own), save_official(Path(theirs), name), **about)
    command = ("evaluate", "--data", "digits", "--limit", "10", *sizes(144, 96))
    assert f"{name} on digits at 96" in repro_cli.run(*command, "--weights", theirs, "--model", name)
    found = [record["metrics"] for record in records().values()]
    assert all(m["options"] == {} and m["weights_file"] == "vit3.pth" and m["train_image_size"] == 144 for m in found)
    assert {m["weights_hash"] for m in found} == {hash_file(Path(theirs))}
    repro_cli.run(*command, "--weights", own)
    for size in (144, 96):
        both = [r["metrics"] for r in records().values() if r["metrics"]["image_size"] == size]
        assert len({m["weights_hash"] for m in both}) == 2 and len({m["held_out_loss"] for m in both}) == 1


def test_the_papers_number_stands_beside_a_full_score_alone():
    def line(kind="imagenet", size=224, options=types.MappingProxyType({}), **request):
        checkpoint = types.SimpleNamespace(name="vit3_tiny_patch16_224", facts={"options": dict(options)})
        cell = types.SimpleNamespace(kind=kind, name=kind)
        metrics = {"image_size": size, "top1_percent": 76.0, "top5_percent": 93.0, "split": "val"}
        evaluation = _Evaluation(None, None, cell, None, None, EvaluateRequest(**request), find_table1_top1)
        return evaluation._format_score(checkpoint, {**metrics, "held_out_images": 50_000})

    assert line().endswith("on 50000 val images (Table 1: 76.5 %)")
    others = line(kind="digits"), line(size=256), line(options={"depth": 1}), line(limit=10)
    assert not any("Table 1" in other for other in others)
    assert find_table1_top1("vit_base_patch16_384", 384) == "77.9"


def test_weights_that_saw_more_keep_their_tag_in_the_name(checkout, published, repro_cli):
    name = "vit_large_patch16_384"
    assert find_published(name).record_name == f"{name}.augreg_in21k_ft_in1k"
    small = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    published(small)
    repro_cli.run("evaluate", "--model", small, "--pretrained", "--data", "digits", "--limit", "10")
    assert [record["metrics"]["model"] for record in records().values()] == [small]


def test_which_tags_are_imagenet_1k_alone():
    yes = "fb_in1k ms_in1k pycls_in1k ra2_in1k augreg_in1k deit_in1k".split()
    no = "in12k_ft_in1k swag_lc_in1k fb_swsl_ig1b_ft_in1k ms_in22k clip_laion2b_augreg_ft_in1k untrained".split()
    assert all(map(is_only_imagenet_1k, yes)) and not any(map(is_only_imagenet_1k, [*no, ""]))


def test_table1_takes_the_weights_of_imagenet_1k_at_the_tables_size():
    found, left_out = find_table1_models()
    names = {published.full_name: size for published, size in found}
    assert len(names) == 14 and names["efficientnet_b4.ra2_in1k"] == 380 and names["convnext_base.fb_in1k"] == 224
    assert all(published.comparable and published.license for published, _ in found)
    labels = {label for labels in left_out.values() for label in labels}
    assert len(labels) == 35 - 14 and {"EffNet-B6", "ViT-L/16", "VMamba-T", "Vittt-T"} <= labels


@pytest.mark.slow
def test_table1_without_a_network(checkout, tmp_path):
    """The hub's real client, with an endpoint that nobody serves and an empty cache, on an ImageNet of small images."""
    for split in ("train", "val"):
        for wnid in ImageNetInfo("imagenet-1k").label_names():
            folder = Path("data/imagenet") / split / wnid
            folder.mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(folder / "a.png")
    edit("train: 1281167, val: 50000", "train: 1000, val: 1000")
    prepare_cell(checkout, "imagenet")
    network = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")}
    options = ("--table1", "--data", "imagenet", "--limit", "2")
    done = run_python("-m", "repro", "evaluate", *options, cwd=checkout, **network)
    assert done.returncode == 1 and "left out: EffNet-B6" in done.stdout and "top-1" not in done.stdout, done.stderr
    *lines, last = done.stderr.splitlines()
    assert len(lines) == 14 and last.startswith("repro: evaluate: 14 of 14 models were not evaluated: regnety_040, ")
    assert all("cannot be fetched and are not in the local cache: http://127.0.0.1:9: " in line for line in lines)
    assert not Path("results/replications").exists()


def test_a_limit_of_imagenets_own_size_is_refused():
    check_limit(49_999, 60_000, "val")
    with pytest.raises(UserError, match="would be taken for it"):
        check_limit(50_000, 60_000, "val")


def test_logits_that_are_not_finite_are_one_line(checkout, repro_cli):
    path = checkout / "large.safetensors"
    options = {"depth": 1, "num_classes": 10}
    model = timm.create_model(NANO, **options)
    torch.nn.init.constant_(model.head.weight, 3e38)  # sums overflow, though every weight is finite
    preprocessing = TransformSettings(image_size=32).preprocessing()
    save_weights(path, model, name=NANO, options=options, preprocessing=preprocessing, classes=DIGITS)
    err = repro_cli.refuse("evaluate", "--weights", str(path), "--data", "digits", "--limit", "9")
    assert "large.safetensors" in err and "not finite in fp32" in err and "--dtype" not in err
    picture = str(next((checkout / "data/digits/test").rglob("*.png")))
    err = repro_cli.refuse("predict", picture, "--weights", str(path), "--json", "seen.json")
    assert "large.safetensors" in err and not Path("seen.json").exists()


@pytest.mark.parametrize(
    ("names", "fits"), [(None, True), (("0", "1"), True), (("cat", "dog"), True), (("dog", "cat"), False)]
)
def test_weights_with_numbers_for_classes_are_evaluated_on_any_as_many(names, fits):
    checkpoint = types.SimpleNamespace(classes=names, num_classes=2, path="w")
    with contextlib.nullcontext() if fits else pytest.raises(UserError, match="other classes"):
        require_same_classes(checkpoint, ["cat", "dog"], "pets")
