"""The Triton kernels compiled for three GPUs, without a GPU, and what was recorded of it. Not for Triton's interpreter."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import selected_backend
from kernels.tools import check, resources, ttt_linear_cases
from kernels.tools.operators import OPERATORS
from kernels.tools.ttt_linear_cases import KERNELS, Sizes, compilation
from kernels.ttt_linear import op, triton_bwd, triton_fwd
from kernels.ttt_linear.op import _backward_op, _forward_op

RECORD = Path(__file__).parents[2] / "results" / "measured" / "compile" / "resources.json"


def test_they_are_compiled():
    assert not triton_fwd.INTERPRETED, "TRITON_INTERPRET is set: run this file without it"


@pytest.mark.parametrize("target", resources.TARGETS)
@pytest.mark.parametrize("dtype", check.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_default_config_compiles_without_spills(kernel, dtype, target):
    found = compilation(kernel, dtype).read(target)
    counts = found["instructions"]
    assert counts["BAR"] > 0 and found["loops"]  # the disassembly was read
    if dtype == "fp32":
        assert counts["HMMA"] == counts["HGMMA"] == 0  # ieee products
    else:
        assert (found["stack_bytes"], counts["LDL"], counts["STL"]) == (0, 0, 0)
        assert counts["HGMMA" if target == 90 else "HMMA"] > 0


# (D, chunk size): all kinds of tiles, the largest in two-byte elements included
OTHER_SIZES = [(16, 16), (64, 4), (64, 32), (64, 64), (128, 16), (128, 64)]


@pytest.mark.parametrize(("width", "chunk_size"), OTHER_SIZES)
@pytest.mark.parametrize("kernel", ["ttt_linear_forward", "ttt_linear_backward"])
def test_other_sizes_compile_and_fit(kernel, width, chunk_size):
    """In two-byte elements the default fits the 99 KiB of the smallest GPUs, so that `auto` may take it anywhere."""
    assert compilation(kernel, "bf16", chunk_size, width).read(89)["shared_bytes"] <= 99 * 1024


@pytest.mark.parametrize(("width", "chunk_size"), [(64, 32), (128, 16)])
def test_shared_memory_of_fp32_is_what_the_table_says(width, chunk_size):
    """`SHARED_KIB` says which sizes need more than 99 KiB, and how much; the rest fits."""
    found = compilation("ttt_linear_backward", "fp32", chunk_size, width).read(89)["shared_bytes"]
    said = triton_fwd.SHARED_KIB.get((width, chunk_size))
    assert -(-found // 1024) == said if said else found <= 99 * 1024


@pytest.mark.parametrize(("shared_kib", "backend"), [(99, "torch"), (163, "torch"), (227, "triton")])
def test_sizes_that_do_not_fit_a_device_run_on_torch(monkeypatch, shared_kib, backend):
    """An Ada, an Ampere and a Hopper card: D 128 with chunks of 32 in fp32 needs 200 KiB."""
    card = SimpleNamespace(name="a card", major=8, minor=9, shared_memory_per_block_optin=shared_kib * 1024)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(op, "_triton_obstacle", op._triton_obstacle.__wrapped__)
    asked = {"head_dim": 128, "chunk_size": 32, "dtype": torch.float32}
    assert selected_backend("auto", "cuda", **asked) == backend
    if backend == "torch":
        with pytest.raises(ValueError, match=f"needs 200 KiB of shared memory, the device has {shared_kib}; use auto"):
            selected_backend("triton", "cuda", **asked)
    card.major = 7
    with pytest.raises(ValueError, match="q is on a card, expected an NVIDIA GPU from sm_80 on"):
        selected_backend("triton", "cuda")


@pytest.mark.parametrize("module", [triton_fwd, triton_bwd])
def test_configs_differ(module):
    for dtype in check.DTYPES.values():
        for chunk_size in triton_fwd.CHUNK_SIZES:
            for width in triton_fwd.WIDTHS:
                found = [str(x) for x in module.configs(dtype, chunk_size, width)]
                assert 1 < len(set(found)) == len(found) <= 4


def test_instructions_and_loops_are_read_from_a_listing():
    listing = """
