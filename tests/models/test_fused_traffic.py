"""Models on a GPU that need not exist, on tensors without data: what a CUDA graph cannot hold, launches, bytes, graphs."""

import math
import weakref
from types import SimpleNamespace

import pytest
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import repro.models  # noqa: F401  registers the models
from kernels import dispatch
from kernels.around import triton_bwd as around_bwd
from kernels.around import triton_fwd as around_fwd
from kernels.ttt_linear import triton_bwd as ttt_bwd
from kernels.ttt_linear import triton_fwd as ttt_fwd
from kernels.ttt_linear import triton_phases
from repro.models import fused_block, fused_launches, fused_training

NANO, TINY = "vittt_nano_patch16_144", "vittt_tiny_patch16_224"
SIZES = {"multi_processor_count": 132, "shared_memory_per_block_optin": 227 * 1024}
H100 = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, **SIZES)
aten = torch.ops.aten
# views of results that nothing else has, and what only reserves memory
FREE = {aten._unsafe_view.default, aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}


def count_bytes(x):
    """Of the elements that exist: an expanded axis has one."""
    return x.element_size() * math.prod(size if stride else 1 for size, stride in zip(x.shape, x.stride(), strict=True))


class Watch(TorchDispatchMode):
    """Keeps what a method finds in each operation and its tensors, unless it is None."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves([args, kwargs or {}, out]) if isinstance(x, torch.Tensor)]
        found = self.look(func, args, tensors)
        if found is not None:
            self.found.append(found)
        return out


class Elsewhere(Watch):
    """The name of every operation with a tensor that is not on the GPU."""

    def look(self, func, args, tensors):
        devices = {x.device.type for x in tensors}
        return f"{func} on {', '.join(sorted(devices))}" if devices - {"cuda"} else None


class Traffic(Watch):
    """The bytes of each operation that is no view: it reads its inputs once, and writes its outputs once."""

    def look(self, func, args, tensors):
        aliases = [each.alias_info for each in func._schema.returns]
        is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        if func.namespace not in ("aten", "vision_ttt") or is_view or func in FREE:
            return None
        written_over = count_bytes(args[0]) if func._schema.name.endswith("_") else 0  # it is read and written
        return sum(count_bytes(x) for x in {id(x): x for x in tensors}.values()) + written_over


class Held(Watch):
    """The bytes that tensors hold at once after each operation, of those that an operation has taken or made."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def look(self, func, args, tensors):
        self.known |= {id(x): weakref.ref(x) for x in tensors}
        alive = [x.untyped_storage() for ref in self.known.values() if (x := ref()) is not None]
        return sum({each._cdata: each.nbytes() for each in alive}.values())


def move(model):
    """Give the model parameters and buffers on a GPU that need not exist."""
    for module in model.modules():
        for key, x in list(module.named_parameters(recurse=False)):
            x = torch.empty(x.shape, dtype=torch.bfloat16, device="cuda")
            setattr(module, key, torch.nn.Parameter(x, requires_grad=False))
        for key, x in list(module.named_buffers(recurse=False)):
            dtype = torch.bfloat16 if x.is_floating_point() else x.dtype
            module.register_buffer(key, torch.empty(x.shape, dtype=dtype, device="cuda"))


# --- what a CUDA graph cannot hold: whatever waits for or leaves the device


def find_elsewhere(name, harm=lambda x: None):
    """What a model's second call in bf16 inference does that a graph cannot hold; `harm` changes its norm's output."""
    model = timm.create_model(name, depth=2).eval()
    model.norm.register_forward_hook(lambda module, inputs, out: harm(out))
    side = int(name.rpartition("_")[2])
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        move(model)
        images = torch.empty(1, 3, side, side, dtype=torch.bfloat16, device="cuda")
        model(images)
        with Elsewhere() as seen:
            out = model(images)
    assert out.device.type == "cuda"
    return seen.found


@pytest.mark.parametrize("family", ["vittt", "vim", "vrwkv", "vit3", "t5"])
def test_a_warm_model_stays_on_its_device(family):
    assert find_elsewhere(f"{family}_tiny_patch16_224") == []


@pytest.mark.parametrize(
    "harm", [lambda x: x + torch.ones(1, device="cpu").to(x.device), lambda x: x + x.cpu().to(x.device)]
)
def test_what_leaves_the_device_is_seen(harm):
    """What waits for it raises by itself, as these tensors have no data."""
    assert find_elsewhere(NANO, harm)


# --- launches and bytes of a block of Vittt-T at 1280 x 1280 pixels, against counts by hand


def run_block(watch, fused, side=80, batch=64):
    """What a watch finds in a block of bf16 inference, and the bytes of its (B,T,D) tokens."""
    block = timm.create_model(TINY, depth=1).blocks[0].eval()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"), torch.no_grad():
        move(block)
        tokens = torch.empty(batch, side * side, block.mixer.dim, dtype=torch.bfloat16)
        if fused:
            fused_block.freeze(block, side * side)
        with watch:
            (block if fused else block.forward_plainly)(tokens, (side, side))
    return watch.found, count_bytes(tokens)


