"""A block of Vittt on a CPU is one operation of the same bits to everybody who watches; who looks inside gets its parts."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from kernels.around import numba_path
from kernels.custom_op import SeesParts
from repro.bench.memory import _LiveStorages
from repro.models import fused_block, fused_loops
from tests.models.helpers import Calls, Named, small_vittt
from tests.models.writes import UNCOUNTED, WRITES
from tests.slow import first, slow

GRID = 2, 3
TOKENS = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))


def make_block(**options):
    return small_vittt(**options).blocks[0]


class Seen(TorchDispatchMode):
    """The operations of ours that pass."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += [func.name()] * (func.namespace == "vision_ttt")
        return func(*args, **(kwargs or {}))


def compile_by(backend, **options):
    def run(block):
        torch.compiler.reset()
        return torch.compile(block, backend=backend, fullgraph=True, **options)(TOKENS, GRID)

    return run


def within(*contexts):
    def run(block):
        with contextlib.ExitStack() as stack:
            for make_context in contexts:
                stack.enter_context(make_context())
            return block(TOKENS, GRID)

    return run


def count_flops():
    return FlopCounterMode(display=False)


WATCHERS = {
    "a profiler": within(torch.profiler.profile),
    "autograd's profiler": within(torch.autograd.profiler.profile),
    "a counter of FLOPs": within(count_flops),
    "a dispatch mode": within(Seen),
    "a mode and a profiler": within(count_flops, torch.profiler.profile),
    "storages": within(_LiveStorages),
    "a function mode": within(Calls),
    "a device": within(lambda: torch.device("cpu")),
    "inference mode": within(torch.inference_mode, count_flops),
    "a range": within(lambda: torch.profiler.record_function("block")),
    "anomalies": within(torch.autograd.detect_anomaly),
    "a compiler": compile_by("eager"),
    "a compiler that traces": compile_by("aot_eager"),
    "any size": compile_by("aot_eager", dynamic=True),
    "a proxy": lambda block: make_fx(lambda tokens: block(tokens, GRID))(TOKENS)(TOKENS),
}


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        *(slow(name, False) if name == "any size" else (name, False) for name in WATCHERS),
        *((name, True) for name in ("a profiler", "inference mode", "a compiler that traces")),
    ],
)
@torch.no_grad()
def test_who_watches_gets_the_same_bits(name, frozen):
    block = make_block()
    expected = block(TOKENS, GRID)
    assert not torch.equal(expected, block.forward_plainly(TOKENS, GRID))  # else the bits would say nothing
    if frozen:
        fused_block.freeze(block, 6)
    assert torch.equal(WATCHERS[name](block), expected)


@torch.no_grad()
def test_a_block_is_one_operation():
    with Seen() as seen:
        small_vittt(depth=2)(IMAGES)
    assert seen.names == ["vision_ttt::vittt_block_loops"] * 2


# --- who needs the parts


def enable_grad(block):
    with torch.enable_grad():
        return block(TOKENS, GRID)


def derive(block):
    with torch.enable_grad():
        tokens = TOKENS.clone().requires_grad_()
        out = block(tokens, GRID)
        assert torch.autograd.grad(out.sum(), tokens)[0].abs().max() > 0
    return out


def dual(block):
    with forward_ad.dual_level():
        out, tangent = forward_ad.unpack_dual(block(forward_ad.make_dual(TOKENS, torch.ones_like(TOKENS)), GRID))
        assert tangent is not None
        return out.clone()


def dual_weight(block):
    """The tokens of the block have no tangent, a weight has."""
    with forward_ad.dual_level():
        weights = {"norm1.bias": forward_ad.make_dual(block.norm1.bias.detach(), torch.ones(32))}
        out, tangent = forward_ad.unpack_dual(torch.func.functional_call(block, weights, (TOKENS, GRID)))
        assert tangent is not None
        return out.clone()


def vmap(block):
    return torch.vmap(lambda tokens: block(tokens, GRID))(TOKENS[None])[0]


def vmap_weights(block):
    weights = {name: each[None] for name, each in block.named_parameters()}
    return torch.vmap(lambda each: torch.func.functional_call(block, each, (TOKENS, GRID)))(weights)[0]


def compile_transform(block):
    torch.compiler.reset()
    return torch.compile(lambda: vmap(block), backend="eager", fullgraph=True)()


class Parts(SeesParts):
    """Sees what a block is made of."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name() != "vision_ttt::vittt_block_loops"
        return func(*args, **(kwargs or {}))


class Whole(torch.nn.Module):
    """A block on its grid, which an export does not take from its inputs."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, tokens):
        return self.block(tokens, GRID)


