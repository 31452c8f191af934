"""What the compiler makes of the Triton kernels, read from the machine code: registers, spills, shared memory, instructions.

Triton compiles for a named GPU without one, and brings cuobjdump and nvdisasm. The kernels must be the compiled ones, not the
interpreter's: this cannot run where TRITON_INTERPRET is set.
"""

import hashlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..ttt_linear import triton_bwd, triton_fwd
from .check import DTYPES, describe

TARGETS = 80, 89, 90
WIDTH = 64
INSTRUCTIONS = "HMMA", "HGMMA", "LDL", "STL", "BAR"
KERNELS = {
    "ttt_linear_forward": (triton_fwd, {"KEEP": False}),
    "ttt_linear_forward_keeping_states": (triton_fwd, {"KEEP": True}),
    "ttt_linear_backward": (triton_bwd, {}),
}
# pointers to tensors of q's dtype; all others are fp32
_OPERANDS = {f"{name}_ptr" for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "S", "tiles", "squares")}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def source_hash() -> str:
    """SHA-256 over the sources of the kernels, in a fixed order."""
    digest = hashlib.sha256()
    for module in (triton_fwd, triton_bwd):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()


def rows() -> Iterator[dict[str, Any]]:
    """Every kernel, chunk size, dtype, config and target, a row each as it is compiled.

    A row is {kernel, config {chunk_size, num_warps, num_stages, maxnreg}, default, dtype, target, registers, stack_bytes,
    shared_bytes, instructions {HMMA, HGMMA, LDL, STL, BAR}, loops}. Registers are a thread's, bytes of shared memory a program's.
    Instructions are those in the code, counted once whether or not they stand in a loop; `loops` has, for each loop from the
    first to the last in the code, its length in instructions and how many barriers and shuffles are among them.
    """
    for name, (module, _) in KERNELS.items():
        for chunk_size in triton_fwd.CHUNK_SIZES:
            for dtype in DTYPES:
                for i, config in enumerate(module.configs(DTYPES[dtype], chunk_size)):
                    for target in TARGETS:
                        yield {
                            "kernel": name,
                            "config": {"chunk_size": chunk_size, **describe(config)},
                            "default": i == 0,
                            "dtype": dtype,
                            "target": f"sm_{target}",
                            **compiled(name, DTYPES[dtype], chunk_size, config, target),
                        }


def compiled(
    name: str, dtype: torch.dtype, chunk_size: int, config: triton.Config, target: int, width: int = WIDTH
) -> dict[str, Any]:
    """Compile one of `KERNELS` as it is launched for sm_`target`, and read its binary: the last five keys of a row."""
    module, own = KERNELS[name]
    kernel = module.forward_kernel if module is triton_fwd else module.backward_kernel
    constants = triton_fwd.constants(width, chunk_size) | own
    types = {"eps": "fp32"} | {argument: "i32" for argument in ("T", "R", "H", "v_rows", "reverse", "bucket")}
    pointers = [argument for argument in kernel.arg_names if argument.endswith("_ptr")]
    operand = next(spelt for spelt, known in DTYPES.items() if known == dtype)
    types |= {pointer: "*" + (operand if pointer in _OPERANDS else "fp32") for pointer in pointers}
    return machine_code(kernel, types, constants, target, describe(config))


def machine_code(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], target: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Compile any kernel for sm_`target`, and read its binary: the last five keys of a row.

    Args:
        kernel: the jitted function.
        types: Triton's type of every argument that is no constant; pointers, which start with `*`, count as aligned to 16 bytes.
        constants: the values of the others.
        target: the compute capability, such as 90.
        options: of the launch, such as `num_warps`.
    """
    signature = {argument: "constexpr" if argument in constants else types[argument] for argument in kernel.arg_names}
    places = {(kernel.arg_names.index(constant),): value for constant, value in constants.items()}
    pointers = [i for i, argument in enumerate(kernel.arg_names) if signature[argument].startswith("*")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    return {**_read_binary(binary.asm["cubin"]), "shared_bytes": binary.metadata.shared}


def _read_binary(cubin: bytes) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output("cuobjdump", "-res-usage", file.name)
        names, loops = _instructions(_output("nvdisasm", "-c", file.name))
    counts = Counter(names)
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "instructions": {name: counts[name] for name in INSTRUCTIONS},
        "loops": [
            {"instructions": last - first + 1} | {name: names[first : last + 1].count(name) for name in ("BAR", "SHFL")}
            for first, last in loops
        ],
    }


def _instructions(code: str) -> tuple[list[str], list[tuple[int, int]]]:
    """The instructions' names up to the first dot, and each loop as the indices of its first and last one."""
    names, labels, loops = [], {}, []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        # the address in a comment, an optional predicate, the name
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(.*)", line):
            names.append(found[1])
            to = re.search(r"\.L_x_\d+", found[2]) if found[1] == "BRA" else None
            if to and labels.get(to[0], len(names)) < len(names) - 1:  # back, and not the endless branch to itself at the end
                loops.append((labels[to[0]], len(names) - 1))
    return names, sorted(loops)


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], check=True, capture_output=True, text=True).stdout
