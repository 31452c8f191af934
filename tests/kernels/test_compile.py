"""The Triton kernels compiled for three GPUs, without a GPU, and what was recorded of it. Not for Triton's interpreter."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import dispatch, selected_backend
from kernels.around import triton_fwd as around_fwd
from kernels.bi_wkv import triton_fwd as wkv_fwd
from kernels.ms_deform_attn import triton_bwd as attn_bwd
from kernels.ms_deform_attn import triton_fwd as attn_fwd
from kernels.selective_scan import triton_bwd as scan_bwd
from kernels.tools import check, resources
from kernels.tools.operators import INTERPRETED, OPERATORS
from kernels.ttt_linear import triton_bwd, triton_fwd
from tests.slow import first, slow

RECORD = Path(__file__).parents[2] / "results" / "measured" / "compile" / "resources.json"


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text())["metrics"]


# `make test` compiles two-byte elements for the newest target, `make test-all` everything for every target
TARGETS = first(sorted(resources.TARGETS, reverse=True))
DTYPES = first(["bf16", *(dtype for dtype in check.DTYPES if dtype != "bf16")])


def spills(row):
    return row["stack_bytes"], row["instructions"]["LDL"], row["instructions"]["STL"]


def test_they_are_compiled():
    assert not INTERPRETED, "TRITON_INTERPRET is set: run this file without it"


def test_the_state_s_gradient_is_read_after_a_barrier():
    """Between groups it waits in memory, where one thread reads what another wrote."""
    one = OPERATORS["ttt_linear"].compilation("ttt_linear_backward_back", "bf16")
    words = re.findall(r"tt\.store|barrier", one.compile(90).asm["ttir"])
    # dW0 and db0, then what is written once, behind the loop: dgamma, dmu and dscale
    assert words[-6:] == ["tt.store", "tt.store", "barrier", *["tt.store"] * 3]


# Of the record: every kernel, size, dtype, config and target.


@pytest.mark.parametrize("name", OPERATORS)
def test_the_record_is_of_these_kernels(record, name):
    changed = f"the kernels changed: run `repro kernels resources --op {name}`"
    assert record["source_hash"][name] == resources.source_hash(OPERATORS[name]), changed
    rows = [row for row in record["rows"] if row["operator"] == name]
    expected = [labels for labels, _, _ in resources.planned(OPERATORS[name])]
    assert [{key: row[key] for key in labels} for row, labels in zip(rows, expected, strict=True)] == expected


def test_the_default_configs_in_the_record_have_no_spills(record):
    """Except fp32 tiles and large chunks of TTT-Linear, MOST_SPILLED, and the scan on sm_80, short of registers."""
    rows = [row for row in record["rows"] if row["default"]]
    expected = []
    for row in rows:
        chunks = row["operator"] == "ttt_linear" and (row["dtype"] == "fp32" or row["config"]["chunk_size"] != 16)
        if (row["kernel"], row["target"]) == ("selective_scan_backward", "sm_80"):
            assert row["stack_bytes"] <= 128
        elif not chunks and row["kernel"] not in MOST_SPILLED:
            expected.append(row)
    assert {row["operator"] for row in expected} == set(OPERATORS)
    assert {spills(row) for row in expected} == {(0, 0, 0)}


def test_the_shared_memory_in_the_record_is_what_the_table_says(record):
    """Of all default configs with heads of 64, only one needs more than the 99 KiB of the smallest GPUs."""
    largest = set()
    for row in record["rows"]:
        if row["operator"] == "ttt_linear" and row["default"] and row["shared_bytes"] > 99 * 1024:
            largest.add((row["dtype"], row["config"]["chunk_size"], -(-row["shared_bytes"] // 1024)))
    assert largest == {("fp32", 64, triton_fwd.SHARED_KIB[64, 64])}


SOURCE = '''
LIMIT = 3

@triton.jit
def kernel(x_ptr, BLOCK: tl.constexpr):
    """What it does."""
    tl.store(x_ptr, BLOCK + LIMIT)  # a remark

def launch(x):
    raise ValueError("text for people")
'''


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("(x_ptr, BLOCK: tl.constexpr)", "(\n    x_ptr,\n    BLOCK: tl.constexpr,\n)", True),
        ("LIMIT = 3", "LIMIT = (3)", True),
        ("What it does.", "Else.", True),
        ("a remark", "another", True),
        ("people", "you", True),
        ("LIMIT = 3", "LIMIT = 4", False),
        ("BLOCK + LIMIT", "BLOCK - LIMIT", False),
        ("BLOCK", "B", False),
    ],
)
def test_the_hash_is_of_what_is_compiled(old, new, is_same):
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE and (resources.jitted_code(changed) == resources.jitted_code(SOURCE)) == is_same


@pytest.mark.parametrize("name", OPERATORS)
def test_the_hash_changes_with_compile_time_arguments(monkeypatch, name):
    before, cases = resources.source_hash(OPERATORS[name]), OPERATORS[name]
    compilations = list(cases.compilations())
    monkeypatch.setitem(compilations[-1].constants, "GROUP", 1024)
    monkeypatch.setattr(cases, "compilations", lambda: iter(compilations))
    assert resources.source_hash(cases) != before


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


# Every operator's candidates differ; the first one is the default.

CANDIDATES = {
    "ttt_linear": [
        module.configs(dtype, chunk_size, width)
        for module in (triton_fwd, triton_bwd)
        for dtype in check.DTYPES.values()
        for chunk_size in triton_fwd.CHUNK_SIZES
        for width in triton_fwd.WIDTHS
    ],
    "bi_wkv": [wkv_fwd.configs()],
    "ms_deform_attn": [module.configs(head_dim) for module in (attn_fwd, attn_bwd) for head_dim in (1, 5, 32, 64, 256)],
}


@pytest.mark.parametrize("name", CANDIDATES)
def test_configs_differ(name):
    for candidates in CANDIDATES[name]:
        assert 1 <= len({str(config) for config in candidates}) == len(candidates) <= 4


# TTT-Linear

# Kernel -> target -> stack bytes of a default config in two-byte elements at D = 64 and chunk size 16. In one pass
# three programs share a multiprocessor for that, and there is one wave where there were two; the pass BACK loads three
# stages ahead, which fits sm_90.
MOST_SPILLED = {"ttt_linear_backward_back": {80: 176, 89: 104}}
MOST_SPILLED["ttt_linear_backward"] = dict.fromkeys(resources.TARGETS, 288)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", OPERATORS["ttt_linear"].KERNELS)
def test_ttt_linear_compiles(kernel, dtype, target):
    """Without spills, except where `MOST_SPILLED` says how many bytes."""
    cases = OPERATORS["ttt_linear"]
    if not cases.KERNELS[kernel][0](*cases.compile_time(check.DTYPES[dtype])[2]):
        pytest.skip("the two phases of the forward pass are not written for fp32")
    found = OPERATORS["ttt_linear"].compilation(kernel, dtype).read(target)
    counts = found["instructions"]
    assert counts["BAR"] > 0  # the disassembly was read
    assert bool(found["loops"]) == (kernel != "ttt_linear_forward_output")  # whose program has one block of tokens
    if dtype == "fp32":
        assert counts["HMMA"] == counts["HGMMA"] == 0  # ieee products
    else:
        allowed = MOST_SPILLED.get(kernel, {}).get(target, 0)
        assert found["stack_bytes"] <= allowed and counts["HGMMA" if target == 90 else "HMMA"] > 0
        assert allowed or spills(found) == (0, 0, 0)


# (D, chunk size): all kinds of tiles, the largest in two-byte elements included
@pytest.mark.parametrize(
    ("dtype", "width", "chunk_size"),
    [
        ("bf16", 128, 64),
        *(slow("bf16", *sizes) for sizes in ((16, 16), (64, 4), (64, 32), (64, 64), (128, 16))),
        *(slow("fp32", *sizes) for sizes in ((64, 32), (128, 16))),
    ],
)
@pytest.mark.parametrize("kernel", ["ttt_linear_forward", "ttt_linear_backward"])
def test_shared_memory_of_other_sizes_is_what_the_table_says(kernel, dtype, width, chunk_size):
    """In two-byte elements it fits 99 KiB, the smallest GPUs'; `SHARED_KIB` has fp32's backward pass."""
    one = OPERATORS["ttt_linear"].compilation(kernel, dtype, chunk_size=chunk_size, width=width)
    found = one.read(89)["shared_bytes"]
    needed = dtype == "fp32" and kernel.endswith("backward") and triton_fwd.SHARED_KIB.get((width, chunk_size))
    assert -(-found // 1024) == needed if needed else found <= 99 * 1024


@pytest.mark.parametrize(("shared_kib", "backend"), [(99, "torch"), (163, "torch"), (227, "triton")])
def test_sizes_that_do_not_fit_a_device_run_on_torch(monkeypatch, shared_kib, backend):
    """An Ada, an Ampere and a Hopper card: D 128 with chunks of 32 in fp32 needs 200 KiB."""
    card = SimpleNamespace(name="a card", major=8, minor=9, shared_memory_per_block_optin=shared_kib * 1024)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(dispatch, "triton_obstacle", dispatch.triton_obstacle.__wrapped__)
    asked = {"head_dim": 128, "chunk_size": 32, "dtype": torch.float32}
    assert selected_backend("auto", "cuda", **asked) == backend
    if backend == "torch":
        with pytest.raises(ValueError, match=f"needs 200 KiB of shared memory, the device has {shared_kib}; use auto"):
            selected_backend("triton", "cuda", **asked)
    card.major = 7
    with pytest.raises(ValueError, match="q is on a card, expected an NVIDIA GPU from sm_80 on"):
        selected_backend("triton", "cuda")


@pytest.mark.parametrize(
    ("chunk_size", "head_dim", "dtype", "backend"),
    [(64, 128, torch.float16, "triton"), (12, 64, torch.float16, "torch"), (16, 48, torch.float32, "torch")],
)
def test_sizes_that_triton_does_not_take(chunk_size, head_dim, dtype, backend):
    """Asked of a GPU that need not exist."""
    assert selected_backend("auto", "cuda", head_dim=head_dim, chunk_size=chunk_size, dtype=dtype) == backend


# The selective scan


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kernel", ["forward_keeping_states", "forward_segments", "forward_ends", "forward_starts", "backward"]
)
def test_the_selective_scan_compiles_without_spills(kernel, dtype, target):
    found = OPERATORS["selective_scan"].compilation(f"selective_scan_{kernel}", dtype).read(target)
    assert found["loops"] and found["shared_bytes"] <= 4096
    if (kernel, target) == ("backward", 80):  # its 255 registers are a few too few
        assert found["stack_bytes"] <= 128
    else:
        assert spills(found) == (0, 0, 0)


@pytest.mark.parametrize(("dtype", "target"), [("bf16", 90), slow("bf16", 80), slow("fp16", 89), slow("fp32", 90)])
@pytest.mark.parametrize("kernel", ["selective_scan_forward", "selective_scan_backward"])
def test_the_scan_of_one_state_compiles_without_spills(kernel, dtype, target):
    """VMamba's: several tokens at once, nothing between threads but the sums over channels of dB and dC."""
    found = OPERATORS["selective_scan"].compilation(kernel, dtype, state_dim=1, gate=False, sequences=2).read(target)
    assert found["loops"] and found["shared_bytes"] == 0 and spills(found) == (0, 0, 0)
    sums = 2 * 5 * scan_bwd.span(1) if kernel == "selective_scan_backward" else 0  # of 32 threads, five steps each
    assert max(loop["SHFL"] for loop in found["loops"]) == sums
    assert found["registers"] <= 240


