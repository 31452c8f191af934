"""The Triton kernels compiled for three GPUs, without a GPU, and what was recorded of it. Not for Triton's interpreter."""

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import selected_backend
from kernels.tools import check, resources
from kernels.ttt_linear import triton_bwd, triton_fwd
from kernels.ttt_linear.op import _backward_op, _forward_op

RECORD = Path(__file__).parents[2] / "results" / "measured" / "compile" / "resources.json"
MODULES = [pytest.param(triton_fwd, id="forward"), pytest.param(triton_bwd, id="backward")]


def test_they_are_compiled():
    assert not triton_fwd.INTERPRETED, "TRITON_INTERPRET is set: run this file without it"


@pytest.mark.parametrize("target", resources.TARGETS)
@pytest.mark.parametrize("dtype", check.DTYPES)
@pytest.mark.parametrize("module", MODULES)
def test_default_config_compiles_without_spills(module, dtype, target):
    given = check.DTYPES[dtype]
    found = resources.compiled(module, given, 16, module.configs(given, 16)[0], target)
    counts = found["instructions"]
    assert counts["BAR"] > 0 and found["loops"]  # the disassembly was read
    if dtype == "fp32":
        assert counts["HMMA"] == counts["HGMMA"] == 0  # ieee products
    else:
        assert (found["stack_bytes"], counts["LDL"], counts["STL"]) == (0, 0, 0)
        assert counts["HGMMA" if target == 90 else "HMMA"] > 0


@pytest.mark.parametrize("chunk_size", [4, 8, 32, 64])
@pytest.mark.parametrize("module", MODULES)
def test_other_chunk_sizes_compile(module, chunk_size):
    found = resources.compiled(module, torch.bfloat16, chunk_size, module.configs(torch.bfloat16, chunk_size)[0], 90)
    assert found["shared_bytes"] <= 227 * 1024


@pytest.mark.parametrize("module", MODULES)
def test_configs_differ(module):
    for dtype in check.DTYPES.values():
        for chunk_size in triton_fwd.CHUNK_SIZES:
            found = [str(x) for x in module.configs(dtype, chunk_size)]
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


def test_the_record_is_of_these_kernels():
    """results/measured/compile/resources.json: made from these sources, every config of every kernel, no spills where promised."""
    metrics = json.loads(RECORD.read_text())["metrics"]
    assert metrics["source_sha256"] == resources.source_hash(), "the kernels changed: run `repro kernels resources`"
    expected = {
        (name, chunk_size, dtype, f"sm_{target}", *resources.describe(config).values())
        for name, module in resources.KERNELS.items()
        for chunk_size in triton_fwd.CHUNK_SIZES
        for dtype in check.DTYPES
        for config in module.configs(check.DTYPES[dtype], chunk_size)
        for target in resources.TARGETS
    }
    rows = metrics["rows"]
    options = ("num_warps", "num_stages", "maxnreg")
    found = [(r["kernel"], r["config"]["chunk_size"], r["dtype"], r["target"], *(r["config"][key] for key in options)) for r in rows]
    assert len(found) == len(set(found)) and set(found) == expected
    promised = [r for r in rows if r["default"] and r["config"]["chunk_size"] == 16 and r["dtype"] != "fp32"]
    assert len(promised) == 12
    assert all((r["stack_bytes"], r["instructions"]["LDL"], r["instructions"]["STL"]) == (0, 0, 0) for r in promised)


@pytest.mark.parametrize(
    ("chunk_size", "width", "dtype", "backend"),
    [(16, 64, "bfloat16", "triton"), (64, 128, "float32", "triton"), (12, 64, "float16", "torch"), (16, 48, "float32", "torch"), (16, 64, "float64", "torch")],
)
def test_auto_takes_triton_on_a_gpu_where_it_can(chunk_size, width, dtype, backend):
    asked = {"head_dim": width, "chunk_size": chunk_size, "dtype": getattr(torch, dtype)}
    assert selected_backend("auto", "cuda", **asked) == backend
    assert selected_backend("torch", "cuda", **asked) == "torch"


def test_shapes_on_a_gpu_that_need_not_exist():
    """Fake tensors on CUDA: the operator's shapes, dtypes and device, forward and backward, without running anything."""
    options = (16, [False, True], 1e-6, "auto")
    with FakeTensorMode():
        inputs = [x.float().to("cuda") for x in check.draw(0, 2, 300, 2, 3)[:9]]
        out, states = _forward_op(*inputs, *options, True)
        gradients = _backward_op(out, states, *inputs, *options)
    assert (out.shape, out.device.type) == (inputs[0].shape, "cuda")
    assert (states.shape, states.dtype) == ((12, 2, 65, 64), torch.float32)  # 19 chunks are three groups of eight
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype) for x in inputs]
