"""Bi-WKV's Triton kernels compiled for three GPUs, without a GPU: no spills. Not for Triton's interpreter."""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.bi_wkv import triton_bwd, triton_fwd
from kernels.tools import resources

CHANNELS = 192
OPERANDS = {f"{name}_ptr" for name in ("k", "v", "out", "dout", "dk", "dv")}  # of k's dtype; all others are fp32
KERNELS = {
    "forward": (triton_fwd, triton_fwd.forward_kernel, {"KEEP": False}),
    "forward keeping states": (triton_fwd, triton_fwd.forward_kernel, {"KEEP": True}),
    "backward": (triton_bwd, triton_bwd.backward_kernel, {}),
}


def compiled(name, dtype, target):
    """The default config as it is launched, and what its binary takes."""
    module, kernel, own = KERNELS[name]
    config = module.configs()[0]
    constants = {**config.kwargs, **own, "C": CHANNELS}
    pointers = [argument for argument in kernel.arg_names if argument.endswith("_ptr")]
    types = {pointer: "*" + (dtype if pointer in OPERANDS else "fp32") for pointer in pointers}
    types |= dict.fromkeys(constants, "constexpr") | dict.fromkeys(("T", "bucket"), "i32")
    source = ASTSource(
        fn=kernel,
        signature={argument: types[argument] for argument in kernel.arg_names},
        constexprs={(kernel.arg_names.index(constant),): value for constant, value in constants.items()},
        attrs={(kernel.arg_names.index(argument),): [["tt.divisibility", 16]] for argument in pointers},
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


# every dtype and every target, the most used pair with every kernel
CASES = [("forward", "bf16", 90), ("forward keeping states", "fp16", 80), ("backward", "bf16", 90), ("backward", "fp32", 89)]


@pytest.mark.parametrize(("name", "dtype", "target"), CASES)
def test_default_config_compiles_without_spills(name, dtype, target):
    binary = compiled(name, dtype, target)
    found = resources._read_binary(binary.asm["cubin"])
    assert found["loops"]  # the disassembly was read
    assert (found["stack_bytes"], found["instructions"]["LDL"], found["instructions"]["STL"]) == (0, 0, 0)
    assert found["registers"] <= 128 and binary.metadata.shared == 0
    # a channel is one thread's: nothing passes between threads but the one decision at the start
    assert sum(loop[kind] for loop in found["loops"] for kind in ("BAR", "SHFL")) == 0


@pytest.mark.parametrize("module", [triton_fwd, triton_bwd])
def test_configs_differ_and_give_a_channel_to_a_thread(module):
    found = [str(config) for config in module.configs()]
    assert 1 < len(set(found)) == len(found) <= 4
    assert all(config.kwargs["BLOCK_C"] == 32 * config.num_warps for config in module.configs())
