"""Latents of a VAE as a data set, and the example in docs/ that makes them and exports a decoder."""

import io
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from docs.examples import sd_vae
from repro.core.errors import RunError, UserError
from repro.data.check.run import Depth, run_check
from repro.data.classification import ImageFolder, eval_transform
from repro.data.latents import LatentFolder
from repro.data.settings import TransformSettings
from repro.data.tree import scan_tree
from repro.inference.generate import open_decoder
from repro.tasks.generation.params import InputSettings, LatentSettings
from repro.tasks.generation.task import to_inputs, to_pictures

CPU = torch.device("cpu")


@pytest.fixture
def latents(tmp_path) -> Path:
    """Two classes of two files in each split, of which one also has the latents of its mirrored picture."""
    for split in ("train", "val"):
        for place, name in enumerate(("cat", "dog")):
            folder = tmp_path / "latents" / split / name
            folder.mkdir(parents=True)
            np.save(folder / "one.npy", np.full((4, 2, 2), place + 1, np.float16))
            np.save(folder / "two.npy", np.float32([5, 7]).repeat(16).reshape(2, 4, 2, 2))
    return tmp_path / "latents"


def test_latents_are_scaled_and_mirrored(latents):
    tree = scan_tree(latents, "latents")
    assert tree.classes == ("cat", "dog") and len(tree.splits["train"].names) == 4
    for hflip, expected in ((1.0, [0.5, 3.5, 1.0, 3.5]), (0.0, [0.5, 2.5, 1.0, 2.5])):
        folder = LatentFolder(tree, "train", (4, 2, 2), scale=0.5, hflip=hflip, seed=0)
        assert [float(folder[(0, i)][0].mean()) for i in range(4)] == expected
    half = LatentFolder(tree, "train", (4, 2, 2), scale=1.0, hflip=0.5, seed=0)
    drawn = [float(half[(epoch, 1)][0].mean()) for epoch in range(40)]
    assert set(drawn) == {5.0, 7.0} and drawn == [float(half[(epoch, 1)][0].mean()) for epoch in range(40)]
    batch, labels = half.collate([half[(0, 0)], half[(0, 2)]])
    assert batch.shape == (2, 4, 2, 2) and batch.dtype == torch.float32 and labels.tolist() == [0, 1]
    assert torch.equal(to_inputs(batch, CPU), batch)


def test_archives_hold_the_same_latents(latents, tmp_path):
    for split in ("train", "val"):
        shutil.make_archive(tmp_path / "packed" / split / "0", "tar", latents / split)
    trees = [scan_tree(root, "latents") for root in (latents, tmp_path / "packed")]
    folders, packed = (LatentFolder(tree, "val", (4, 2, 2), scale=1.0) for tree in trees)
    assert len(packed) == 4 and all(torch.equal(folders[(0, i)][0], packed[(0, i)][0]) for i in range(4))


ARRAYS = io.BytesIO()
np.savez(ARRAYS, latents=np.zeros((4, 2, 2), np.float32))
NO_LATENTS = {"empty": b"", "text": b"no array", "several": ARRAYS.getvalue(), "objects": np.array(None)}
HEADER = b"{'descr': '<f4', 'fortran_order': False, 'shape': (4, 2, 2"
NO_LATENTS |= {"header": b"\x93NUMPY\x01\0" + len(HEADER).to_bytes(2, "little") + HEADER, "zip": ARRAYS.getvalue()[:40]}
NO_LATENTS |= {"integers": np.zeros((4, 2, 2), np.int16), "nan": np.full((4, 2, 2), np.nan, np.float32)}
NO_LATENTS |= {"width": np.zeros((4, 2, 3), np.float32), "three": np.zeros((3, 4, 2, 2), np.float32)}