def test_a_token_of_a_segment_costs_what_others_do():
    """The state that it starts from comes in the layout of the decays, which would else be exchanged at every token."""
    one, names = OPERATORS["selective_scan"].compilation, ("selective_scan_forward", "selective_scan_forward_segments")
    whole, segment = (one(name, "bf16").read(90)["loops"][0] for name in names)
    assert segment["instructions"] <= 1.05 * whole["instructions"] and segment["BAR"] == whole["BAR"]


def test_sums_of_the_selective_scan_take_few_shuffles():
    """Forward, a thread has all states of its channel: a few shuffles exchange the layout of loaded rows. Backward, a
    token has three
    sums over states, two steps for each of four values a thread, and two over channels, three steps each.
    """
    one = OPERATORS["selective_scan"].compilation
    forward, backward = (one(f"selective_scan_{name}", "bf16").read(90) for name in ("forward", "backward"))
    assert forward["loops"][0]["SHFL"] <= 8
    assert max(loop["SHFL"] for loop in backward["loops"]) == scan_bwd.span(16) * (3 * 4 * 2 + 2 * 4 * 3)


# Bi-WKV and deformable attention: every dtype and every target, the most used pair with every kernel; the widths of the
# ViT-Adapters, the widest that there may be, and one that is no power of two


