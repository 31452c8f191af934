"""Vittt's fused blocks under torch.compile, on a made-up GPU and without data: one graph, of the launches alone."""

from types import SimpleNamespace

import pytest
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import repro.models  # noqa: F401
from kernels import dispatch
from tests.models.test_capture import move
from tests.models.test_fused_traffic import Traffic
from tests.slow import slow

SIZES = {"multi_processor_count": 132, "shared_memory_per_block_optin": 227 * 1024}
H100 = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, **SIZES)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU for every question about it, and nothing remembered of the machine without one."""
    monkeypatch.setattr(dispatch, "find_gpu", lambda device: H100)
    for name in ("package_obstacle", "triton_obstacle"):
        monkeypatch.setattr(dispatch, name, getattr(dispatch, name).__wrapped__)
    torch.compiler.reset()


def trace(depth, freeze):
    """The graph of Vittt-T in bf16 inference with so many blocks, and what runs it on its inputs."""
    model, found = timm.create_model("vittt_tiny_patch16_224", depth=depth).eval(), []

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
    return graph, traffic.moved


@pytest.mark.parametrize("freeze", [True, slow(False)])
def test_twelve_blocks_are_one_graph(gpu, freeze):
    graph, _ = trace(12, freeze)
    called = [str(node.target) for node in graph.graph.nodes]
    assert sum("vision_ttt" in target for target in called) == 12 * 5  # all of them fused


def test_a_frozen_block_in_a_graph_is_eleven_launches(gpu):
    """Its constants are made of nothing: they come from buffers."""
    assert len(trace(3, True)[1]) - len(trace(2, True)[1]) == 11
    assert len(trace(3, False)[1]) - len(trace(2, False)[1]) > 11
