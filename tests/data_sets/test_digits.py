import itertools

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from repro.core.errors import UserError
from repro.data.cells import write_embedded
from repro.data.embedded.digits import write_digits
from repro.data.kinds import KINDS
from repro.data.settings import DigitsSettings

SMALL = DigitsSettings(image_size=16)


def test_every_scan_once_with_its_label_and_stratified(tmp_path):
    root, truth = tmp_path / "digits", load_digits()
    write_digits(root, DigitsSettings(image_size=144))
    seen = {int(path.stem.removeprefix("scan_")): path for path in root.rglob("*.png")}
    assert sorted(seen) == list(range(1797))
    assert all(path.parent.name == f"digit_{truth.target[number]}" for number, path in seen.items())
    for split, digit in itertools.product(("tune", "test"), range(10)):
        members = len(list((root / split / f"digit_{digit}").iterdir()))
        assert abs(members - 0.2 * (truth.target == digit).sum()) <= 0.5
    for number in range(0, 1797, 100):
        with Image.open(seen[number]) as image:
            pixels = np.asarray(image, dtype=float)
        scan = truth.images[number] * 255 / 16
        blocks = pixels.reshape(8, 18, 8, 18).mean(axis=(1, 3))
        assert np.corrcoef(blocks.ravel(), scan.ravel())[0, 1] > 0.97 and abs(pixels.mean() - scan.mean()) < 8


@pytest.mark.parametrize(("test_fraction", "sizes"), [(0.2, (1079, 359, 359)), (0.1, (1259, 359, 179))])
def test_tune_is_the_split_on_which_the_recipe_was_chosen(tmp_path, test_fraction, sizes):
    """That was once called val: the first fifth of a permutation of each class, drawn with seed 0, digit by digit."""
    root = tmp_path / "digits"
    write_digits(root, DigitsSettings(image_size=16, test_fraction=test_fraction))
    splits = "train", "tune", "test"
    scans = [{int(path.stem.removeprefix("scan_")) for path in (root / split).rglob("*.png")} for split in splits]
    truth, rng, first_fifth = load_digits().target, np.random.Generator(np.random.PCG64(0)), set()
    for digit in range(10):
        members = rng.permutation(np.flatnonzero(truth == digit))
        first_fifth |= set(members[: round(0.2 * len(members))].tolist())
    assert scans[1] == first_fifth and tuple(map(len, scans)) == sizes
    assert len(set.union(*scans)) == 1797, "no scan is in two splits"


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.embedded], ids=lambda kind: kind.name)
def test_a_folder_with_other_files_is_refused(tmp_path, kind, request):
    source = request.getfixturevalue("published_files")[kind.source] if kind.source else None
    root = tmp_path / "mine"
    root.mkdir()
    (root / "thesis.tex").write_text("mine")
    needed = {"image_size": 96, "train_pairs": 1, "tune_pairs": 1, "test_pairs": 1, "dashes": (1, 1)}
    needed = needed if kind.name == "connect" else {"images_per_class": 1} if kind.source else {}
    settings = kind.settings(**needed)
    with pytest.raises(UserError, match=rf"did not write; .*runtime\.data_roots\.{kind.name}"):
        write_embedded(kind, root, settings, source)
    assert (root / "thesis.tex").read_text() == "mine"


def test_stopped_while_writing_leaves_no_tree(tmp_path, monkeypatch):
    target, save, calls = tmp_path / "digits", Image.Image.save, []

    def strike(image, path, **options):
        calls.append(path)
        save(image, path, **options)
        if len(calls) == 100:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Image.Image, "save", strike)
        write_digits(target, SMALL)
    assert len(calls) == 100 and not target.exists()
    write_digits(target, SMALL)
    assert len(list(target.rglob("*.png"))) == 1797
