"""Random inputs of the operators, and a fixture that poisons uninitialised memory."""

import pytest
import torch

NAMES = ("q", "k", "v", "lr", "token_scale", "W0", "b0", "ln_weight", "ln_bias")


@pytest.fixture
def make_inputs():
    """make_inputs(B, T, H, D, chunk, R=None, dtype=fp64, seed=0) -> the nine tensors, of `ttt_linear_bidir` with R=2."""

    def make(B, T, H, D, chunk, R=None, dtype=torch.float64, seed=0):
        random = torch.Generator().manual_seed(seed)

        def normal(*shape, scale=1.0, mean=0.0):
            return mean + scale * torch.randn(shape, generator=random, dtype=torch.float64)

        r = () if R is None else (R,)
        tokens, head = (B, T, *r, H, D), (*r, H, D)
        lr = torch.sigmoid(normal(B, T, H)) / D
        scale = (1 / torch.arange(1, chunk + 1) + normal(*r, chunk, scale=0.02)).clamp(min=0)
        W0, b0 = normal(*head, D, scale=0.1), normal(*head, scale=0.1)
        inputs = (normal(*tokens), normal(*tokens), normal(*tokens), lr, scale, W0, b0)
        inputs += (normal(*head, scale=0.1, mean=1.0), normal(*head, scale=0.1))
        low = dtype in (torch.bfloat16, torch.float16)
        return tuple(x.to(torch.float32 if low and i > 2 else dtype) for i, x in enumerate(inputs))

    return make


@pytest.fixture
def make_wkv():
    """make_wkv(B, T, C, w=1/T, k=1, dtype=fp64, seed=0) -> w, u, k, v of `bi_wkv` and a cotangent; w and u normal with scale `w`."""

    def make(B, T, C, w=None, k=1.0, dtype=torch.float64, seed=0):
        random = torch.Generator().manual_seed(seed)
        scales = (1 / T if w is None else w,) * 2 + (k, 1.0, 1.0)
        shapes = ((C,),) * 2 + ((B, T, C),) * 3
        drawn = [x * torch.randn(shape, generator=random, dtype=torch.float64) for x, shape in zip(scales, shapes, strict=True)]
        low = dtype in (torch.bfloat16, torch.float16)
        return [x.to(torch.float32 if low and i < 2 else dtype) for i, x in enumerate(drawn)]

    return make


@pytest.fixture
def relative():
    """relative(a, b) -> max |a − b| / max |b| in fp64; infinite when either is not finite."""

    def measure(a, b):
        a, b = a.detach().double(), b.detach().double()
        assert a.shape == b.shape
        error = (a - b).abs().max() / b.abs().max()
        return error.item() if error.isfinite() else float("inf")

    return measure


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Every tensor that torch.empty* and Tensor.new_empty return holds NaN, so that an element never written shows."""

    def poison(function):
        def filled(*args, **kwargs):
            x = function(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() and x.device.type != "meta" else x

        return filled

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.fixture
def make_scan_inputs():
    """make_scan_inputs(B, T, E, N=16, R=None, dtype=fp64, seed=0, gate=True) -> the eight arguments of `selective_scan`, or of
    `selective_scan_bidir` with R=2. Step sizes from 1e-3 to 5, rates to −20.
    """

    def make(B, T, E, N=16, R=None, dtype=torch.float64, seed=0, gate=True):
        random = torch.Generator().manual_seed(seed)

        def normal(*shape, scale=1.0, mean=0.0):
            return mean + scale * torch.randn(shape, generator=random, dtype=torch.float64)

        r = () if R is None else (R,)
        u, delta, A = normal(B, T, *r, E), normal(B, T, *r, E), -torch.exp(normal(*r, E, N))
        readings = normal(B, T, *r, N), normal(B, T, *r, N)
        inputs = (u, delta, A, *readings, normal(*r, E), normal(B, T, E), normal(*r, E, scale=2.0, mean=-2.0))
        low = dtype in (torch.bfloat16, torch.float16)
        inputs = [x.to(torch.float32 if low and i in (2, 5, 7) else dtype) for i, x in enumerate(inputs)]
        return (*inputs[:6], inputs[6] if gate else None, inputs[7])

    return make


@pytest.fixture
def make_deform_inputs():
    """make_deform_inputs(B, Q, M, C, P, shapes, dtype=fp64, seed=0, outside=2) -> value, locations, weights of `ms_deform_attn` and
    a cotangent. Points lie on the maps and up to `outside` pixels beyond, off the pixels' rows and columns, where derivatives jump.
    """

    def make(B, Q, M, C, P, shapes, dtype=torch.float64, seed=0, outside=2):
        random = torch.Generator().manual_seed(seed)

        def drawn(draw, *shape):
            return draw(shape, generator=random, dtype=torch.float64)

        L, S = len(shapes), sum(h * w for h, w in shapes)
        w_h = torch.tensor([(w, h) for h, w in shapes])[:, None]
        pixel = (drawn(torch.rand, B, Q, M, L, P, 2) * (w_h + 2 * outside)).floor() - outside - 0.5
        locations = (pixel + 0.03 + 0.94 * drawn(torch.rand, B, Q, M, L, P, 2)) / w_h
        weights = drawn(torch.randn, B, Q, M, L, P)
        points = torch.float64 if dtype == torch.float64 else torch.float32
        value, cotangent = (drawn(torch.randn, B, n, M, C).to(dtype) for n in (S, Q))
        return [value, locations.to(points), weights.to(points), cotangent]

    return make
