"""The Triton kernels compiled for three GPUs, without a GPU. Not for Triton's interpreter."""

import functools
import itertools
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from kernels import dispatch, selected_backend
from kernels.around import triton_fwd as around_fwd
from kernels.selective_scan import triton_bwd as scan_bwd
from kernels.tools.cases import DTYPES, describe_config
from kernels.tools.operators import OPERATORS
from kernels.ttt_linear import triton_fwd
from tests.kernels import compiled
from tests.kernels.compiled import KERNELS
from tests.slow import first, slow

NAMES = [name for each in KERNELS.values() for name in each.table]
# compiled by `make test` too; all others, which take minutes, by `make test-all`
QUICK = {(name, 90, "bf16") for name in ("ttt_linear_backward_back", "bi_wkv_backward_segments")}
EVERY = [each if each in QUICK else slow(*each) for each in itertools.product(NAMES, compiled.TARGETS, DTYPES)]


def find_kernels(name):
    return next(each for each in KERNELS.values() if name in each.table)


@functools.cache
def compile_defaults(kernel, target, dtype):
    """(sizes, what `Compilation.read` says) of a kernel's default configs, with chunks of 16 where there are chunks."""
    chosen = [one for one in find_kernels(kernel).list_defaults(kernel, dtype) if one.sizes.get("chunk_size", 16) == 16]
    assert chosen
    return [(one.sizes, one.read(target)) for one in chosen]


def spills(found):
    return found["stack_bytes"], found["instructions"]["LDL"], found["instructions"]["STL"]


def test_the_state_s_gradient_is_read_after_a_barrier():
    """Between groups it waits in memory, where one thread reads what another wrote."""
    one = KERNELS["ttt_linear"].compilation("ttt_linear_backward_back", "bf16")
    words = re.findall(r"tt\.store|barrier", str(one.lower(90, "ttir")[0]))
    # dW0 and db0, then what is written once, behind the loop: dgamma, dmu and dscale
    assert words[-6:] == ["tt.store", "tt.store", "barrier", *["tt.store"] * 3]


# (kernel, target) -> stack bytes of a default config. TTT-Linear's are of two-byte elements at D = 64 and chunk size 16:
# in one pass three programs share a multiprocessor for that, and there is one wave where there were two; the pass BACK
# loads three stages ahead, which fits sm_90. The scan is a few registers short.
MOST_SPILLED = {("ttt_linear_backward", f"sm_{target}"): 288 for target in compiled.TARGETS}
MOST_SPILLED |= {("ttt_linear_backward_back", "sm_80"): 176, ("ttt_linear_backward_back", "sm_89"): 104}
MOST_SPILLED |= {("selective_scan_backward", "sm_80"): 128}


@pytest.mark.parametrize(("kernel", "target", "dtype"), EVERY)
def test_default_configs_spill_no_registers(kernel, target, dtype):
    """Except fp32 tiles of TTT-Linear, and where `MOST_SPILLED` says how many bytes."""
    if kernel.startswith("ttt_linear") and dtype == "fp32":
        pytest.skip("fp32 tiles of 64 x 64 may spill")
    allowed = MOST_SPILLED.get((kernel, f"sm_{target}"), 0)
    for sizes, found in compile_defaults(kernel, target, dtype):
        assert found["stack_bytes"] <= allowed and (allowed or spills(found) == (0, 0, 0)), sizes


TTT_LINEAR = list(KERNELS["ttt_linear"].table)


@pytest.mark.parametrize(
    ("kernel", "target", "dtype"),
    [
        ("ttt_linear_backward_back", 90, "bf16"),
        *(slow(kernel, *how) for how in ((80, "fp16"), (90, "bf16"), (90, "fp32")) for kernel in TTT_LINEAR),
    ],
)
def test_products_of_ttt_linear_are_those_of_tensor_cores_in_two_byte_elements_alone(kernel, target, dtype):
    for _, found in compile_defaults(kernel, target, dtype):
        counts = found["instructions"]
        assert bool(found["loops"]) == (kernel != "ttt_linear_forward_output")  # which has one block of tokens
        if dtype == "fp32":
            assert counts["HMMA"] == counts["HGMMA"] == 0  # ieee products
        else:
            assert counts["HGMMA" if target == 90 else "HMMA"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS["selective_scan"].table)
def test_the_selective_scan_exchanges_little_between_threads(kernel):
    found = compile_defaults(kernel, 90, "bf16")
    assert all(each["loops"] and each["shared_bytes"] <= 4096 for _, each in found)
    # VMamba's one state: several tokens at once, and sums over channels of dB and dC, of 32 threads, five steps each
    for each in (each for sizes, each in found if sizes["state_dim"] == 1):
        sums = 2 * 5 * scan_bwd.span(1) if kernel == "selective_scan_backward" else 0
        assert max(loop["SHFL"] for loop in each["loops"]) == sums and each["shared_bytes"] == 0
        assert each["registers"] <= 240