def export(**options):
    return lambda block: torch.export.export(Whole(block), (TOKENS,), **options).module()(TOKENS)


def trace(block):
    with mock.patch("torch.jit.is_tracing", lambda: True):
        return block(TOKENS, GRID)


def hook_everywhere(block):
    fired = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: fired.append(module))
    with handle, count_flops():
        out = block(TOKENS, GRID)
    assert block.norm2 in fired
    return out


def hook_compiled(block):
    """Which is added before it is compiled."""
    torch.compiler.reset()
    fired = []
    block.norm2.register_forward_hook(lambda *_: fired.append(1))
    out = torch.compile(block, backend="eager")(TOKENS, GRID)
    assert fired == [1]
    return out


PARTS = {
    "gradients": enable_grad,
    "a gradient": derive,
    "training": lambda block: block.train()(TOKENS, GRID),
    "a tangent": dual,
    "a weight's tangent": dual_weight,
    "jvp": lambda block: torch.func.jvp(lambda x: block(x, GRID), (TOKENS,), (TOKENS,))[0],
    "vmap": vmap,
    "vmap of weights": vmap_weights,
    "vmap, compiled": compile_transform,
    "export": export(),
    "strict export": export(strict=True),
    "tracing": trace,
    "a subclass": lambda block: block(TOKENS.as_subclass(Named), GRID).as_subclass(torch.Tensor),
    "a mode that sees parts": within(Parts),
    "a mode before another": within(Parts, count_flops),
    "a hook on everything": hook_everywhere,
    "a hook, compiled": hook_compiled,
}


@pytest.fixture
def no_loops(monkeypatch):
    """The first of a block's loops, whoever calls it, fails."""
    monkeypatch.setattr(numba_path, "run_conv_norm", mock.Mock(side_effect=AssertionError("a loop")))


@pytest.mark.parametrize("name", [slow(name) if name == "strict export" else name for name in PARTS])
@torch.no_grad()
def test_who_looks_inside_gets_the_plain_path(name, no_loops):
    block = make_block()
    for watch in (within(), within(count_flops)):
        with pytest.raises(AssertionError, match="a loop"):
            watch(block)
    expected = block.forward_plainly(TOKENS, GRID)
    torch.testing.assert_close(PARTS[name](block).detach(), expected, rtol=1e-5, atol=1e-5)


def test_a_trace_asks_for_no_loops():
    """Of the whole block there is none: the operators' lists of flags cannot be traced."""
    block, asked = make_block().requires_grad_(False), []

    def run(tokens):
        asked.append(fused_block.find_backend(block, tokens))
        return tokens + 1

    with torch.no_grad():
        torch.jit.trace(run, (TOKENS,), check_trace=False)
        assert asked == [None] and fused_block.find_backend(block, TOKENS) == "numba"


@pytest.mark.parametrize(("chunk_size", "expected"), [(4, "triton"), (0, None)])
@torch.no_grad()
def test_kernels_of_a_whole_sequence_run_only_at_the_length_that_they_were_chosen_for(
    monkeypatch, chunk_size, expected
):
    """Which is that of the 3 x 3 patches that the block is built for."""
    monkeypatch.setattr(fused_block, "_choose_backend", mock.Mock(return_value="triton"))
    block = make_block(chunk_size=chunk_size)
    assert fused_block.find_backend(block, torch.zeros(1, 9, 32)) == "triton"
    assert fused_block.find_backend(block, TOKENS) == expected


# --- the operator

FORMS = {
    "small": ({}, 1, (3, 3)),
    "batch": ({}, 3, (2, 2)),
    "one token": ({}, 1, (1, 1)),
    "a row": ({}, 1, (1, 7)),
    "a column": ({}, 2, (7, 1)),
    "heads": ({"num_heads": 1}, 1, (3, 3)),
    "whole chunks": ({"chunk_size": 4}, 2, (4, 4)),
    "a shorter chunk": ({"chunk_size": 4}, 1, (3, 5)),
    "one chunk": ({"chunk_size": 0}, 1, (3, 3)),
    "wide": ({"embed_dim": 64, "num_heads": 1}, 1, (2, 3)),
    "more tokens than are taken together": ({}, 1, (27, 19)),
    "largest": ({"pool": "max"}, 1, (3, 4)),
    "shared": ({"w0": "shared"}, 1, (4, 3)),
}


