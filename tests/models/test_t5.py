"""T5: the tensors of the official release, counts by hand, and what its switches do."""

import pytest
import torch
import torch.nn.functional as F

from repro.bench.flops import cost
from repro.models.inner import InnerLoop, learn
from repro.models.inner_mixer import LOOPS, InnerMixer, KeyNorm, attend_linearly
from repro.models.neighbours import attend_to_neighbours, find_neighbours
from repro.models.t5 import CHOICES, T5, official_state_dict
from tests.models.helpers import assert_official_part, below, load_official, nano, read_data, relative

TINY = "t5_tiny_patch16_224"
BLOCKS = {
    "swiglu_kin_dwcqk": {"inner": "swiglu", "dwc": "qk"},
    "two_layer_kin": {"inner": "2layer"},
    "dit5_two_layer_mse_kin_dwcqk": {"inner": InnerLoop(loss="mse"), "dwc": "qk"},
    "dit5_mixed_nat5": {"inner": InnerLoop(loss="mse"), "dwc": "qk", "affine": True, "neighbours": 5},
}


def ours(official: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a block of the release, or gradients of them, under the names of `InnerMixer`."""
    named = {f"blocks.0.attn.{key}": value for key, value in official.items() if "_ttt" not in key}
    renamed = official_state_dict(named)
    renamed = {key.removeprefix("blocks.0.attn."): value for key, value in renamed.items()}
    if "qk_scale_ttt" in official and "qk_offset_ttt" in official:  # each (1, 1, C, 2)
        both = torch.stack([official[name][0, 0] for name in ("qk_scale_ttt", "qk_offset_ttt")], dim=-1)
        renamed["affine"] = both.transpose(0, 1)
    return renamed


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_the_release(name):
    truth = read_data("t5.npz", name + "/")
    mixer = InnerMixer(int(truth["dim"]), int(truth["num_heads"]), key_norm="instance", **BLOCKS[name])
    scale = truth.pop("grads/qk_scale_ttt", None)
    assert_official_part(mixer, truth, run=lambda part, x: part(x, (6, 6)), rename=ours, backward=1e-4)
    if scale is not None:
        assert relative(mixer.affine.grad[..., 0].T, scale[0, 0]) < 1e-4


@pytest.mark.parametrize(
    ("inner", "name"),
    {"gate": "one_layer_gate", "2layer": "two_layer", "3layer": "three_layer", "swiglu": "swiglu"}.items(),
)
def test_formulas(inner, name):
    truth = read_data("t5.npz", "formula/")
    q, k, v = (truth[key] for key in "qkv")
    weights = [value[0] for key, value in sorted(below(truth, f"{name}/w/").items())]
    assert LOOPS[inner].scale is None and float(truth["scale"]) == pytest.approx(q.shape[-1] ** -0.5, rel=1e-12)
    assert relative(learn(LOOPS[inner], weights, q, k, v, (5, 5)), truth[f"{name}/out"]) < 1e-12


def test_a_converted_model_of_the_release():
    truth = read_data("t5.npz", "conversion/")
    shape = {key: int(value) for key, value in below(truth, "config/").items() if value.numel() == 1}
    teacher, student = T5(**shape, inner="softmax", key_norm="none", dwc="none").eval(), T5(**shape).eval()
    load_official(teacher, below(truth, "teacher_state_dict/"))
    load_official(student, below(truth, "teacher_state_dict/") | below(truth, "new_parameters/"))
    with torch.no_grad():
        assert relative(teacher(truth["x"]), truth["teacher_logits"]) < 1e-5
        assert relative(student(truth["x"]), truth["logits"]) < 1e-5
    assert student.new_parameters() == set(official_state_dict(below(truth, "new_parameters/")))


def test_multiply_adds_of_the_release_by_hand():
    """As the release's authors count: fvcore with 5 per value of a LayerNorm and 4 of the keys' norm."""
    for options, macs in (({}, 1.3443e9), ({"inner": "2layer", "dwc": "none"}, 1.2495e9)):
        counted = cost(TINY, options, (224, 224), fvcore=True)
        assert sum(counted.fvcore_terms.values()) == pytest.approx(macs, rel=1e-4)
    assert cost(TINY, {"neighbours": 5}, (224, 224)).macs - cost(TINY, {}, (224, 224)).macs == 12 * 196 * 2 * 25 * 192


@pytest.mark.parametrize("kind", CHOICES["key_norm"])
def test_key_norms_by_their_definitions(kind):
    k = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    centred, deviation = k - k.mean(1, keepdim=True), (k.var(1, correction=0, keepdim=True) + 1).sqrt()
    expected = {
        "none": k,
        "instance": F.instance_norm(k.mT, eps=1.0).mT,
        "no_std": centred,
        "no_mean": k / deviation,
        "layer": F.layer_norm(k, (6,), eps=1e-6),
        "rms": k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
    }
    assert relative(KeyNorm(kind)(k), expected[kind]) < 1e-12
    shifted = KeyNorm(kind)(k + torch.arange(6.0))
    assert torch.allclose(shifted, KeyNorm(kind)(k)) == (kind in ("instance", "no_std"))


@pytest.mark.parametrize("projected", [False, True])
def test_linear_attention_is_a_weighted_mean(projected):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 5, 4, generator=generator, dtype=torch.float64)
    weights = list(torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)) if projected else []
    found = attend_linearly(q, k, v, weights)
    if projected:
        k, q = torch.einsum("bhnd,hde->bhne", k, weights[0]), torch.einsum("bhnd,hde->bhne", q, weights[1])
    scores = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    assert relative(found, scores / scores.sum(-1, keepdim=True) @ v) < 1e-6  # the sum is kept from zero by 1e-6


@pytest.mark.parametrize(("grid", "window"), [((6, 6), 5), ((4, 9), 3), ((3, 8), 5), ((1, 1), 3), ((2, 1), 5)])
def test_neighbourhood_attention_by_loops(grid, window):
    """Each query's window moves inwards at a border, and has the grid's width where that is smaller."""
    rows, columns = grid
    q, k, v = torch.randn(3, 2, 2, rows * columns, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.zeros_like(v)
    for i in range(rows):
        for j in range(columns):
            top, left = (max(0, min(p - window // 2, n - window)) for p, n in ((i, rows), (j, columns)))
            ys, xs = (range(first, min(first + window, n)) for first, n in ((top, rows), (left, columns)))
            near = [y * columns + x for y in ys for x in xs]
            assert find_neighbours(grid, window)[i * columns + j].tolist() == near
            query = q[:, :, i * columns + j, None]
            expected[:, :, i * columns + j] = ((query @ k[:, :, near].mT / 2).softmax(-1) @ v[:, :, near])[:, :, 0]
    assert relative(attend_to_neighbours(q, k, v, grid, window), expected) < 1e-12


def test_only_what_a_softmax_model_lacks_is_new():
    student, twin = nano("t5", dwc="cpe", neighbours=3), nano("t5", inner="softmax", key_norm="none", dwc="none")
    names = [{name for name, _ in model.named_parameters()} for model in (student, twin)]
    assert student.new_parameters() == names[0] - names[1] and names[1] < names[0]