@pytest.mark.parametrize(
    ("kernel", "dtype", "target", "options"),
    [
        ("bi_wkv_forward", "bf16", 90, {}),
        ("bi_wkv_backward_segments", "bf16", 90, {}),
        slow("bi_wkv_forward_keeping_states", "fp16", 80, {}),
        slow("bi_wkv_backward", "fp32", 89, {}),
        ("ms_deform_attn_forward", "bf16", 90, {"head_dim": 32}),
        slow("ms_deform_attn_forward", "fp32", 80, {"head_dim": 256}),
        ("ms_deform_attn_backward_points", "bf16", 90, {"head_dim": 64}),
        slow("ms_deform_attn_backward_points", "fp32", 89, {"head_dim": 32}),
        ("ms_deform_attn_backward_value", "bf16", 90, {"head_dim": 32}),
        slow("ms_deform_attn_backward_value", "fp16", 80, {"head_dim": 48}),
    ],
)
def test_it_compiles_without_spills(kernel, dtype, target, options):
    name = "bi_wkv" if kernel.startswith("bi_wkv") else "ms_deform_attn"
    found = OPERATORS[name].compilation(kernel, dtype, **options).read(target)
    assert found["loops"] and spills(found) == (0, 0, 0) and found["registers"] <= 128
    assert found["shared_bytes"] <= (0 if name == "bi_wkv" else 2048)
    if name == "bi_wkv":  # a channel is one thread's: nothing passes between threads but the one decision at the start
        assert sum(loop[kind] for loop in found["loops"] for kind in ("BAR", "SHFL")) == 0
    else:  # one loop for each stretch of the order, or for each level
        assert len(found["loops"]) == (2 if kernel.endswith("value") else 3)