@pytest.mark.parametrize(
    "kernel", [each if each == "bi_wkv_backward_segments" else slow(each) for each in KERNELS["bi_wkv"].table]
)
def test_a_channel_of_bi_wkv_is_one_thread_s(kernel):
    for _, found in compile_defaults(kernel, 90, "bf16"):
        assert found["loops"] and found["registers"] <= 128
        assert sum(loop[kind] for loop in found["loops"] for kind in ("BAR", "SHFL")) == 0


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
    names, loops = compiled._instructions(listing)
    assert names == ["BAR", "SHFL", "LDL", "BRA", "BRA", "BRA", "BRA", "EXIT"]
    assert loops == [(0, 4), (1, 3)]


SIZES = {name: [{}] for name in OPERATORS} | {"ms_deform_attn": [{"head_dim": width} for width in (1, 5, 32, 64, 256)]}
PAIRS = itertools.product(triton_fwd.CHUNK_SIZES, triton_fwd.WIDTHS)
SIZES |= {"ttt_linear": [{"chunk_size": chunk_size, "width": width} for chunk_size, width in PAIRS]}


@pytest.mark.parametrize("name", OPERATORS)
def test_configs_differ(name):
    for options, dtype, kernel in itertools.product(SIZES[name], DTYPES.values(), KERNELS[name].table):
        candidates = list(map(describe_config, KERNELS[name].find_configs(kernel, dtype, **options)))
        assert all(a != b for a, b in itertools.combinations(candidates, 2)), candidates


# the widest that there may be, and one that is no power of two
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "dtype", "width"),
    [("ms_deform_attn_forward", "fp32", 256), ("ms_deform_attn_backward_value", "fp16", 48)],
)
def test_other_widths_compile_without_spills(kernel, dtype, width):
    assert spills(find_kernels(kernel).compilation(kernel, dtype, head_dim=width).read(80)) == (0, 0, 0)


# (D, chunk size): all kinds of tiles, the largest in two-byte elements included
@pytest.mark.parametrize(
    ("dtype", "width", "chunk_size"),
    [
        ("bf16", 128, 64),
        *(slow("bf16", *sizes) for sizes in ((16, 16), (64, 4), (64, 32), (64, 64), (128, 16))),
        *(slow("fp32", *sizes) for sizes in ((64, 32), (64, 64), (128, 16))),
    ],
)
@pytest.mark.parametrize("kernel", first(["ttt_linear_forward", "ttt_linear_backward"]))
def test_shared_memory_of_other_sizes_is_what_the_table_says(kernel, dtype, width, chunk_size):
    """In two-byte elements it fits 99 KiB, the smallest GPUs'; `SHARED_KIB` has fp32's backward pass."""
    one = KERNELS["ttt_linear"].compilation(kernel, dtype, chunk_size=chunk_size, width=width)
    found = one.lower(89, "llir")[1]["shared"]
    needed = dtype == "fp32" and kernel.endswith("backward") and triton_fwd.SHARED_KIB.get((width, chunk_size))
    assert -(-found // 1024) == needed if needed else found <= 99 * 1024


@pytest.mark.parametrize(("shared_kib", "backend"), [(99, "torch"), (227, "triton")])
def test_sizes_that_do_not_fit_a_device_run_on_torch(monkeypatch, shared_kib, backend):
    """An Ada and a Hopper card: D 128 with chunks of 32 in fp32 needs 200 KiB."""
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


@pytest.mark.parametrize("kernel", ["scan_convs_forward", slow("scan_convs_backward"), slow("gated_norm_forward")])
def test_slices_are_loaded_by_sixteen_bytes(kernel):
    """Their rows are multiples of 16 numbers apart, as `Constants.in_weight` has them. Single ones are not loaded."""
    found = load_widths(find_kernels(kernel).compilation(kernel, "bf16"))
    assert found["LDG.E.128"] > 0 and not {"LDG.E.U16", "LDG.E.S16", "LDG.E"} & set(found)


@pytest.mark.parametrize("channels", [192, slow(384), slow(768)])
def test_the_convolution_on_the_grid_loads_its_taps_once(channels):
    """Before its loop, in the layout of their use, so that nothing passes between threads: barriers are the norm's."""
    one = KERNELS["conv_norm"].compilation("conv_norm_forward", "bf16", channels=channels)
    found = one.read(90)
    # three columns and one in the loop, of three rows; nine taps, gamma and beta, 32 bytes of each
    assert load_widths(one) == {"LDG.E.128": 4 * 3 + 11 * 2} and spills(found) == (0, 0, 0)
    assert len(found["loops"]) == 1 and found["instructions"]["BAR"] <= (0 if channels <= 256 else 4)


def load_widths(one):
    """How often each kind of load from memory occurs in the machine code for sm_90."""
    return Counter(re.findall(r"\bLDG\.[A-Z0-9.]+", compiled.disassemble(one.compile(90).asm["cubin"])))
