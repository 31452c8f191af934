"""MambaVision's parts against its official release, windows by hand, and the published counts; see test_hierarchies.py."""

import pytest
import timm
import torch
from timm.layers import Attention

from repro.bench.flops import cost
from repro.models import mambavision
from repro.models.checkpoints import open_weights
from repro.models.mambavision import MambaVisionMixer
from repro.models.pyramid import build_pyramid, load_backbone
from tests.models import helpers
from tests.models.helpers import below, nano, read_data, relative, save_model

PARTS = {
    "mixer": lambda: MambaVisionMixer(32),
    "attention": lambda: Attention(24, num_heads=3, qkv_bias=True),
    "conv_block": lambda: mambavision.ConvBlock(6, 0.0).eval(),
    "conv_block_train": lambda: mambavision.ConvBlock(6, 0.0).train(),
}


@pytest.mark.parametrize("name", PARTS)
def test_official_parts(name):
    """The output and every gradient; in training, of a batch's own statistics, and the running ones after it."""
    data, part, training = read_data("mambavision.npz", f"{name}/"), PARTS[name](), name == "conv_block_train"
    helpers.assert_official_part(part, data)
    # the gradient of a bias before the statistics of a batch is zero in theory, and not compared
    assert len(below(data, "grads/")) >= len(list(part.parameters())) - 2 * training
    after = below(data, "after/")
    assert len(after) == 6 * training
    assert all(relative(part.state_dict()[key].double(), value) < 1e-6 for key, value in after.items())


class Count(torch.nn.Module):
    """Adds to every token its number in its window, plus 100 times the number of the window, and remembers what it saw."""

    def forward(self, tokens):
        self.seen = tokens
        windows, length = torch.arange(len(tokens)), torch.arange(tokens.shape[1])
        return tokens + (100 * windows[:, None] + length)[..., None]


@pytest.mark.parametrize("size", [(4, 6), (5, 7), (2, 3), (3, 9), (3, 3)])
def test_windows_by_hand(size):
    """In row-major order; what is padded is zero on the way in, and cut off on the way out."""
    h, w = size
    stage, x = mambavision.WindowStage([Count()], None, 3), torch.randn(2, 5, h, w)
    found = stage(x)
    rows, columns = -(-h // 3), -(-w // 3)
    assert stage.blocks[0].seen.shape == (2 * rows * columns, 9, 5) and found.shape == x.shape
    padded = sum(not token.any() for window in stage.blocks[0].seen for token in window)
    assert padded == 2 * (9 * rows * columns - h * w)
    for b in range(2):
        for i in range(h):
            for j in range(w):
                window = (b * rows + i // 3) * columns + j // 3
                torch.testing.assert_close(found[b, :, i, j], x[b, :, i, j] + 100 * window + (i % 3 * 3 + j % 3))


@pytest.mark.parametrize(("depth", "kinds"), [(1, "M"), (2, "MA"), (5, "MMMAA"), (8, "MMMMAAAA")])
def test_which_blocks_scan(depth, kinds):
    model = nano("mambavision", depths=(1, 1, depth, 2))
    found = ["M" if isinstance(block.mixer, MambaVisionMixer) else "A" for block in model.stages[2].blocks]
    assert "".join(found) == kinds and mambavision.scan_blocks(depth) == kinds.count("M")


@pytest.mark.parametrize(("size", "params", "buffers", "entries", "giga", "left_out"), [
    ("tiny", 31_794_248, 3_755, (252, 219), ("1.7991", "2.6600"), ["0.1045", "0.0050", "0.0009"]),
    ("small", 50_140_584, 5_327, (285, 240), ("3.7066", "3.7739"), ["0.0959", "0.0066", "0.0012"]),
    ("base", 97_685_288, 7_055, (356, 311), ("6.4956", "8.4583"), ["0.2065", "0.0104", "0.0020"]),
])  # fmt: skip
def test_published_counts(size, params, buffers, entries, giga, left_out):
    """Of the release; its authors count 2-D convolutions and linear layers, and leave out attention, scan and conv1d."""
    counted = cost(f"mambavision_{size}_224", {}, (224, 224))
    with torch.device("meta"):
        model = timm.create_model(f"mambavision_{size}_224")
    assert (counted.num_params, sum(b.numel() for b in model.buffers())) == (params, buffers)
    assert (len(model.state_dict()), len(list(model.parameters()))) == entries
    convolutions = sum(counted.paper_terms[term] for term in ("stem", "conv_blocks", "downsampling"))
    total = sum(counted.paper_terms.values())
    assert tuple(f"{macs / 1e9:.4f}" for macs in (convolutions, total - convolutions)) == giga
    names = ("attention_products", "scan", "conv1d")
    assert set(counted.mac_terms) - set(counted.paper_terms) == set(names)
    assert [f"{counted.mac_terms[name] / 1e9:.4f}" for name in names] == left_out


@pytest.mark.parametrize(
    ("size", "enlarged", "usual"), [("tiny", 206.9, 100.5), ("small", 317.1, 166.2), ("base", 673.8, 335.5)]
)
def test_published_multiply_adds_of_dense_backbones(size, enlarged, usual):
    """At 800 x 1280 pixels, with the windows of the release's detectors and with those of the classifiers."""
    for windows, giga in (((112, 56), enlarged), ((14, 7), usual)):
        with torch.device("meta"):
            model = timm.create_model(f"mambavision_{size}_224", num_classes=0, windows=windows)
        assert round(sum(model.paper_mac_terms((800, 1280)).values()) / 1e9, 1) == giga


def test_windows_may_differ_from_those_of_the_training(tmp_path):
    """No weight depends on them: a classifier becomes the backbone of a detector with larger windows."""
    save_model(tmp_path / "weights.safetensors", "mambavision_nano_144", windows=[9, 5])
    pyramid = build_pyramid("mambavision_nano_144", options={"windows": (18, 9)})
    report = load_backbone(pyramid, open_weights(tmp_path / "weights.safetensors"))
    assert report["stages.2.blocks.0.mixer.A_log"] == "used" and report["norm.weight"] == "expected: not needed"