# plain: DWConv with residual and norm 7, projection 7, padding and convolutions 16, scan 8, gate, sum and norm 10, output
# 5, SwiGLU 29.3 and some for the rates; fused: convolution and norm 3, projection 6.3, convolutions 6, scan 8, gate and
# norm 4, output 3, norm 2, SwiGLU 8.4
@pytest.mark.parametrize(("fused", "units", "launches"), [(False, 83.5, range(36, 100)), (True, 40.9, [11])])
def test_a_fused_block_moves_half_the_bytes_in_a_quarter_of_the_launches(fused, units, launches):
    moved, unit = run_block(Traffic(), fused)
    assert sum(moved) / unit == pytest.approx(units, abs=0.1) and len(moved) in launches


def test_what_a_fused_block_holds_at_once():
    """Tokens, what convolution and norm make of them 2, the projection 5.3, keys and queries 4, the result 2."""
    held, unit = run_block(Held(), fused=True)
    assert max(held) / unit == pytest.approx(14.4, abs=0.15)


@pytest.fixture
def no_launches(monkeypatch):
    """Kernels that nothing launches, on tensors without data, for a GPU that need not exist."""
    for module in (around_fwd, around_bwd, ttt_fwd, ttt_bwd, triton_phases):
        monkeypatch.setattr(module, "launch", lambda *given: None)
    for module in (ttt_bwd, triton_phases):
        monkeypatch.setattr(module, "find_gpu", lambda device: H100)


class Copies(Traffic):
    """The bytes of what only moves tensors, or adds two."""

    def look(self, func, args, tensors):
        moving = ("aten::cat", "aten::stack", "aten::clone", "aten::copy_", "aten::_to_copy", "aten::add", "aten::add_")
        return super().look(func, args, tensors) if func._schema.name in moving else None


def test_gradients_of_a_block_are_copied_nowhere_but_around_the_scan(no_launches):
    """The scan reads v as rows of its own and writes dv so: 2 U read and written, twice, and what is written over."""
    block, eps = timm.create_model(TINY, depth=1).blocks[0], [1e-6] * 4
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"), torch.no_grad():
        move(block)
        tokens = torch.empty(64, 6400, block.mixer.dim, dtype=torch.bfloat16)
        weights = fused_block.read_weights(block, 6400)
        known = fused_launches.arrange_taps(fused_launches.arrange(weights))
        _, kept = fused_training.run_forward(tokens, known, 80, eps, None, True)
        with Copies() as copies:
            fused_training.run_backward(torch.empty_like(tokens), tokens, weights, known, 80, eps, None, kept)
    assert sum(copies.found) / count_bytes(tokens) == pytest.approx(10, abs=0.1)


# --- fused blocks under torch.compile: one graph, of the launches alone


@pytest.fixture
def gpu(monkeypatch):
    """A GPU for every question about it, and nothing remembered of the machine without one."""
    monkeypatch.setattr(dispatch, "find_gpu", lambda device: H100)
    for name in ("package_obstacle", "triton_obstacle"):
        monkeypatch.setattr(dispatch, name, getattr(dispatch, name).__wrapped__)
    torch.compiler.reset()


def trace(depth, freeze):
    """The graph of Vittt-T in bf16 inference with so many blocks, and how many launches it has."""
    model, found = timm.create_model(TINY, depth=depth).eval(), []

    def keep(graph, inputs):
        found.append((graph, inputs))
        return graph.forward

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        move(model)
        if freeze:
            model.freeze()
        images = torch.empty(1, 3, 224, 224, dtype=torch.bfloat16, device="cuda")
        torch.compile(model, backend=keep, fullgraph=True)(images)
        ((graph, inputs),) = found
        with Traffic() as traffic:
            graph(*inputs)
    return graph, len(traffic.found)


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [True, False])
def test_twelve_blocks_are_one_graph_of_an_operator_each(gpu, freeze):
    """What is in place within an operator is no copy of the graph's."""
    graph, _ = trace(12, freeze)
    called = [str(node.target) for node in graph.graph.nodes]
    assert sum("vision_ttt" in target for target in called) == 12 == sum("vittt_block" in target for target in called)
    assert not any("scatter" in target for target in called)


def test_a_frozen_block_in_a_graph_is_one_operation(gpu):
    """Its constants are made of nothing: they come from buffers."""
    (_, one), (graph, two), (_, unfrozen) = trace(1, True), trace(2, True), trace(2, False)
    assert two - one == 1 and unfrozen > two
    called = [str(node.target) for node in graph.graph.nodes]
    assert sum("vittt_block" in target for target in called) == 2
    assert not any("scatter" in target for target in called)
