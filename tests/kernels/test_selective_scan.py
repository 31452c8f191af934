"""What is the selective scan's own: the releases' tensors, routes, the gate, tiles, large steps, its errors."""

import pytest
import torch
import torch.nn.functional as F

from kernels import dispatch
from kernels.selective_scan import selective_scan, selective_scan_bidir, selective_scan_routes, torch_path
from kernels.selective_scan.op import CUSTOM_OP, one_direction
from kernels.selective_scan.reference import selective_scan_recurrence
from kernels.tools.check import relative_error
from kernels.tools.selective_scan_cases import CASES as cases
from kernels.tools.selective_scan_cases import VMAMBA, Sizes
from tests.kernels.helpers import find_errors
from tests.models.helpers import read_data

INPUTS, draw = cases.INPUTS, cases.draw

BACKENDS = pytest.mark.parametrize("backend", ["torch", "reference"])


def test_the_reference_is_the_official_release():
    """The release has channels before tokens."""
    data = read_data("vim_scan.npz") | read_data("vim_scan.npz", "inputs/")
    u, delta, B, C, z = (data[name].mT for name in ("u", "delta", "B", "C", "z"))
    rest = data["D"], z, data["delta_bias"]
    out, last = selective_scan_recurrence(u, delta, data["A"], B, C, *rest, return_last_state=True)
    assert relative_error(out, data["out"].mT) < 1e-6
    assert relative_error(last, data["last_state"]) < 1e-6


@pytest.mark.parametrize(("release", "routes"), [("vmamba", 4), ("mambavision", 1)])
def test_scan_of_hierarchical_releases(release, routes):
    """VMamba's four routes of one state, MambaVision's one of eight: output and gradients. Routes are channels."""
    data = read_data(f"{release}.npz", "scan/")

    def by_route(name, x):
        if name in ("u", "delta", "out"):
            return x.unflatten(1, (routes, -1)).permute(0, 3, 1, 2)  # (B,R·E,T) -> (B,T,R,E)
        # (B,R,N,T) -> (B,T,R,N); (R·E,...)
        return x.permute(0, 3, 1, 2) if name in ("B", "C") else x.unflatten(0, (routes, -1))

    inputs = [None if name == "z" else by_route(name, data[f"inputs/{name}"]).requires_grad_() for name in INPUTS]
    out = selective_scan_routes(*inputs, reverse=[False] * routes, backend="reference")
    assert relative_error(out, by_route("out", data["out"])) < 1e-6
    out.backward(by_route("out", data["grad_out"]))
    given = {name: x.grad for name, x in zip(INPUTS, inputs, strict=True) if x is not None}
    errors = {name: relative_error(x, by_route(name, data[f"grads/{name}"])) for name, x in given.items()}
    assert len(errors) == 7 and max(errors.values()) < 2e-6, errors


@BACKENDS
def test_routes_are_single_calls(backend):
    """Five routes over K = 1 and over K = 5 sequences, in any pattern of directions, with a gate; and Vim's two."""
    five = (False, True, True, False, True)
    for reverse, sequences in ((five, 1), (five, 5), ((False, True), 2)):
        sizes = Sizes(batch=2, tokens=13, channels=6, state_dim=3, reverse=reverse, sequences=sequences)
        u, *rest = draw(0, sizes)[:-1]
        out = selective_scan_routes(u, *rest, reverse=reverse, backend=backend)
        for r, back in enumerate(reverse):
            alone = one_direction([u if sequences > 1 else u.expand(-1, -1, 5, -1), *rest], r)
            assert relative_error(out[:, :, r], selective_scan(*alone, reverse=back, backend=backend)) < 1e-12
    assert relative_error(selective_scan_bidir(u, *rest, backend=backend), out) == 0


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_full_precision_leaves_out_the_last_rounding(dtype, backend):
    """In the dtype of the state; rounded, it is the output of the usual call, and so are the gradients of that dout."""
    sizes = Sizes(batch=2, tokens=17, channels=6)
    *inputs, dout = cases.cast(draw(0, sizes), dtype)
    results = {}
    for full in (False, True):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = selective_scan_bidir(*leaves, full_precision=full, backend=backend)
        results[full] = [out.to(dtype), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]
        assert full or out.dtype == dtype
    assert all(map(torch.equal, *results.values()))
    exact = selective_scan_bidir(*(x.double() for x in inputs), backend="reference")
    one = selective_scan(*one_direction(inputs), full_precision=True, backend=backend)
    for found, wanted in ((out, exact), (one, exact[:, :, 0])):
        assert found.dtype == dispatch.compute_dtype(dtype) and relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize(("options", "dtype"), [(VMAMBA, torch.float16), ({"gate": False}, torch.float64)])
