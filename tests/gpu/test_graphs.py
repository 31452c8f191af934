"""A frozen Vittt on this GPU: its CUDA graphs give what the eager model gives, and let everybody look who wants to."""

import pytest
import torch

from repro.models.graphs import CALLS
from repro.models.registry import build_model
from tests.gpu.conftest import SIDE

NANO = "vittt_nano_patch16_144"


@pytest.fixture
def model(device):
    torch.manual_seed(0)
    network = build_model(NANO, num_classes=10, img_size=SIDE).to(device, torch.bfloat16).eval()
    return network.freeze()


def draw(device, batch=2, side=SIDE):
    return torch.randn(batch, 3, side, side, device=device, dtype=torch.bfloat16)


@torch.inference_mode()
def run(model, *batches):
    return [model(images) for images in batches]


def eager(model, *batches):
    """By a model of the same weights and constants, whose calls compile, tune and launch alike."""
    kept, model.graphs = model.graphs, None
    try:
        return run(model, *batches)
    finally:
        model.graphs = kept


def require_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_five_calls_are_the_eager_model(model, device):
    batches = [draw(device) for _ in range(5)]
    found = run(model, *batches)
    assert len(model.graphs.passes) == 1
    require_equal(found, eager(model, *batches))


def test_sizes_that_alternate_and_are_dropped(model, device):
    """All layouts share a pool, and what is dropped is captured again."""
    model.freeze(graphs=2)
    batches = [draw(device, batch, side) for batch, side in ((1, SIDE), (3, SIDE), (2, 2 * SIDE))] * (3 * CALLS)
    require_equal(run(model, *batches), eager(model, *batches))
    assert 1 <= len(model.graphs.passes) <= 2


def test_autocast(model, device):
    """What autocast keeps of a weight ends with its context, before the graph does."""
    model.float().freeze()
    batches = [draw(device).float() for _ in range(CALLS + 3)]
    found = []
    for images in batches:
        with torch.autocast("cuda", torch.bfloat16):
            found += run(model, images)
        torch.empty(2**24, device=device).fill_(float("nan"))  # where the casts lay
    assert len(model.graphs.passes) == 1
    with torch.autocast("cuda", torch.bfloat16):
        require_equal(found, eager(model, *batches))


def test_a_graph_of_one_s_own(model, device):
    """It is captured after the model's, and outlives it."""
    given, images = draw(device), draw(device)
    run(model, *[given] * (CALLS + 1))
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        out = model(given)
    run(model, *[draw(device, 4)] * (CALLS + 1))
    expected = eager(model, images)
    model.graphs.drop()
    given.copy_(images)
    graph.replay()
    require_equal([out], expected)


def test_a_hook_after_the_capture_fires(model, device):
    images, seen = draw(device), []
    run(model, *[images] * (CALLS + 1))
    with model.blocks[0].register_forward_hook(lambda *given: seen.append(given)):
        run(model, images)
    assert len(seen) == 1 and len(model.graphs.passes) == 1


def test_another_weight_is_seen(model, device):
    images = draw(device)
    before = run(model, *[images] * (CALLS + 1))[-1]
    with torch.no_grad():
        model.blocks[0].mixer.out_proj.weight.mul_(3)
    found = run(model, images)
    assert not model.graphs.passes and not torch.equal(found[0], before)
    require_equal(found, eager(model, images))


def test_another_stream_has_its_own(model, device):
    batches = [draw(device) for _ in range(2 * CALLS + 2)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    found = []
    for images in batches:
        found += run(model, images)
        with torch.cuda.stream(stream):
            found += run(model, images)
    torch.cuda.synchronize()
    assert len(model.graphs.passes) == 2
    require_equal(found, [each for out in eager(model, *batches) for each in (out, out)])


def test_dropped_graphs_give_their_memory_back(model, device):
    images = draw(device, 64)
    run(model, images)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    run(model, *[images] * (CALLS + 1))
    model.train()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(device) <= before + 2**24


def test_a_freeze_under_another_stream(device):
    """The constants are made there, and read here at once."""
    torch.manual_seed(0)
    network = build_model(NANO, num_classes=10, img_size=SIDE).to(device, torch.bfloat16).eval()
    images, stream = draw(device), torch.cuda.Stream()
    (expected,) = run(network, images)
    with torch.cuda.stream(stream):
        network.freeze()
    require_equal(run(network, images), [expected])


def test_training_begins_while_a_graph_runs(model, device):
    """Which lets go of the graphs and of what they read."""
    images = draw(device, 64)
    expected = eager(model, images)
    run(model, *[images] * (CALLS + 1))
    found = run(model, images)
    model.train()
    torch.empty(2**28, device=device).fill_(torch.nan)  # the memory that is free now
    require_equal(found, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_a_model_on_a_gpu_that_is_not_the_current_one():
    torch.manual_seed(0)
    network = build_model(NANO, num_classes=10, img_size=SIDE).to("cuda:1", torch.bfloat16).eval().freeze()
    images = draw("cuda:1")
    assert torch.cuda.current_device() == 0
    found = run(network, *[images] * (CALLS + 2))
    assert {out.device.index for out in found} == {1} and network.graphs.passes
    require_equal(found, eager(network, images) * len(found))
