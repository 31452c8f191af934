"""Every Triton kernel as it is launched, and what the compiler makes of it, by the machine code: registers, spills,
shared memory, instructions.

Triton compiles for a GPU that need not exist, and comes with cuobjdump and nvdisasm. This cannot run where
TRITON_INTERPRET is set, since the interpreter compiles nothing.
"""

import dataclasses
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from kernels.around import triton_bwd as around_bwd
from kernels.around import triton_fwd as around_fwd
from kernels.around.reference import ONES
from kernels.bi_wkv import triton_bwd as wkv_bwd
from kernels.bi_wkv import triton_fwd as wkv_fwd
from kernels.ms_deform_attn import triton_bwd as attention_bwd
from kernels.ms_deform_attn import triton_fwd as attention_fwd
from kernels.selective_scan import triton_bwd as scan_bwd
from kernels.selective_scan import triton_fwd as scan_fwd
from kernels.tools.cases import DTYPES, compiler_options
from kernels.triton_launch import next_power_of_2
from kernels.ttt_linear import triton_bwd as ttt_bwd
from kernels.ttt_linear import triton_fwd as ttt_fwd
from kernels.ttt_linear import triton_phases

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
        """What Triton compiles for sm_`target`."""
        return triton.compile(
            self.make_source(), target=GPUTarget("cuda", target, 32), options=compiler_options(self.config)
        )

    def lower(self, target: int, last: str) -> tuple[Any, dict[str, Any]]:
        """The code for sm_`target` after a stage of Triton's, such as ttir, and what is known then, such as `shared`.

        The stages after it, to the machine code, take most of the time.
        """
        source, gpu = self.make_source(), GPUTarget("cuda", target, 32)
        backend, context = make_backend(gpu), ir.context()
        options = backend.parse_options(compiler_options(self.config))
        ir.load_dialects(context)
        backend.load_dialects(context)
        made = backend.get_codegen_implementation(options), backend.get_module_map()
        code, known, stages = source.make_ir(gpu, options, *made, context), {"target": gpu, **vars(options)}, {}
        backend.add_stages(stages, options, source.language)
        for name, run in stages.items():
            code = run(code, known)
            if name == last:
                break
        return code, known

    def make_source(self) -> ASTSource:
        """The kernel with the types of its arguments. Pointers count as aligned to 16 bytes."""
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
        return ASTSource(fn=self.kernel, signature=signature, constexprs=places, attrs=attributes)


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


# see `Kernels.sizes`
At = tuple[Mapping[str, Any], Mapping[str, Any], tuple]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of one operator."""

    # name -> what gives its configs, the kernel, constants of its own
    table: Mapping[str, tuple[Callable[..., Sequence[triton.Config]], Any, Mapping[str, Any]]]
    # dtype, options -> the sizes by which compilations differ, the kernels' constants, the arguments of their `configs`;
    # without options, those that are tested and tuned
    sizes: Callable[..., At]
    operands: tuple[str, ...]  # this and `types`: see `Compilation`
    types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Sequence[Mapping[str, Any]] = ({},)  # those of `sizes` with which all is compiled

    def find_configs(self, name: str, dtype: torch.dtype, **options: Any) -> Sequence[triton.Config]:
        return self.table[name][0](*self.sizes(dtype, **options)[2])

    def list_defaults(self, name: str, dtype: str) -> Iterator[Compilation]:
        """A kernel in its default config, with each of `options`."""
        return (self.compilation(name, dtype, **options) for options in self.options)

    def compilation(self, name: str, dtype: str, **options: Any) -> Compilation:
        """A kernel in its default config; the options are those of `sizes`."""
        configs, kernel, own = self.table[name]
        sizes, constants, candidates = self.sizes(DTYPES[dtype], **options)
        constants = {key: value for key, value in constants.items() if key in kernel.arg_names} | own
        operands = self.operands
        if constants.get("ENDS"):
            constants["AHEAD"] = scan_fwd.ahead(constants["N"], True)
        if options.get(
            "sequences"
        ):  # VMamba's output, with its gradient, and the parts of du, which are added up, are fp32
            operands = tuple(name for name in operands if name not in ("out", "dout", "du"))
        return Compilation(
            name=name,
            kernel=kernel,
            operands=operands,
            types=self.types,
            constants=constants,
            config=configs(*candidates)[0],
            dtype=dtype,
            sizes=sizes,
        )


def ttt_sizes(dtype: torch.dtype, chunk_size: int = 16, width: int = 64) -> At:
    return {"chunk_size": chunk_size}, ttt_fwd.constants(width, chunk_size), (dtype, chunk_size, width)


def scan_sizes(dtype: torch.dtype, state_dim: int = 16, gate: bool = True, sequences: int = 0) -> At:
    """`sequences` is K where routes share sequences, as VMamba's do; else 0."""
    constants = scan_fwd.constants(state_dim, gate, sequences)
    constants |= {"SPAN": scan_bwd.span(state_dim), "AHEAD": scan_fwd.ahead(state_dim)}
    return {"state_dim": state_dim, "gate": gate, "sequences": sequences}, constants, (dtype,)


