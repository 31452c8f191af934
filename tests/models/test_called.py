"""A module that was replaced, wrapped, watched or quantised is called, in every family and on every backend."""

import copy
import types

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.nn.utils import parametrizations, prune

from repro.models import fused_block
from repro.models.as_built import are_as_built
from tests.models.helpers import HIERARCHICAL, nano, relative, shaken
from tests.models.test_all_families import DENOISERS, EVERY_FAMILY, named, prepare

READINGS = [
    ("vittt", {"reading": "conv1d_kernel=3,conv1d_bias=false,gate_bias=true"}),
    ("vittt", {"design": "dual"}),
    ("vittt", {"pool": "head"}),
    ("ladder_vittt", {"step": "plain"}),
    ("ladder_vittt", {"step": "q_is_k"}),
]
SMALL = {"depth": 1, "img_size": 48}
each = pytest.mark.parametrize(("family", "options"), named([*EVERY_FAMILY, *READINGS, *DENOISERS]))
LAYERS = nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.RMSNorm


class Changed(nn.Module):
    """A layer without any of its attributes, whose output is bent a little; by nothing at the start."""

    def __init__(self, layer):
        super().__init__()
        self.inside, self.much = layer, nn.Parameter(torch.zeros(()))

    def forward(self, x):
        out = self.inside(x)
        return out + self.much * (3 * out + 1).sin()


def start(family, options):
    small = {} if (family, options) in DENOISERS or family in HIERARCHICAL else dict(SMALL)
    small |= {"chunk_size": 4} if family == "lact" else {}
    torch.manual_seed(2)
    model, inputs = prepare(family, options | small, 48, 48)
    return model.eval(), inputs