# Around the scan


def test_the_product_reads_x_once():
    """Where nothing stays in the cache but what the programs that run at once have, of consecutive numbers."""
    tokens, hidden, running = 64 * 6400, 512, 132 * 2
    for config in around_fwd.product_configs(torch.bfloat16, 192):
        block, rows = config.kwargs["BLOCK"], tokens // config.kwargs["TOKENS"]
        programs = [around_fwd.find_block.fn(i, hidden, block) for i in range(rows * -(-hidden // block))]
        assert len(set(programs)) == len(programs) == rows * hidden // block
        at_once = [{row for row, _ in programs[i : i + running]} for i in range(0, len(programs), running)]
        read = len(at_once[0]) + sum(len(new - old) for old, new in itertools.pairwise(at_once))
        assert read == rows


@pytest.mark.parametrize("kernel", ["scan_convs_forward", slow("scan_convs_backward"), "gated_norm_forward"])
def test_slices_are_loaded_by_sixteen_bytes(kernel):
    """Their rows are multiples of 16 numbers apart, as `Constants.in_weight` has them. Single ones are not loaded."""
    cases = next(cases for cases in OPERATORS.values() if kernel in cases.KERNELS)
    found = load_widths(cases.compilation(kernel, "bf16"))
    assert found["LDG.E.128"] > 0 and not {"LDG.E.U16", "LDG.E.S16", "LDG.E"} & set(found)


@pytest.mark.parametrize("channels", [192, slow(384), slow(768)])
def test_the_convolution_on_the_grid_loads_its_taps_once(channels):
    """Before its loop, in the layout of their use, so that nothing passes between threads: barriers are the norm's."""
    one = OPERATORS["conv_norm"].compilation("conv_norm_forward", "bf16", channels=channels)
    found = one.read(90)
    # three columns and one in the loop, of three rows; nine taps, gamma and beta, 32 bytes of each
    assert load_widths(one) == {"LDG.E.128": 4 * 3 + 11 * 2} and spills(found) == (0, 0, 0)
    assert len(found["loops"]) == 1 and found["instructions"]["BAR"] <= (0 if channels <= 256 else 4)


def load_widths(one):
    """How often each kind of load from memory occurs in the machine code for sm_90."""
    return Counter(re.findall(r"\bLDG\.[A-Z0-9.]+", resources.disassemble(one.compile(90).asm["cubin"])))