def wkv_sizes(dtype: torch.dtype, channels: int = 192) -> At:
    return {"channels": channels}, {"C": channels}, (dtype,)


def attention_sizes(dtype: torch.dtype, head_dim: int = 32, levels: int = 3) -> At:
    """Six heads and four points, as in the ViT-Adapter T."""
    constants = {"M": 6, "C": head_dim, "L": levels, "P": 4, "WIDTH": next_power_of_2(head_dim)}
    return {"heads": 6, "head_dim": head_dim, "levels": levels}, constants, (head_dim,)


def around_sizes(dtype: torch.dtype, channels: int = 192) -> At:
    constants = {"D": channels, "WIDTH": next_power_of_2(channels), "HIDDEN": int(8 * channels / 3), "PAD": ONES}
    return {"channels": channels}, constants, (dtype, channels)


def around(name: str, operands: str, **table: Any) -> Kernels:
    """Those of an operator around the scan, by the ends of their names."""
    return Kernels(
        table={f"{name}_{part}": (*given, {})[:3] for part, given in table.items()},
        sizes=around_sizes,
        operands=(*operands.split(), "out", "dout"),
        types={"eps": "fp32", "size": "i64:16"} | dict.fromkeys(("rows", "dx_rows", "dgate_rows"), "i32:16"),
    )


