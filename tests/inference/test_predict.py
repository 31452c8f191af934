"""Where `repro predict` puts what it sees: nothing of another picture, or by other weights, is replaced."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from repro.core.errors import UserError
from repro.core.record import read_json, write_json
from repro.inference import predict
from repro.inference.predict import _open_output, find_pictures
from repro.tasks.spec import Predictor, Sight

ABOUT = {"weights": "a.safetensors", "weights_hash": "1" * 16, "model": "x", "task": "detect"}


def call(output: Path, names: str, **about: str) -> set[str]:
    """One call of `predict` on these pictures; what predictions.json holds then."""
    files, file = [Path(name) for name in names.split()], output / "predictions.json"
    beside = _open_output(file, ABOUT | about, files)
    found = {path.name: names for path in files}
    write_json(file, ABOUT | about | beside | {"pictures": beside["pictures"] | found})
    return set(read_json(file)["pictures"])


# pictures of the first call and of the second -> how many are known then; 0 where the second is refused
SECOND = {
    ("a.png", "a.png"): 1,
    ("a.png b.png", "a.png"): 2,
    ("a.png", "b.png"): 2,
    ("a.png", "b.png c/d.png"): 3,
    ("x/a.png", "./x/../x/a.png"): 1,
    ("x/a.png", "y/a.png"): 0,
    ("x/a.png", "x/a.jpg"): 0,  # both would be drawn as a.png
    ("x/a.png b.png", "c.png y/a.png"): 0,
    ("caf\udce9.png", "caf\udce9.png"): 1,
    ("caf\udce9.png", "x/caf\udce9.png"): 0,
    ("a.png", "A.png"): 2,
    (f"{'x' * 251}.png", f"y/{'x' * 251}.png"): 0,
}


@pytest.mark.parametrize(("first", "second"), SECOND)
def test_a_second_call_adds_to_the_first_and_replaces_no_other_picture(tmp_path, monkeypatch, first, second):
    monkeypatch.chdir(tmp_path)
    before = call(Path("out"), first)
    if SECOND[first, second]:
        assert len(call(Path("out"), second)) == SECOND[first, second]
        assert str(tmp_path) not in Path("out/predictions.json").read_text()
    else:
        with pytest.raises(UserError, match="--output"):
            call(Path("out"), second)
        assert set(read_json(Path("out/predictions.json"))["pictures"]) == before


@pytest.mark.parametrize("other", ["2" * 16, None])
def test_what_other_weights_saw_is_not_mixed_in(tmp_path, other):
    write_json(
        tmp_path / "predictions.json",
        {"weights": "a.safetensors", "pictures": {}} | ({"weights_hash": other} if other else {}),
    )
    before = (tmp_path / "predictions.json").read_bytes()
    with pytest.raises(UserError, match="other weights.*--output"):
        call(tmp_path, "a.png")
    assert (tmp_path / "predictions.json").read_bytes() == before


@pytest.mark.parametrize("json", [None, "seen.json", "out/predictions.json"])
def test_drawings_are_those_of_one_file_of_weights(tmp_path, monkeypatch, json):
    picture, output, json = tmp_path / "a.png", tmp_path / "out", json and tmp_path / json
    Image.new("RGB", (2, 2)).save(picture)
    drawing = Predictor(look=lambda pictures: [Sight("seen", [], Image.new("RGB", (2, 2)))])
    monkeypatch.setattr(predict, "load_tasks", lambda: {"detect": SimpleNamespace(open_predictor=lambda *_: drawing)})

    def look(hash: str) -> None:
        checkpoint = SimpleNamespace(task={"name": "detect"}, hash=hash, model="x")
        monkeypatch.setattr(predict, "open_own", lambda path: checkpoint)
        predict.predict_pictures([picture], Path("a.safetensors"), None, output, json, 0.5)

    look("1" * 16)
    drawn = (output / "a.png").stat().st_mtime_ns
    with pytest.raises(UserError, match="other weights"):
        look("2" * 16)
    assert (output / "a.png").stat().st_mtime_ns == drawn
    if json:
        assert read_json(json)["pictures"] == {"a.png": []}


@pytest.mark.parametrize("given", ["photos/a.png", "photos/../photos", "a.png"])
def test_no_drawing_replaces_a_picture(tmp_path, monkeypatch, given):
    """The picture given by its path, by its folder and by a link."""
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("RGB", (2, 2)).save(photos / "a.png")
    (tmp_path / "a.png").symlink_to(photos / "a.png")
    before = (photos / "a.png").read_bytes()
    drawing = Predictor(look=lambda pictures: [Sight("seen", [], Image.new("RGB", (1, 1)))])
    checkpoint = SimpleNamespace(task={"name": "detect"}, hash="1" * 16, model="x")
    monkeypatch.setattr(predict, "load_tasks", lambda: {"detect": SimpleNamespace(open_predictor=lambda *_: drawing)})
    monkeypatch.setattr(predict, "open_own", lambda path: checkpoint)
    with pytest.raises(UserError, match="replace it; .*--output"):
        predict.predict_pictures([tmp_path / given], Path("w"), None, photos, None, 0.5)
    assert (photos / "a.png").read_bytes() == before and len(list(photos.iterdir())) == 1


def test_the_work_before_the_first_picture_grows_with_their_number(tmp_path, monkeypatch):
    """Counted as calls of Python and C functions, of which a square would make four times as many for twice the pictures."""

    def count(pictures: int) -> int:
        folder, calls = tmp_path / str(pictures), [0]
        folder.mkdir()
        for number in range(pictures):
            os.link(picture, folder / f"{number}.png")

        def tally(frame, event, argument):
            calls[0] += event.endswith("call")

        sys.setprofile(tally)
        try:
            _open_output(folder / "none.json", ABOUT, find_pictures([folder], unique_names=True))
        finally:
            sys.setprofile(None)
        return calls[0]

    (picture := tmp_path / "picture").touch()
    few, many = count(200), count(400)
    assert 1.5 * few < many < 2.1 * few