def test_opcheck_of_routes_and_without_a_gate(options, dtype):
    """Shared sequences, a full-precision output of fp16 inputs; the gradient of a gate that is not there is empty."""
    sizes = Sizes(batch=2, tokens=7, channels=4, **options)
    *inputs, dout = cases.cast(draw(0, sizes), dtype)
    plain = cases.arguments(inputs, sizes)
    leaves = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in plain]
    for keep in (True, False):
        torch.library.opcheck(CUSTOM_OP.forward, (*leaves, "torch", keep))
    out, states = CUSTOM_OP.forward(*plain, "torch", True)
    assert out.dtype == dispatch.compute_dtype(dtype) and out.shape == dout.shape
    torch.library.opcheck(CUSTOM_OP.backward, (out, states, *plain, "torch"))
    assert CUSTOM_OP.backward(out, states, *plain, "torch")[INPUTS.index("z")].numel() == 0


@pytest.mark.parametrize(("batch", "tokens"), [(1, 100), (5, 23), (3, 16)], ids=["tiles", "blocks", "one even tile"])
def test_tiles_and_blocks_join(monkeypatch, batch, tokens):
    """Sizes at which the tokens are cut into tiles, and the batch into blocks, of unequal lengths."""
    monkeypatch.setattr(torch_path, "_MIN_TOKENS", 4)
    monkeypatch.setattr(torch_path, "_TILE_ELEMENTS", 2 * 8 * 16 * 2 * 8)
    monkeypatch.setattr(torch_path, "_STEP_ELEMENTS", 2 * 8 * 16 * 2)
    assert torch_path.states_shape((batch, tokens, 2, 8), 16, True)[0] > 0
    sizes = Sizes(batch=batch, tokens=tokens, channels=8)
    assert max(find_errors(cases, draw(0, sizes), sizes, "torch").values()) < 1e-9


def test_memory_is_that_of_activations():
    """The kept states of Vim-T, -S and -B are at most one activation (B,T,2,E) in the compute dtype."""
    for E in (384, 768, 1536):
        for T in (197, 1025, 6401):
            states = torch.Size(torch_path.states_shape((8, T, 2, E), 16, True)).numel()
            assert 0 < states <= 8 * T * 2 * E


def test_large_steps_and_rates_neither_overflow_nor_vanish():
    """Δ to 60, A to −16: decays of e^−960 and none at all, side by side."""
    sizes = Sizes(batch=1, tokens=40, channels=6)
    inputs = dict(zip((*INPUTS, "dout"), (x.float() for x in draw(0, sizes)), strict=True))
    inputs["delta"], inputs["A"] = 20 * inputs["delta"], 5 * inputs["A"]
    assert max(find_errors(cases, list(inputs.values()), sizes, "torch").values()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softplus(dtype):
    """To the relative accuracy of e^−|x| with a rounded exponent, also where it is small."""
    x = torch.linspace(-80, 80, 3201, dtype=dtype)
    expected = F.softplus(x.double(), threshold=1000)
    assert ((torch_path._softplus(x) / expected - 1).abs() <= torch.finfo(dtype).eps * (2 + x.double().abs())).all()


@BACKENDS
@pytest.mark.parametrize("name", ["delta", "B", "C", "z"])
def test_nan_goes_forward_only(name, backend):
    """From a token to all that follow it (C and z: to its own output), and to none before it."""
    inputs = dict(zip(INPUTS, one_direction(draw(0, Sizes(batch=1, tokens=20, channels=3))[:-1]), strict=True))
    inputs[name][0, 9] = float("nan")
    bad = selective_scan(*inputs.values(), backend=backend).isnan().all(-1).flatten()
    assert bad[9] and not bad[:9].any()
    assert bad[10:].all() if name in ("delta", "B") else not bad[10:].any()


def test_wrong_arguments():
    """The message names the operator, the argument and what is expected of it."""
    small, of_vmamba = ({"batch": 1, "tokens": 6, "channels": 4, **more} for more in ({"state_dim": 3}, VMAMBA))
    two, four = (dict(zip(INPUTS, draw(0, Sizes(**sizes))[:-1], strict=True)) for sizes in (small, of_vmamba))
    one = dict(zip(INPUTS, one_direction(list(two.values())), strict=True))
    wrong = [
        (selective_scan, one, {"reverse": 1}, TypeError, "reverse is 1"),
        (selective_scan, one, {"u": one["u"][0]}, ValueError, r"u .*\(B,T,E\)"),
        (selective_scan, one, {"C": one["u"]}, ValueError, r"C .*\(1, 6, 3\)"),
        (selective_scan_bidir, two, {"A": two["A"][0]}, ValueError, r"A .*\(2,E,N\)"),
        (selective_scan_bidir, two, {"full_precision": 1}, TypeError, "full_precision is 1"),
        *((selective_scan_routes, four, {"reverse": x}, TypeError, "reverse") for x in (True, [], [0, 1])),
        (selective_scan_routes, four, {"reverse": [False, True, True]}, ValueError, "u .* divisor of the 3 routes"),
        (selective_scan_routes, four, {"A": four["A"][..., 0]}, ValueError, r"A .*\(4,E,N\)"),
        (selective_scan_routes, four, {"delta": four["u"]}, ValueError, r"delta .*\(1, 6, 4, 4\)"),
    ]
    for function, right, changed, error, message in wrong:
        routes = {"reverse": VMAMBA["reverse"]} if function is selective_scan_routes else {}
        with pytest.raises(error, match=f"{function.__name__}: {message}"):
            function(**right | routes | changed)
