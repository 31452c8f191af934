"""The store of a frozen model's CUDA graphs, over a driver whose graphs are copies of the model when it was captured."""

import contextlib
import copy
import functools
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from repro.models import graphs
from repro.models.graphs import CALLS, Graphs, Pass
from tests.models.helpers import Calls, Named, small_vittt
from tests.models.writes import NO_WRITES, WRITES, run
from tests.slow import slow

IMAGES = torch.randn(4, 1, 3, 48, 48, generator=torch.Generator().manual_seed(0))


class Driver:
    """Captures on a CPU: a graph is a copy of the model, so that it sees no later write and calls no later hook."""

    kind = "cpu"

    def __init__(self):
        self.captures, self.replays, self.held, self.released, self.stream, self.fails = 0, 0, 0, [], 0, False

    @contextlib.contextmanager
    def on(self, device):
        yield self.stream

    def make_pool(self):
        return object()

    def capture(self, run, given, pool):
        if self.fails:
            raise RuntimeError("operation not permitted")
        model, out = copy.deepcopy(run.__self__), run(given)
        self.captures, self.held = self.captures + 1, self.held + 1

        def replay():
            self.replays += 1
            out.copy_(model(given))

        return Pass(given, SimpleNamespace(replay=replay), out)

    def release(self, passes):
        self.held -= len(passes)
        self.released.append(len(passes))


def make(limit=8, driver=None):
    """A frozen model without a graph yet, and its driver."""
    model, driver = small_vittt().freeze(), driver or Driver()
    model.graphs = Graphs(model, limit, driver)
    return model, driver


def captured(images=IMAGES[0], **options):
    """The same after the calls that make a graph of these images' layout."""
    model, driver = make(**options)
    with torch.no_grad():
        for _ in range(CALLS + 1):
            model(images)
    assert (driver.captures, driver.replays) == (1, 1)
    return model, driver


@torch.inference_mode()
def run_eagerly(model, images):
    return copy.deepcopy(model)(images)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_after_three_calls_a_pass_is_repeated(mode):
    """Outputs are those of the eager model, and stay as they are."""
    model, driver = make()
    with mode():
        found = []
        for i in range(7):
            found.append(model(IMAGES[i % 4]))
            assert driver.captures == (i >= CALLS) and driver.replays == max(0, i + 1 - CALLS)
    for i, out in enumerate(found):
        torch.testing.assert_close(out, run_eagerly(model, IMAGES[i % 4]))