def layers_of(model, kinds=LAYERS):
    """The innermost layers with weights, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def replace(model, kinds, wrap):
    for name, layer in layers_of(model, kinds).items():
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, wrap(layer))
    return model


@each
def test_every_layer_that_is_wrapped_has_an_effect(family, options):
    model, inputs = start(family, options)
    expected = model(*inputs)
    replace(model, LAYERS, Changed)
    assert relative(model(*inputs), expected) < 1e-4
    model(*inputs).square().sum().backward()
    silent = {name for name, x in model.named_parameters() if name.endswith(".much") and not (x.grad or 0)}
    assert not silent
    with torch.inference_mode():
        assert relative(model(*inputs), expected) < 1e-4


@each
def test_hooks_fire(family, options):
    """Of every layer with weights: before and after it, in evaluation and backwards, its own and those of all modules."""
    model, inputs = start(family, options)
    with torch.inference_mode():
        expected = model(*inputs)
    layers, seen = layers_of(model), []
    names = {layer: name for name, layer in layers.items()}

    def note(how):
        return lambda module, *_: seen.append((how, names.get(module)))

    own = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")
    handles = [getattr(layer, how)(note(how)) for how in own for layer in layers.values()]
    with torch.inference_mode():
        assert relative(model(*inputs), expected) < 1e-4
    assert set(seen) == {(how, name) for how in own[:2] for name in layers}
    for handle in handles:
        handle.remove()
    seen.clear()
    handles += [register_module_forward_hook(note("after")), register_module_full_backward_hook(note("backwards"))]
    handles += [layer.register_full_backward_hook(note(own[2])) for layer in layers.values()]
    try:
        model(*inputs).square().sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    assert {(how, name) for how in ("after", "backwards", own[2]) for name in layers} <= set(seen)


class Sparse(torch.Tensor):
    """A tensor of a kind of its own, as the weights of quantised and distributed layers are."""

    __tensor_flatten__ = None


def patch(layer):
    layer.forward = types.MethodType(lambda self, x: type(self).forward(self, x), layer)


def hook(name):
    return lambda layer: getattr(layer, name)(lambda *_: None)


def prune_some(layer):
    prune.l1_unstructured(layer, "weight", 0.1)


def retype(layer):
    layer.weight = nn.Parameter(torch.zeros_like(layer.weight).as_subclass(Sparse), requires_grad=False)


def own_class(layer):
    layer.__class__ = type("Own", (type(layer),), {})


WATCHED = {
    **{name: hook(name) for name in ("register_forward_hook", "register_forward_pre_hook")},
    **{name: hook(name) for name in ("register_full_backward_hook", "register_full_backward_pre_hook")},
    "a hook with kwargs": lambda layer: layer.register_forward_hook(lambda *_: None, with_kwargs=True),
    "a forward of its own": patch,
    "pruned": prune_some,
    "weight norm": parametrizations.weight_norm,
    "weight norm by a hook": nn.utils.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "a tensor of its own kind": retype,
    "a class of its own": own_class,
}
PLACES = ["dwconv", "mixer.in_proj", "mixer.lr_proj", "mixer.conv_q", "mixer.out_proj"]
PLACES += ["mlp.fc1_g", "mlp.fc1_x", "mlp.fc2"]
HOOKED = ["norm1", "norm2", "mixer.post_norm", "mixer", "mlp", "mlp.act", "mlp.norm", "mlp.drop1", "drop_path"]
REPLACED = {
    "dilated": ("dwconv", lambda: nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=32, bias=False)),
    "wider": ("dwconv", lambda: nn.Conv2d(32, 32, 5, padding=2, groups=32, bias=False)),
    "reflecting": ("dwconv", lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False, padding_mode="reflect")),
    "with a bias": ("mixer.in_proj", lambda: nn.Linear(32, 160)),
    "without a bias": ("mlp.fc2", lambda: nn.Linear(85, 32, bias=False)),
    "another activation": ("mlp.act", nn.GELU),
    "a norm in the MLP": ("mlp.norm", lambda: nn.LayerNorm(85)),
    "dropout": ("mlp.drop2", lambda: nn.Dropout(0.5)),
    "another norm": ("norm2", lambda: nn.RMSNorm(32)),
    "a norm without weights": ("norm1", lambda: nn.LayerNorm(32, elementwise_affine=False)),
    "a plain path": ("drop_path", nn.Sequential),
    "no mixer of ours": ("mixer", nn.Identity),
    "no MLP of ours": ("mlp", nn.Identity),
}


@pytest.fixture
def block(monkeypatch):
    """A block that the kernels of a GPU would run."""
    monkeypatch.setattr(fused_block, "_choose_backend", lambda *_: "triton")
    found = shaken(nano("vittt", depth=1, embed_dim=32, img_size=48)).blocks[0]
    assert fused_block.find_backend(found, torch.zeros(1, 1, 1)) == "triton"
    return found


@pytest.mark.parametrize(
    ("place", "change"),
    [
        *(("mixer.conv_k", change) for change in WATCHED),
        *((place, change) for place in PLACES for change in ("register_forward_hook", "a tensor of its own kind")),
    ],
)
def test_no_kernel_passes_a_watched_layer_by(block, place, change):
    WATCHED[change](block.get_submodule(place))
    assert fused_block.find_backend(block, torch.zeros(1, 1, 1)) is None
    fused_block.freeze(block, 9)
    assert block.frozen is None


@pytest.mark.parametrize("place", HOOKED)
def test_no_kernel_passes_a_hook_by(block, place):
    handle = block.get_submodule(place).register_forward_hook(lambda *_: None)
    assert fused_block.find_backend(block, torch.zeros(1, 1, 1)) is None
    handle.remove()
    assert fused_block.find_backend(block, torch.zeros(1, 1, 1)) == "triton"


@pytest.mark.parametrize("name", REPLACED)
def test_no_kernel_passes_another_layer_by(block, name):
    place, build = REPLACED[name]
    owner, _, own = place.rpartition(".")
    setattr(block.get_submodule(owner), own, build())
    assert fused_block.find_backend(block, torch.zeros(1, 1, 1)) is None


def test_copies_of_a_block_are_as_built(block):
    for other in (copy.deepcopy(block), copy.deepcopy(block).half(), copy.deepcopy(block).requires_grad_(False)):
        assert fused_block.find_backend(other, torch.zeros(1, 1, 1)) == "triton"


@pytest.mark.parametrize(
    ("family", "place"),
    [("vim", "conv1d_b"), ("vim", "x_proj"), ("vim", "dt_proj_b"), ("vittt", "conv_k"), ("mambavision", "conv1d_z")],
)
def test_no_joined_product_passes_a_watched_layer_by(family, place):
    mixer = next(m for m in nano(family).modules() if place in m._modules)
    built = {name: layer for name, layer in _expected(family, mixer).items() if name == place}
    assert are_as_built(mixer, built)
    mixer.get_submodule(place).register_forward_hook(lambda *_: None)
    assert not are_as_built(mixer, built)


def _expected(family, mixer):
    from repro.models import mambavision, vim

    return {"vim": vim._CONVS | vim._PROJECTIONS, "mambavision": mambavision._CONVS}.get(family) or mixer.convs
