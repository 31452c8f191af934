"""What the compiler makes of the Triton kernels, by the machine code: registers, spills, shared memory, instructions.

Triton compiles for a GPU that need not exist, and comes with cuobjdump and nvdisasm. This cannot run where
TRITON_INTERPRET is set, since the interpreter compiles nothing.
"""

import ast
import dataclasses
import hashlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
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

    name: str  # the kernel's name in the record
    kernel: Any  # the jitted function
    operands: Collection[str]  # its pointers to tensors of `dtype`; its other pointers are to fp32
    constants: Mapping[str, Any]  # its compile-time constants except for the config's
    config: triton.Config
    dtype: str  # fp32, fp16 or bf16
    sizes: Mapping[str, Any]  # what the record shows of them
    # of arguments that are neither such pointers nor i32; ":16" behind one says that the values are multiples of 16
    types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default: bool = True  # whether it is the config that runs untuned

    def read(self, target: int) -> dict[str, Any]:
        """Compile it for sm_`target` and read the binary: the last five keys of a row."""
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


def source_hash(cases: Any) -> str:
    """The first 16 hex digits of a SHA-256 of what the compiler gets of an operator's kernels.

    That is the jitted functions and the constants of its Triton files and of `triton_math`, whatever their comments,
    docstrings and layout, and the compile-time arguments of each compilation.
    """
    named = [Path(str(module.__file__)) for module in (cases.triton_fwd, cases.triton_bwd)]
    others = [file for file in sorted(named[0].parent.glob("triton_*.py")) if file not in named]
    sources = [file.read_text(encoding="utf-8") for file in (*named, *others)]
    if any("triton_math" in source for source in sources):
        sources.append((named[0].parents[1] / "triton_math.py").read_text(encoding="utf-8"))
    code = [jitted_code(source) for source in sources]
    arguments = []
    for one in cases.compilations():
        sizes = (sorted(each.items()) for each in (one.types, one.constants))
        arguments.append([one.name, one.dtype, sorted(one.operands), *sizes, describe(one.config)])
    return hashlib.sha256(repr([code, arguments]).encode()).hexdigest()[:16]


def jitted_code(source: str) -> list[Any]:
    """The syntax trees of a Python file's jitted functions and module-level assignments, as nested lists."""

    def is_compiled(node: ast.stmt) -> bool:
        if isinstance(node, ast.FunctionDef):
            return any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
        return isinstance(node, ast.Assign | ast.AnnAssign)

    return [_nest(node) for node in ast.parse(source).body if is_compiled(node)]


def _nest(node: Any) -> Any:
    """A syntax tree as nested lists, without a docstring and the empty fields, in which versions of Python differ."""
    if isinstance(node, list):
        return [_nest(each) for each in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if value is not None and value != []}
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    return [type(node).__name__, *([name, _nest(value)] for name, value in fields.items())]


def planned(cases: Any, defaults: bool = False) -> Iterator[tuple[dict[str, Any], Compilation, int]]:
    """Every kernel, size, dtype, config and target of an operator: the first six keys of its row, what to compile, and
    for which target. `defaults`: only the configs that run untuned.

    A row is {operator, kernel, config {sizes, the config's constants, num_warps, num_stages, maxnreg}, default, dtype,
    target, registers, stack_bytes, shared_bytes, instructions {HMMA, HGMMA, LDL, STL, BAR}, loops}. Registers are those
    of a thread, shared bytes those of a program. Instructions are counted once each, also in a loop. `loops` has, for
    each loop in the order of the code, its number of instructions and how many of them are barriers and shuffles.
    """
    for one in cases.compilations():
        for target in TARGETS if one.default or not defaults else ():
            labels = {"operator": cases.NAME, "kernel": one.name, "config": {**one.sizes, **describe(one.config)}}
            yield {**labels, "default": one.default, "dtype": one.dtype, "target": f"sm_{target}"}, one, target


def compile_row(labels: Mapping[str, Any], compilation: Compilation, target: int) -> dict[str, Any]:
    """The row of one of `planned`."""
    return {**labels, **compilation.read(target)}


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