OTHERS = {
    "batch": lambda images: images.repeat(2, 1, 1, 1),
    "sides": lambda images: images[..., :32],
    "strides": lambda images: images.contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_layout_is_another_pass(other):
    model, driver = captured()
    with torch.no_grad():
        for count in range(CALLS + 2):
            found = model(other(IMAGES[1]))
            assert driver.captures == 1 + (count >= CALLS)
        torch.testing.assert_close(found, run_eagerly(model, other(IMAGES[1])))
        model(IMAGES[0])
    assert driver.held == 2 and driver.replays == 4


def test_autocast_and_another_stream_are_other_passes():
    model, driver = captured()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = [model(IMAGES[0]) for _ in range(CALLS + 1)]
    assert driver.captures == 2
    torch.testing.assert_close(found[0], found[-1])
    driver.stream = 7
    with torch.no_grad():
        for _ in range(CALLS):
            model(IMAGES[0])
        assert driver.replays == 2
        model(IMAGES[0])
    assert driver.captures == 3 and len(set(map(id, model.graphs._pools.values()))) == 2


def test_one_more_than_the_limit_drops_all():
    """And then a layout has to come twice as often."""
    model, driver = captured(limit=2)
    second, third = (OTHERS[name](IMAGES[0]) for name in ("batch", "sides"))
    with torch.no_grad():
        for images in (second, third):
            for _ in range(CALLS + 1):
                model(images)
        assert driver.released == [2] and driver.held == 1
        for _ in range(2 * CALLS):
            model(second)
        assert driver.held == 1
        model(second)
    assert driver.held == 2


def test_few_layouts_are_counted(monkeypatch):
    model, driver = make()
    monkeypatch.setattr(graphs, "SEEN", 2)
    with torch.no_grad():
        for _ in range(CALLS + 1):
            for batch in (1, 2, 3):
                model(IMAGES[0].expand(batch, -1, -1, -1))
    assert driver.captures == 0 and len(model.graphs.seen) == 2


def replace_head(model):
    model.head = nn.Linear(model.head.in_features, model.head.out_features)


# of the writes, which tests/models/test_frozen.py tries one by one, those that end the freeze and those that do not
CHANGES = {name: WRITES[name] for name in ("copy_", "data", "load", "a new layer", "half", "training")} | {
    "the head": lambda model: nn.init.normal_(model.head.weight),
    "another head": replace_head,
    "reset_classifier": lambda model: model.reset_classifier(5),
    "no pooling": lambda model: model.reset_classifier(0, ""),
    "the head loads": lambda model: model.head.load_state_dict(nn.Linear(*model.head.weight.shape[::-1]).state_dict()),
    "patches": lambda model: model.patch_embed.weight.data.zero_().add_(model.patch_embed.weight.add_(1.0).detach()),
    "positions": lambda model: setattr(model, "pos_embed", nn.Parameter(0 * model.pos_embed)),
    "the last norm": lambda model: model.norm.bias.add_(1.0),
    "eps": lambda model: setattr(model.norm, "eps", 1.0),
    "a block removed": lambda model: setattr(model, "blocks", model.blocks[:0]),
    "dropout": lambda model: model.head_drop.train(),
    "plain": lambda model: setattr(model.blocks[0], "is_fusible", False),
    "backend": lambda model: model.set_backend("torch"),
    "another class": lambda model: setattr(model.blocks[0].mlp, "act", nn.GELU()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_drops_them(change):
    """At the next pass at the latest, which computes what a model computes that was never frozen."""
    model, driver = captured()
    with torch.set_grad_enabled(change in WRITES.values()):
        change(model)
    found = run(model, IMAGES[1])
    assert (driver.held, driver.replays, driver.released) == (0, 1, [1])
    assert torch.equal(found, run(copy.deepcopy(model), IMAGES[1]))


@pytest.mark.parametrize("name", ["load", "load and assign", "half", "data.mul_, in training"])
def test_what_ends_the_freeze_drops_them_at_once(name):
    model, driver = captured()
    WRITES[name](model)
    assert driver.held == 0 and model.blocks[0].frozen is None


@pytest.mark.parametrize("name", ["copy_", "data", "load", "a new layer"])
def test_a_model_that_is_no_longer_frozen_gets_no_graph(name):
    model, driver = captured()
    WRITES[name](model)
    for _ in range(CALLS + 2):
        run(model, IMAGES[1])
    assert driver.captures == 1


@pytest.mark.parametrize("name", ["eval", "to", "save", "requires_grad_", "deepcopy", "gradients"])
def test_what_changes_nothing_keeps_them(name):
    model, driver = captured()
    NO_WRITES[name](model)
    run(model, IMAGES[1])
    assert (driver.held, driver.replays) == (1, 2)


def in_mode(mode):
    def call(model):
        with torch.no_grad(), mode():
            return model(IMAGES[1])

    return call


def deterministic(model):
    torch.use_deterministic_algorithms(True)
    try:
        return run(model, IMAGES[1])
    finally:
        torch.use_deterministic_algorithms(False)


def dual(model):
    with torch.no_grad(), forward_ad.dual_level():
        return model(forward_ad.make_dual(IMAGES[1], torch.ones_like(IMAGES[1])))


def in_own_capture(model):
    model.graphs.driver.stream = None
    return run(model, IMAGES[1])


def traced(model):
    with mock.patch("torch.jit.is_tracing", lambda: True):
        return run(model, IMAGES[1])


def compiled(model):
    torch.compiler.reset()
    return run(torch.compile(model, backend="eager", fullgraph=True), IMAGES[1])


WATCHED = {
    "gradients": lambda model: model(IMAGES[1]),
    "a dispatch mode": in_mode(functools.partial(FlopCounterMode, display=False)),
    "a function mode": in_mode(Calls),
    "a profiler": in_mode(torch.profiler.profile),
    "a subclass": lambda model: run(model, IMAGES[1].as_subclass(Named)),
    "deterministic mode": deterministic,
    "vmap": torch.no_grad()(lambda model: torch.vmap(model)(IMAGES[1][None])[0]),
    "a tangent": dual,
    "a graph of one's own": in_own_capture,
    "tracing": traced,
    "compiling": compiled,
    "export": torch.no_grad()(lambda model: torch.export.export(model, (IMAGES[1],)).module()(IMAGES[1])),
    "a replica": lambda model: run(copy.copy(model), IMAGES[1]),
    "another device": lambda model: setattr(model.graphs.driver, "kind", "cuda") or run(model, IMAGES[1]),
}


@pytest.mark.parametrize("name", [slow(name) if name == "compiling" else name for name in WATCHED])
def test_a_pass_into_which_somebody_looks_is_none_of_them(name):
    model, driver = captured()
    found = WATCHED[name](model)
    assert driver.replays == 1 and driver.held == 1
    torch.testing.assert_close(
        found.detach().as_subclass(torch.Tensor), run_eagerly(model, IMAGES[1]), rtol=1e-4, atol=1e-4
    )


def test_a_large_batch_is_none_of_them(monkeypatch):
    model, driver = captured()
    for most, replays in ((9, 2), (8, 2)):
        monkeypatch.setattr(graphs, "MOST_TOKENS", most)
        run(model, IMAGES[1])
        assert driver.replays == replays


def test_the_default_device_is_nobody_who_looks():
    model, driver = captured()
    with torch.device("cpu"):
        run(model, IMAGES[1])
    assert driver.replays == 2


HOOKS = {
    "its own": lambda model, note: model.register_forward_hook(note),
    "before its own": lambda model, note: model.register_forward_pre_hook(note),
    "a block's": lambda model, note: model.blocks[0].register_forward_hook(note),
    "before a norm": lambda model, note: model.blocks[0].norm1.register_forward_pre_hook(note),
    "a layer's that is read": lambda model, note: model.blocks[0].mixer.in_proj.register_forward_hook(note),
    "everybody's": lambda model, note: nn.modules.module.register_module_forward_hook(note),
}


@pytest.mark.parametrize("add", HOOKS.values(), ids=HOOKS)
def test_a_hook_after_the_capture_fires(add):
    """And when it is gone, the pass is repeated again."""
    model, driver = captured()
    seen = []
    hook = add(model, lambda *given: seen.append(given))
    try:
        run(model, IMAGES[1])
    finally:
        hook.remove()
    assert seen and driver.replays == 1
    run(model, IMAGES[1])
    assert driver.replays == 2 and driver.captures == 1


def test_a_forward_of_its_own_is_called():
    model, driver = captured()
    model.head.forward = lambda x: x * 0
    assert not run(model, IMAGES[1]).any() and driver.replays == 1


def test_a_hook_before_the_capture_fires_each_time():
    model, driver = make()
    seen = []
    model.blocks[0].register_forward_hook(lambda *given: seen.append(given))
    for _ in range(CALLS + 2):
        run(model, IMAGES[0])
    assert len(seen) == CALLS + 2 and not driver.captures


COPIES = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]


@pytest.mark.parametrize("make_copy", COPIES, ids=["deepcopy", "pickle"])
def test_a_copy_has_none(make_copy):
    model, driver = captured()
    other = make_copy(model)
    assert other.graphs is None and torch.equal(run(other, IMAGES[1]), run_eagerly(model, IMAGES[1]))
    assert list(model.state_dict()) == list(other.state_dict()) and driver.replays == 1


def test_they_go_with_the_model():
    """At once, and not when somebody collects garbage: they hold the memory of a pass."""
    model, _ = captured()
    ends = weakref.ref(model.graphs), weakref.ref(model.blocks[0].frozen)
    gc.disable()
    try:
        del model
        assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()


def test_a_capture_that_fails_is_said_once_and_the_model_runs_without(caplog):
    model, driver = make()
    driver.fails = True
    for _ in range(3 * CALLS):
        found = run(model, IMAGES[0])
    assert torch.equal(found, run_eagerly(model, IMAGES[0]))
    (said,) = caplog.records
    assert "Vittt" in said.getMessage() and "operation not permitted" in said.getMessage()


@pytest.mark.parametrize("shape", [(1, 3, 50, 48), (1, 4, 48, 48), (3, 48, 48), (0, 3, 48, 48)])
def test_other_inputs_are_what_they_are_without(shape):
    model, driver = captured()
    found = []
    for each in (model, copy.deepcopy(model)):
        try:
            found.append(run(each, torch.zeros(shape)).shape)
        except (ValueError, RuntimeError) as error:
            found.append(f"{type(error)} {error}")
    assert found[0] == found[1] and driver.held == 1


def test_threads_do_not_mix():
    model, driver = captured()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: run(model, IMAGES[i % 4]), range(24)))
    assert driver.replays == 25
    for i, out in enumerate(found):
        torch.testing.assert_close(out, run_eagerly(model, IMAGES[i % 4]))


def test_a_cpu_has_none_and_a_negative_number_is_refused():
    model, _ = make()
    assert model.freeze().graphs is None and model.freeze(graphs=0).graphs is None
    with pytest.raises(ValueError, match="graphs -1"):
        model.freeze(graphs=-1)
