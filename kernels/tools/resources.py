"""What the compiler makes of the Triton kernels, by the machine code: registers, spills, shared memory, instructions.

Triton compiles for a GPU that need not exist, and comes with cuobjdump and nvdisasm. This cannot run where
TRITON_INTERPRET is set, since the interpreter compiles nothing.
"""

import dataclasses
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = 80, 89, 90
INSTRUCTIONS = "HMMA", "HGMMA", "LDL", "STL", "BAR"
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """A kernel as it is launched at one size, in one dtype and config."""

    name: str  # the kernel's name, such as ttt_linear_backward
    kernel: Any  # the jitted function
    operands: Collection[str]  # its pointers to tensors of `dtype`; its other pointers are to fp32
    constants: Mapping[str, Any]  # its compile-time constants except for the config's
    config: triton.Config
    dtype: str  # fp32, fp16 or bf16
    sizes: Mapping[str, Any]  # those by which compilations of one kernel differ, such as chunk_size
    # of arguments that are neither such pointers nor i32; ":16" behind one says that the values are multiples of 16
    types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default: bool = True  # whether it is the config that runs untuned

    def read(self, target: int) -> dict[str, Any]:
        """Compile it for sm_`target` and read the machine code.

        Returns:
            {registers, stack_bytes, instructions {HMMA, HGMMA, LDL, STL, BAR}, loops, shared_bytes}. Registers are those
            of a thread, shared bytes those of a program. Instructions are counted once each, also in a loop. `loops`
            has, for each loop in the order of the code, its number of instructions and how many of them are barriers
            (BAR) and shuffles (SHFL).
        """
        binary = self.compile(target)
        usage = _ask("cuobjdump", binary.asm["cubin"], "-res-usage")
        names, loops = _instructions(disassemble(binary.asm["cubin"]))
        counts = Counter(names)
        return {
            "registers": int(re.search(r"REG:(\d+)", usage)[1]),
            "stack_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
            "instructions": {name: counts[name] for name in INSTRUCTIONS},
            "loops": [
                {"instructions": last - first + 1}
                | {name: names[first : last + 1].count(name) for name in ("BAR", "SHFL")}
                for first, last in loops
            ],
            "shared_bytes": binary.metadata.shared,
        }

    def compile(self, target: int) -> Any:
        """What Triton compiles for sm_`target`. Pointers count as aligned to 16 bytes."""
        names = self.kernel.arg_names
        constants = {**self.constants, **self.config.kwargs}
        pointers = [name for name in names if name.endswith("_ptr")]
        types = dict.fromkeys(names, "i32")
        types |= {
            name: "*" + (self.dtype if name.removesuffix("_ptr") in self.operands else "fp32") for name in pointers
        }
        types |= self.types | dict.fromkeys(constants, "constexpr")
        places = {(names.index(name),): value for name, value in constants.items()}
        multiples = [*pointers, *(name for name in names if types[name].endswith(":16"))]
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in multiples}
        signature = {name: types[name].removesuffix(":16") for name in names}
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=places, attrs=attributes)
        return triton.compile(source, target=GPUTarget("cuda", target, 32), options=compiler_options(self.config))


def compiler_options(config: triton.Config) -> dict[str, int]:
    """What a config tells the compiler; without maxnreg it is free."""
    chosen = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.maxnreg}
    return {name: value for name, value in chosen.items() if value is not None}


def describe(config: Any) -> dict[str, Any]:
    """A config as results have it: its constants and `compiler_options`; of a tuple of them, those of each by name."""
    if isinstance(config, tuple):
        return {name: describe(each) for name, each in config._asdict().items()}
    return {**config.kwargs, **compiler_options(config)}


def disassemble(cubin: bytes) -> str:
    """The listing of a binary's machine code."""
    return _ask("nvdisasm", cubin, "-c")


def _instructions(code: str) -> tuple[list[str], list[tuple[int, int]]]:
    """The instructions' names up to the first dot, and each loop as the indices of its first and last instruction."""
    names, labels, loops = [], {}, []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        # the address in a comment, an optional predicate, the name
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(.*)", line):
            names.append(found[1])
            to = re.search(r"\.L_x_\d+", found[2]) if found[1] == "BRA" else None
            # backward, and not the endless branch to itself at the end
            if to and labels.get(to[0], len(names)) < len(names) - 1:
                loops.append((labels[to[0]], len(names) - 1))
    return names, sorted(loops)


def _ask(tool: str, cubin: bytes, option: str) -> str:
    """What a tool says of a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_TOOLS / tool, option, file.name], check=True, capture_output=True, text=True).stdout