@pytest.mark.parametrize("content", NO_LATENTS.values(), ids=NO_LATENTS)
def test_a_file_that_holds_no_latents_is_named(latents, content):
    path = latents / "train" / "dog" / "one.npy"
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content, allow_pickle=True)
    folder = LatentFolder(scan_tree(latents, "latents"), "train", (4, 2, 2), scale=1.0)
    with pytest.raises(UserError, match=r"dog/one.npy: unreadable image") as caught:
        folder[(0, 2)]
    assert "\n" not in str(caught.value)
    lines = []
    with pytest.raises(RunError, match="data check latents: 1 error"):
        run_check("latents", latents, Depth(full=True), emit=lines.append)
    assert sum(line.startswith("error") and "one.npy" in line for line in lines) == 1


def test_sound_latents_pass_their_check_and_are_no_pictures(latents):
    lines = []
    run_check("latents", latents, Depth(full=True), emit=lines.append)
    assert lines[-1].endswith("no errors, 0 warnings")
    pictures = ImageFolder(scan_tree(latents, "latents"), "train", eval_transform(TransformSettings(image_size=8)))
    with pytest.raises(UserError, match="unreadable image"):
        pictures[(0, 0)]


class Vae(nn.Module):
    """As diffusers' AutoencoderKL is called: latents are the means of patches of eight pixels, and a constant."""

    def __init__(self):
        super().__init__()
        self.of_device = nn.Parameter(torch.zeros(()))

    def encode(self, x: Tensor) -> SimpleNamespace:
        means = F.avg_pool2d(x, 8)
        latents = torch.cat((means, torch.full_like(means[:, :1], 0.5)), dim=1)
        return SimpleNamespace(latent_dist=SimpleNamespace(sample=lambda: latents))

    def decode(self, latents: Tensor) -> SimpleNamespace:
        return SimpleNamespace(sample=F.interpolate(latents[:, :3], scale_factor=8.0))


def test_the_example_writes_latents_that_are_read_as_those_of_their_pictures(tmp_path):
    """Pictures whose patches have one colour each: the latents, and those of the mirror image, are known."""
    files = ("train/cat/0.png", "train/dog/1.png", "train/dog/2.png", "val/cat/3.png", "val/dog/4.png")
    colours = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    for name, colour in zip(files, colours):
        file = tmp_path / "pictures" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(colour.repeat(8, 0).repeat(8, 1)).save(file)
    how = {"kind": "folder", "image_size": 32, "batch_size": 2}
    sd_vae.write_latents(Vae(), tmp_path / "pictures", tmp_path / "latents", **how)
    tree = scan_tree(tmp_path / "latents", "latents")
    assert tree.classes == ("cat", "dog")
    assert {split: len(own.names) for split, own in tree.splits.items()} == {"train": 3, "val": 2}
    for name, colour in zip(files, colours):
        file = tmp_path / "latents" / f"{name}.npy"
        found, expected = np.load(file), colour.transpose(2, 0, 1) / 127.5 - 1
        assert found.shape == (2, 4, 4, 4) and found.dtype == np.float16
        np.testing.assert_allclose(found[0, :3], expected, atol=1e-3)
        np.testing.assert_allclose(found[1, :3], expected[..., ::-1], atol=1e-3)
        np.save(file, np.zeros((4, 4, 4), np.float16))
    sd_vae.write_latents(Vae(), tmp_path / "pictures", tmp_path / "latents", **how)
    # what is there is not made again
    assert not any(np.load(file).any() for file in (tmp_path / "latents").rglob("*.npy"))


def test_the_decoder_of_the_example_is_one_that_drawing_takes(tmp_path, monkeypatch):
    vae, file = Vae(), tmp_path / "decoder.pt2"
    vae.config = SimpleNamespace(block_out_channels=(1, 1, 1, 1), latent_channels=4)
    monkeypatch.setattr(sd_vae, "open_vae", lambda name: vae)
    sd_vae.decoder("any", file, image_size=32)
    decode = open_decoder(file, InputSettings(image_size=32, latents=LatentSettings()), CPU, tmp_path)
    latents = torch.rand(3, 4, 4, 4) * 2 - 1
    assert torch.equal(decode(latents * 0.18215), to_pictures(F.interpolate(latents[:, :3], scale_factor=8.0)))
