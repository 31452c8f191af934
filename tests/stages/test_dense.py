"""`repro detect`, `segment` and `predict` as a user runs them, on small scenes: results and continuation."""

import csv
import json
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from repro.core.hashing import hash_file
from repro.core.record import read_record
from tests.data_sets.conftest import flip
from tests.slow import first
from tests.stages.helpers import DIGITS, RECORD, WEIGHTS, add_dense, find_record, read_metrics, stop_at_state
from tests.stages.test_dvc import outs_of


@pytest.fixture(scope="module")
def prepared(prepared, tmp_path_factory) -> Path:
    """A checkout with scenes and a backbone of which the record says the hash; do not change it, copy it."""
    root = tmp_path_factory.mktemp("dense") / "checkout"
    shutil.copytree(prepared, root, symlinks=True, ignore=shutil.ignore_patterns("data", "results"))
    add_dense(root)
    return root


@pytest.mark.parametrize(
    ("stage", "steps", "score"), first([("segment", 4, "miou_percent"), ("detect", 6, "ap_box_percent")])
)
def test_what_a_run_leaves(trained, stage, steps, score):
    trained = trained(stage)
    folder, results = (trained / root / stage / "nano" for root in ("artifacts", "results"))
    record, own = read_record(results / "metrics.json"), load_file(folder / "weights.safetensors")
    metrics = record["metrics"]
    about = {"data": "scenes", "epochs": 2, "steps": steps, "split": "test", "held_out_images": 4}
    assert about.items() <= metrics.items() and metrics["init"]["weights"] == str(WEIGHTS)
    assert metrics["num_params"] <= sum(t.numel() for t in own.values())
    assert metrics["weights_hash"] == hash_file(folder / "weights.safetensors")
    assert 1 < metrics["without_learning"][score] < 100  # at the size of the files, whatever the model's input is
    rows = list(csv.DictReader(open(folder / "curve.csv")))
    assert [row["step"] for row in rows] == [str(steps // 2), str(steps)]
    assert float(rows[-1][score]) == pytest.approx(metrics[f"tune_{score}"], abs=1e-4)
    examples = sorted((folder / "examples").iterdir())
    assert all(int(path.stem) > 12 + 3 if stage == "detect" else path.stem.startswith("ADE_test") for path in examples)
    # the truth beside what was found, each of 512 pixels or more, since small pictures are enlarged
    assert len(examples) == 4 and all(Image.open(path).width >= 2 * 512 for path in examples)
    left = {file.name for place in (folder, results) for file in place.iterdir()}
    assert left == {"run.json", "load_report.txt", "examples", *(Path(out).name for out in outs_of(stage))}
    assert record["identity"]["device"].startswith("cpu: ") and not any((trained / ".runs").rglob("*.pt"))
    # every key is in the load report: used is the backbone's; the file's other keys are named, and so are new ones
    lines = dict(reversed(line.rsplit(" ", 1)) for line in (folder / "load_report.txt").read_text().splitlines())
    report = {key: what.strip() for key, what in lines.items()}
    given, used = load_file(trained / WEIGHTS), {key for key, what in report.items() if what.strip() == "used"}
    assert {key for key in report if report[key] == "expected: not needed"} == given.keys() - used
    assert used and {f"backbone.backbone.{key}" for key in used} <= own.keys()
    assert all(key.startswith(("norm.", "head.")) for key in given.keys() - used)
    assert set(report.values()) == {"used", "expected: not needed", "expected: new"}


@pytest.mark.slow
def test_a_stopped_run_continues_to_the_same_weights(trained, checkout, repro_cli):
    assert "is saved" in stop_at_state("detect", "nano", signal.SIGTERM) and not Path("results/detect").exists()
    repro_cli.run("detect", "--cell", "nano")
    whole, continued = (root / "artifacts/detect/nano" for root in (trained("detect"), Path()))
    for name in ("weights.safetensors", "curve.csv"):
        assert (continued / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
def test_random_weights_stand_elsewhere(checkout, repro_cli):
    out = repro_cli.run("segment", "--random", "--epochs", "1")
    metrics = read_metrics(find_record("segment/nano_random_1epochs"))
    assert metrics["init"] is None and not Path("results/segment").exists()
    assert "expected: new" in out and "used" not in out


@pytest.mark.slow
def test_a_picture_of_ones_own(trained, tmp_path, monkeypatch, repro_cli):
    monkeypatch.chdir([trained(stage) for stage in ("detect", "segment")][-1])
    pixels = np.random.Generator(np.random.PCG64(0)).integers(0, 255, (90, 150, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "colour.png")
    Image.fromarray(pixels[..., 0]).save(tmp_path / "grey.jpg")
    for stage in ("detect", "segment"):
        folder, weights = tmp_path / stage, f"artifacts/{stage}/nano/weights.safetensors"
        options = ("--weights", weights, "-o", str(folder), "--min-score", "0")
        repro_cli.run("predict", str(tmp_path), *options)
        found = json.loads((folder / "predictions.json").read_text())
        assert set(found["pictures"]) == {"colour.png", "grey.jpg"} and found["task"] == stage
        assert {path.name for path in folder.iterdir()} == {"colour.png", "grey.png", "predictions.json"}
        for seen in found["pictures"].values():
            if stage == "segment":
                assert sum(seen.values()) == pytest.approx(1, abs=1e-3)
                continue
            for each in seen:
                x1, y1, x2, y2 = each["box_xyxy"]
                assert set(each) == {"class", "score", "box_xyxy"}
                assert -0.1 <= x1 <= x2 <= 150.1 and -0.1 <= y1 <= y2 <= 90.1


def test_odd_pictures(prepared, tmp_path, monkeypatch, repro_cli):
    """What can be seen is classified, each of the others is one line, and classes go to a file when asked for."""
    monkeypatch.chdir(prepared)
    pixels = np.random.default_rng(0).integers(0, 255, (90, 150, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    for name in ("moving.webp", "moving.png"):
        image.save(tmp_path / name, save_all=True, append_images=[image.rotate(90)])
    image.crop((0, 0, 1, 1)).save(tmp_path / "one.png")
    image.save(tmp_path / "whole.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:2000])
    (tmp_path / "text.png").write_text("no picture")
    Image.new("RGB", (1000, 2)).save(tmp_path / "thin.png")
    file, own = tmp_path / "seen.json", ("--weights", str(WEIGHTS))
    code, out, err = repro_cli("predict", *map(str, sorted(tmp_path.iterdir())), *own, "--json", str(file))
    unread = ["cut.jpg", "text.png", "thin.png"]
    assert code == 2 and [Path(line.split(": ")[1]).name for line in err.splitlines()] == [*unread, "predict"], err
    assert err.endswith("predict: 3 of 7 pictures could not be read\n")
    found = json.loads(file.read_text())["pictures"]
    assert {Path(name).name for name in found} == {"moving.webp", "moving.png", "one.png", "whole.jpg"}
    for seen in found.values():
        shares = [each["share"] for each in seen]
        assert len(seen) == 5 and shares == sorted(shares, reverse=True)
        assert {each["class"] for each in seen} <= set(DIGITS)
    (alone,) = repro_cli("predict", str(tmp_path / "whole.jpg"), *own)[1].splitlines()
    assert alone in out.splitlines() and alone.count("%") == 5  # whatever else is in its batch


def test_classes_on_a_terminal_are_a_table(prepared, tmp_path, monkeypatch, repro_cli):
    monkeypatch.chdir(prepared)
    Image.new("RGB", (20, 20), (200, 0, 0)).save(tmp_path / "red.png")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    out = repro_cli.run("predict", str(tmp_path / "red.png"), "--weights", str(WEIGHTS))
    assert "┃" in out and "red.png" in out and "red.png: " not in out and out.count("%") == 5


@pytest.mark.parametrize(
    ("stage", "spoil", "message"),
    [
        ("detect", lambda path: path.unlink(), "no such file; run its stage first"),
        ("segment", lambda path: path.write_bytes(b""), "is empty"),
        ("detect", flip, "expected"),
        ("segment", lambda path: RECORD.unlink(), "add sha256: "),
    ],
)
def test_a_backbone_that_is_not_verified_is_refused(checkout, repro_cli, stage, spoil, message):
    spoil(Path(WEIGHTS))
    err = repro_cli.refuse(stage)
    assert f"{stage}.nano.init.weights: " in err and message in err
    assert not [*Path().glob(f"*/{stage}")] and not Path(".runs").exists()