.L_x_0:
        /*0000*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
.L_x_1:
        /*0010*/              @!P0 SHFL.BFLY PT, R1, R2, 0x1, 0x1f ;
        /*0020*/             @!UP0 LDL R1, [R2] ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
        /*0050*/              @!P2 BRA `(.L_x_3) ;
.L_x_2:
        /*0060*/                   BRA `(.L_x_2) ;
.L_x_3:
        /*0070*/                   EXIT ;
"""
    names, loops = resources._instructions(listing)
    assert names == ["BAR", "SHFL", "LDL", "BRA", "BRA", "BRA", "BRA", "EXIT"]
    assert loops == [(0, 4), (1, 3)]


@pytest.mark.parametrize("name", OPERATORS)
def test_the_record_is_of_these_kernels(name):
    """results/measured/compile/resources.json: made from these sources, every kernel, size, dtype, config and target."""
    metrics = json.loads(RECORD.read_text())["metrics"]
    changed = f"the kernels changed: run `repro kernels resources --op {name}`"
    assert metrics["source_sha256"][name] == resources.source_hash(OPERATORS[name]), changed
    rows = [row for row in metrics["rows"] if row["operator"] == name]
    expected = [labels for labels, _, _ in resources.planned(OPERATORS[name])]
    assert [{key: row[key] for key in labels} for row, labels in zip(rows, expected, strict=True)] == expected


def test_the_record_has_what_was_promised_of_ttt_linear():
    """No spills in the default configs in two-byte elements; the largest tiles take the shared memory that the table says."""
    rows = [row for row in json.loads(RECORD.read_text())["metrics"]["rows"] if row["operator"] == "ttt_linear"]
    assert len(rows) == sum(
        len(module.configs(check.DTYPES[dtype], chunk_size)) * len(resources.TARGETS)
        for module, _, _ in KERNELS.values()
        for chunk_size in triton_fwd.CHUNK_SIZES
        for dtype in check.DTYPES
    )
    promised = [r for r in rows if r["default"] and r["config"]["chunk_size"] == 16 and r["dtype"] != "fp32"]
    assert len(promised) == 18
    assert all((r["stack_bytes"], r["instructions"]["LDL"], r["instructions"]["STL"]) == (0, 0, 0) for r in promised)
    largest = {r["config"]["chunk_size"]: r["shared_bytes"] for r in rows if r["default"] and r["dtype"] == "fp32"}  # the backward's
    assert [-(-size // 1024) for size in largest.values() if size > 99 * 1024] == [triton_fwd.SHARED_KIB[64, 64]]


@pytest.mark.parametrize(
    ("chunk_size", "width", "dtype", "backend"),
    [
        (16, 64, "bfloat16", "triton"),
        (64, 128, "float16", "triton"),
        (12, 64, "float16", "torch"),
        (16, 48, "float32", "torch"),
        (16, 64, "float64", "torch"),
    ],
)
def test_auto_takes_triton_on_a_gpu_where_it_can(chunk_size, width, dtype, backend):
    """Asked of a GPU that need not exist."""
    asked = {"head_dim": width, "chunk_size": chunk_size, "dtype": getattr(torch, dtype)}
    assert selected_backend("auto", "cuda", **asked) == backend
    assert selected_backend("torch", "cuda", **asked) == "torch"


def test_shapes_on_a_gpu_that_need_not_exist():
    """Fake tensors on CUDA: the operator's shapes, dtypes and device, forward and backward, without running anything."""
    options = (16, [False, True], 1e-6, "auto")
    with FakeTensorMode():
        inputs = [x.float().to("cuda") for x in ttt_linear_cases.draw(0, Sizes(batch=2, tokens=300, heads=3))[:9]]
        out, states = _forward_op(*inputs, *options, True)
        gradients = _backward_op(out, states, *inputs, *options)
    assert (out.shape, out.device.type) == (inputs[0].shape, "cuda")
    assert (states.shape, states.dtype) == ((12, 2, 65, 64), torch.float32)  # 19 chunks are three groups of eight
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype) for x in inputs]