@pytest.mark.parametrize(("options", "batch", "grid"), FORMS.values(), ids=FORMS)
@torch.no_grad()
def test_its_flops_are_those_of_the_plain_path(options, batch, grid):
    block, tokens = make_block(**options), torch.randn(batch, grid[0] * grid[1], options.get("embed_dim", 32))
    found, expected = count_flops(), count_flops()
    with found:
        block(tokens, grid)
    with expected:
        block.forward_plainly(tokens, grid)
    assert found.get_total_flops() == expected.get_total_flops()
    assert list(found.get_flop_counts()["Global"]) == [torch.ops.vision_ttt.vittt_block_loops]


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.float64)])
@pytest.mark.parametrize(("options", "batch", "grid"), first(FORMS.values(), 5))
def test_the_operator_is_what_it_says(options, batch, grid, dtype):
    """Its schema, its fake and its way through a compiler. It has no derivative, as gradients take the plain path, so
    that nothing of autograd is registered, and nothing of it is checked.
    """
    block = make_block(**options).to(dtype)
    T, D = grid[0] * grid[1], block.mixer.dim
    with torch.no_grad():
        constants = [x.detach() for x in fused_block.make_loop_constants(block, T)]
        for tokens in (torch.randn(batch, T, D, dtype=dtype), torch.randn(batch, D, T, dtype=dtype).mT):
            given = tokens, constants, grid[0], [1e-6, 1e-5, 1e-4, 1e-3]
            tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
            torch.library.opcheck(fused_loops.OPERATOR, given, test_utils=tests)


# --- compiled models


def compile_and_keep(model):
    """The compiled model, and how many blocks each of its graphs has."""
    counts = []

    def keep(graph, inputs):
        counts.append(sum("vittt_block" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    return torch.compile(model, backend=keep, fullgraph=True), counts


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_loops_in_half_precision_are_no_further_from_fp64_than_the_plain_path(dtype, frozen):
    """Only the products are in the model's dtype; all between them is in fp32."""
    block, tokens = make_block().to(dtype), TOKENS.to(dtype)
    stated = copy.deepcopy(block).double().forward_plainly(tokens.double(), GRID)
    if frozen:
        fused_block.freeze(block, 6)
    with Seen() as seen:
        out = block(tokens, GRID)
    errors = [(found.double() - stated).norm() for found in (out, block.forward_plainly(tokens, GRID))]
    assert seen.names == ["vision_ttt::vittt_block_loops"] and out.dtype == dtype
    assert 0 < errors[0] <= errors[1]


@pytest.mark.parametrize("frozen", [False, True])
@torch.no_grad()
def test_a_compiled_model_has_an_operator_a_block(frozen):
    model = small_vittt(depth=2)
    expected = model(IMAGES)
    compiled, counts = compile_and_keep(model.freeze() if frozen else model)
    assert torch.equal(compiled(IMAGES), expected) and counts == [2]


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
@torch.no_grad()
def test_inductor_keeps_the_loops(frozen):
    model = small_vittt(depth=2)
    expected = model(IMAGES)
    torch.compiler.reset()
    found = torch.compile(model.freeze() if frozen else model, fullgraph=True)(IMAGES)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


ONES = ("copy_", "data", "add_ to a part", "load", "half and back", "a step", "an average", "load and assign")
CHANGES = {name: WRITES[name] for name in ONES} | UNCOUNTED


def require_new(model, compiled, before):
    with torch.no_grad():
        found = compiled(IMAGES)
        assert torch.equal(found, model(IMAGES)) and not torch.equal(found, before)


@pytest.mark.parametrize("change", first(CHANGES.values(), 2))
def test_a_compiled_model_takes_new_weights(change):
    model = small_vittt()
    compiled, _ = compile_and_keep(model)
    with torch.no_grad():
        before = compiled(IMAGES)
    change(model)
    require_new(model, compiled, before)


@pytest.mark.parametrize("change", first(CHANGES.values(), 2))
def test_a_compiled_frozen_model_takes_new_weights_when_it_is_frozen_again(change):
    """A graph compares nothing: see `Vittt.freeze`."""
    model = small_vittt().freeze()
    compiled, counts = compile_and_keep(model)
    with torch.no_grad():
        before = compiled(IMAGES)
    change(model)
    model.freeze()
    require_new(model, compiled, before)
    assert set(counts) == {1}


@pytest.mark.parametrize(
    "name", ["load", slow("half and back"), slow("data.mul_, in training"), slow("load and assign")]
)
def test_a_compiled_frozen_model_sees_what_ends_the_freeze_at_once(name):
    model = small_vittt().freeze()
    compiled, _ = compile_and_keep(model)
    with torch.no_grad():
        before = compiled(IMAGES)
    WRITES[name](model)
    require_new(model, compiled, before)
