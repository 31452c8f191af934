"""A block of Vittt in few launches: its output and gradients are the plain path's, which everything else takes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels.tools import check
from repro.models import fused_block, fused_launches
from tests.models.helpers import nano, shaken
from tests.models.writes import UNCOUNTED, WRITES, require_seen
from tests.slow import slow


def make(**options):
    options = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 80} | options
    return shaken(nano("vittt", **options)).train()


def make_small():
    """A model of one block, for images of two by two patches."""
    return make(depth=1, embed_dim=16, num_heads=1, img_size=32)


def draw_small():
    return torch.randn(1, 3, 32, 32)


def differentiate(model, images, backend):
    model.set_backend(backend)
    torch.manual_seed(3)  # of the branches that are dropped
    out = model(images)
    return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]


OTHERS = [{}, {"num_heads": 1}, {"reading": "eta_base=0.5,positions=none"}, {"pool": "max"}, {"drop_path_rate": 0.5}]


@pytest.mark.parametrize(
    ("options", "sides"),
    [
        ({"depth": 1, "embed_dim": 16, "num_heads": 1}, (32, 48)),
        slow({"pool": "max"}, (80, 80)),
        *(slow(options, (48, 96)) for options in OTHERS),
    ],
)
def test_it_is_the_plain_path(options, sides):
    """In fp32, on square and other grids whose last chunk is shorter, and where the same seed drops the same branches."""
    model, images = make(**options), torch.randn(2, 3, *sides)
    # auto takes torch on a CPU
    assert not any(fused_block.find_backend(block, torch.zeros(1, 1, 1)) for block in model.blocks)
    expected, found = (differentiate(model, images, backend) for backend in ("torch", "triton"))
    assert all(fused_block.find_backend(block, torch.zeros(1, 1, 1)) for block in model.blocks)
    names = ["out", *(name for name, _ in model.named_parameters())]
    errors = {name: check.relative_error(a, b, 1e-3) for name, a, b in zip(names, found, expected, strict=True)}
    assert max(errors.values()) < 2e-5, errors


def penalise(model, images, backend):
    """The gradients of the parameters through one of the images."""
    model.set_backend(backend)
    images = images.clone().requires_grad_()
    (found,) = torch.autograd.grad(model(images).square().sum(), images, create_graph=True)
    return torch.autograd.grad(found.square().sum(), list(model.parameters()), allow_unused=True)


def test_it_can_be_differentiated_twice():
    model, images = make_small(), draw_small()
    expected, found = (penalise(model, images, backend) for backend in ("reference", "triton"))
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or check.relative_error(a, b, 1e-3) < 1e-4


@pytest.mark.slow
def test_a_transform_finds_its_formulas():
    """The images' gradient by `torch.func`, which has no rule for a node of ours."""
    model, images = make_small(), draw_small()
    model.set_backend("triton")
    found = torch.func.grad(lambda x: model(x).square().sum())(images)
    leaf = images.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(leaf).square().sum(), leaf)
    assert check.relative_error(found, expected, 1e-3) < 2e-5


def names_of_nodes(out):
    """The name of each of autograd's nodes behind a tensor."""
    seen, left = set(), [out.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return [node.name() for node in seen]


def test_a_block_is_one_node_unless_somebody_looks_inside():
    block, tokens = make(num_heads=1).blocks[0], torch.randn(1, 6, 32)
    block.mixer.backend = "triton"
    assert names_of_nodes(block(tokens, (2, 3))).count("_NodeBackward") == 1
    with FlopCounterMode(display=False):
        assert "_NodeBackward" not in names_of_nodes(block(tokens, (2, 3)))
    fired: list[torch.nn.Module] = []
    block.mixer.in_proj.register_forward_hook(lambda module, given, out: fired.append(module))
    assert "_NodeBackward" not in names_of_nodes(block(tokens, (2, 3))) and fired == [block.mixer.in_proj]


def test_its_products_are_in_autocasts_dtype_and_its_gradients_in_the_weights():
    model, images = make_small(), draw_small()
    expected = differentiate(model, images, "torch")
    with torch.autocast("cpu", torch.float16):
        found = differentiate(model, images, "triton")
    assert {x.dtype for x in found[1:]} == {torch.float32}
    errors = [check.relative_error(a.float(), b, 1e-2) for a, b in zip(found, expected, strict=True)]
    assert 1e-5 < max(errors) < 5e-2, errors


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["mlp.fc1_g.bias", "mixer.W0"])
def test_some_weights_alone_are_trained(trained):
    model, images = make_small(), draw_small()
    model.requires_grad_(False).set_backend("triton")
    weight = model.blocks[0].get_parameter(trained).requires_grad_()
    (found,) = torch.autograd.grad(model(images).square().sum(), weight)
    expected = dict(zip(dict(model.named_parameters()), differentiate(model.requires_grad_(), images, "torch")[1:]))
    assert check.relative_error(found, expected[f"blocks.0.{trained}"], 1e-3) < 2e-5