PHASE, BACKWARD = (triton_phases.state_configs, triton_phases.state_kernel), ttt_bwd.backward_kernel
ROWS = {"ROWS": triton_phases.ROWS}
SCAN, WKV = ((module.configs, module.forward_kernel) for module in (scan_fwd, wkv_fwd))
SEGMENT, CUT = scan_fwd.SEGMENT, {"SEGMENT": wkv_fwd.SEGMENT}
KERNELS = {
    "ttt_linear": Kernels(
        table={
            "ttt_linear_forward": (ttt_fwd.configs, ttt_fwd.forward_kernel, {"KEEP": False}),
            "ttt_linear_forward_keeping_states": (ttt_fwd.configs, ttt_fwd.forward_kernel, {"KEEP": True}),
            "ttt_linear_forward_state": (*PHASE, ROWS | {"KEEP": False}),
            "ttt_linear_forward_state_keeping_states": (*PHASE, ROWS | {"KEEP": True}),
            "ttt_linear_forward_output": (triton_phases.output_configs, triton_phases.output_kernel, ROWS),
            "ttt_linear_backward_replay": (ttt_bwd.replay_configs, BACKWARD, {"PASS": ttt_bwd.REPLAY.value}),
            "ttt_linear_backward_back": (ttt_bwd.back_configs, BACKWARD, {"PASS": ttt_bwd.BACK.value}),
            "ttt_linear_backward": (ttt_bwd.configs, BACKWARD, {"PASS": ttt_bwd.BOTH.value}),
        },
        sizes=ttt_sizes,
        operands=("q", "k", "v", "out", "dout", "dq", "dk", "dv", "G", "S", "tiles", "squares"),
        types={"eps": "fp32"},
        options=tuple({"chunk_size": chunk_size} for chunk_size in ttt_fwd.CHUNK_SIZES),
    ),
    "selective_scan": Kernels(
        table={
            "selective_scan_forward": (*SCAN, {"SEGMENT": 0, "ENDS": False, "KEEP": False}),
            "selective_scan_forward_segments": (*SCAN, {"SEGMENT": SEGMENT, "ENDS": False, "KEEP": False}),
            "selective_scan_forward_keeping_states": (*SCAN, {"SEGMENT": 0, "ENDS": False, "KEEP": True}),
            "selective_scan_forward_ends": (*SCAN, {"SEGMENT": SEGMENT, "ENDS": True, "KEEP": False}),
            "selective_scan_forward_starts": (SCAN[0], scan_fwd.starts_kernel, {"AT_ONCE": scan_fwd.AT_ONCE}),
            "selective_scan_backward": (SCAN[0], scan_bwd.backward_kernel, {}),
        },
        sizes=scan_sizes,
        operands=("u", "delta", "B", "C", "z", "out", "dout", "du", "ddelta"),
        options=({}, {"state_dim": 8, "gate": False}, {"state_dim": 1, "gate": False, "sequences": 2}),
    ),
    "bi_wkv": Kernels(
        table={
            "bi_wkv_forward": (*WKV, {"KEEP": False, "SEGMENT": 0}),
            "bi_wkv_forward_segments": (*WKV, {"KEEP": False} | CUT),
            "bi_wkv_forward_keeping_states": (*WKV, {"KEEP": True} | CUT),
            "bi_wkv_forward_sums": (WKV[0], wkv_fwd.sums_kernel, CUT | {"ADJOINT": False}),
            "bi_wkv_backward_sums": (WKV[0], wkv_fwd.sums_kernel, CUT | {"ADJOINT": True}),
            "bi_wkv_forward_ends": (wkv_fwd.ends_configs, wkv_fwd.ends_kernel, CUT),
            "bi_wkv_backward": (WKV[0], wkv_bwd.backward_kernel, {"SEGMENT": 0}),
            "bi_wkv_backward_segments": (WKV[0], wkv_bwd.backward_kernel, CUT),
        },
        sizes=wkv_sizes,
        operands=("k", "v", "out", "dout", "dk", "dv"),
    ),
    "ms_deform_attn": Kernels(
        table={
            "ms_deform_attn_forward": (attention_fwd.configs, attention_fwd.forward_kernel, {}),
            "ms_deform_attn_backward_points": (attention_fwd.configs, attention_bwd.points_kernel, {}),
            "ms_deform_attn_backward_value": (attention_bwd.configs, attention_bwd.value_kernel, {}),
        },
        sizes=attention_sizes,
        operands=("value", "out", "dout", "dvalue"),
        types={"cells_ptr": "*i32", "order_ptr": "*i64", "starts_ptr": "*i64"},
    ),
    "conv_norm": around(
        "conv_norm",
        "tokens y dy g dtokens",
        forward=(around_fwd.grid_configs, around_fwd.conv_norm_kernel),
        backward_norm=(around_bwd.row_configs, around_bwd.norm_backward_kernel, {"CONVOLVE": True}),
        backward_norm_alone=(around_bwd.row_configs, around_bwd.norm_backward_kernel, {"CONVOLVE": False}),
        backward=(around_bwd.row_configs, around_bwd.conv_backward_kernel),
    ),
    "scan_convs": around(
        "scan_convs",
        "x dx dk dq",
        forward=(around_fwd.block_configs, around_fwd.scan_convs_kernel),
        backward=(around_bwd.block_configs, around_bwd.scan_convs_backward_kernel),
    ),
    "gated_norm": around(
        "gated_norm",
        "z gate dz dgate",
        forward=(around_fwd.row_configs, around_fwd.gated_norm_kernel),
        backward=(around_bwd.row_configs, around_bwd.gated_norm_backward_kernel),
    ),
    "gated_linear": around(
        "gated_linear",
        "x weight h dh",
        forward=(around_fwd.product_configs, around_fwd.gated_linear_kernel),
        backward=(around_bwd.activation_configs, around_bwd.activation_backward_kernel),
    ),
}