CHANGES = [UNCOUNTED["data.mul_"], WRITES["load and assign"]]  # without `freeze` nothing needs to be counted


@pytest.mark.parametrize("change", CHANGES)
def test_new_weights_are_used_at_once(change):
    """`_version`, by which PyTorch counts writes, does not move for some of them."""
    model, images = make_small().eval(), draw_small()
    model.set_backend("triton")
    with torch.no_grad():
        before = model(images)
        change(model)
        found = model(images)
        model.set_backend("torch")
        torch.testing.assert_close(found, model(images), rtol=1e-4, atol=1e-4)
    assert not torch.equal(found, before)


@pytest.mark.parametrize("name", ["data, transposed", slow("a parametrized convolution"), slow("half")])
def test_a_write_ends_it(name):
    """`tests/models/test_frozen.py` has all writes, and what writes nothing, with another kind of constants."""
    model = make(depth=1, num_heads=1, img_size=48).eval()
    model.set_backend("triton")
    require_seen(model, WRITES[name])


def test_a_frozen_model_keeps_its_constants():
    """The bits of one that is not; nothing is made again but where gradients see it."""
    model, images = make_small().eval(), draw_small()
    model.set_backend("triton")
    with torch.inference_mode():
        expected, names = model(images), list(model.state_dict())
        assert torch.equal(model.freeze()(images), expected)
        block = model.blocks[0]
        kept = fused_block.find_constants(block, 4, fused_launches.LaunchConstants)
        assert kept[0] is fused_block.find_constants(block, 4, fused_launches.LaunchConstants)[0]
    assert fused_block.find_constants(block, 4, fused_launches.LaunchConstants)[0] is not kept[0]
    assert list(model.state_dict()) == names


@torch.no_grad()
def test_its_flops_in_inference_are_those_of_the_plain_path():
    """Though its products are padded."""
    block, tokens = make_small().eval().blocks[0], torch.randn(2, 6, 16)
    block.mixer.backend = "triton"
    found, expected = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with found:
        block(tokens, (2, 3))
    with expected:
        block.forward_plainly(tokens, (2, 3))
    assert list(found.get_flop_counts()["Global"]) == [torch.ops.vision_ttt.vittt_block_launches]
    assert found.get_total_flops() == expected.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, False])
@torch.no_grad()
def test_the_operator_is_what_it_says(frozen):
    """Its schema, its fake and its way through a compiler; it has no derivative, as gradients see the launches."""
    block = make_small().eval().blocks[0]
    known = fused_block.make_constants(block, 4)
    constants = [x.detach() for x in (fused_block.arrange_taps(known) if frozen else known)]
    given = torch.randn(1, 4, 16), constants, 2, [1e-6, 1e-5, 1e-4, 1e-3]
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(fused_launches.OPERATOR, given, test_utils=tests)


@pytest.mark.slow
def test_a_compiled_graph_takes_other_weights():
    """It compares nothing; loading, casting and training let go of what is kept, which it sees."""
    model, images = make_small().eval(), draw_small()
    model.set_backend("triton")
    compiled = torch.compile(model.freeze(), backend="eager", fullgraph=True)
    with torch.no_grad():
        before = compiled(images)
    # a CUDA graph would copy what is not static at each replay
    assert all(x._dynamo_static_input_type for x in model.blocks[0].frozen.constants)
    for name in ("load", "half and back", "data.mul_, in training"):
        WRITES[name](model.freeze())
        with torch.no_grad():
            found, expected = compiled(images), model(images)
        assert check.relative_error(found, expected) < 1e-5 < check.relative_error(found, before)
        before = found


def test_rows_of_the_projection_can_be_loaded_by_sixteen_bytes():
    """They, and where gate, keys and values start in them, are multiples of 16 numbers."""
    block = make_small().blocks[0]
    constants = fused_block.find_constants(block, 4, fused_launches.LaunchConstants)
    assert block.mixer.dim % 16 == len(constants.in_weight) % 16 == 0


def test_norms_without_eps_have_finite_gradients():
    """Nine tokens fill no program: the rows beyond them have no variance."""
    model, images = make(depth=1, embed_dim=16, num_heads=1, img_size=48), torch.randn(1, 3, 48, 48)
    for norm in (model.blocks[0].norm1, model.blocks[0].mixer.post_norm):
        norm.eps = 0.0
    expected, found = (differentiate(model, images, backend) for backend in ("torch", "triton"))
    assert max(check.relative_error(a, b, 1e-3) for a, b in zip(found, expected, strict=True)) < 2e-5
