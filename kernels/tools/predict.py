"""How long would a loop of a compiled kernel take? A model that issues the machine code of sm_90, where there is no GPU to ask.

Warps issue in order, one instruction a cycle for each quarter of a multiprocessor, the least recently served warp first where the last
one cannot go on. Stall counts, scoreboards, the masks of those that an instruction waits for, and barriers are what the compiler has
written into the code. Assumed are the latencies of what is variable, and the rates of the pipes: `LATENCY` and `RATE`. Nothing of it
is calibrated on a GPU, caches and memory have no limit of bandwidth, and conditional jumps forward are taken: ratios between kernels
mean something, and absolute times are rough.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .cases import Cases
from .resources import Compilation, disassemble

TARGET, MULTIPROCESSORS, CLOCK_HZ, COPY_BYTES_PER_S = 90, 132, 1.98e9, 4.3e12  # an H200
REGISTERS, WARPS, SHARED_BYTES = 65536, 64, 227 * 1024  # of a multiprocessor
QUARTERS, SCOREBOARDS = 4, 6
# cycles until a result is there, of instructions whose results the code waits for by scoreboards
LATENCY = {
    "LDG": 700,
    "LDS": 30,
    "LDSM": 33,
    "LDL": 40,
    "LDC": 30,
    "STG": 20,
    "STS": 22,
    "STL": 20,
    "SHFL": 25,
    "MUFU": 22,
    "HMMA": 33,
    "MEMBAR": 20,
    "FENCE": 20,
    "S2R": 25,
    "R2UR": 12,
    "F2F": 22,
    "I2F": 22,
    "F2I": 22,
    "POPC": 20,
}
OTHER_LATENCY, QUEUED_LATENCY, BARRIER, OPERANDS_READ, GROUP_WAIT = 12, 30, 16, 12, 10
# cycles for which an instruction holds its pipe, one of each for a quarter; MEMORY is one for all
RATE = {"FMA": 1.0, "ALU": 2.0, "INTEGER_MULTIPLY": 2.0, "SPECIAL": 8.0, "UNIFORM": 2.0, "BRANCH": 2.0, "TENSOR": 6.5}
MEMORY_QUEUE = 8
_PIPES = {
    "FMA": "FFMA FMUL FADD HFMA2 HADD2 HMUL2",
    "INTEGER_MULTIPLY": "IMAD IDP",
    "SPECIAL": "MUFU F2F I2F F2I POPC FRND",
    "MEMORY": "LDS STS LDSM STSM SHFL LDG STG LDL STL LD ST",
    "BRANCH": "BAR BRA EXIT BSSY BSYNC WARPSYNC NOP CALL RET DEPBAR LDGDEPBAR MEMBAR FENCE WARPGROUP",
    "UNIFORM": "R2UR S2UR S2R LDC ULDC",
    "TENSOR": "HMMA",
    "WIDE_TENSOR": "HGMMA",
}
_PIPE_OF = {name: pipe for pipe, names in _PIPES.items() for name in names.split()}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of the machine code with what its control bits say. A scoreboard of 7 is none."""

    name: str  # up to the first dot
    full: str  # with what follows the dots
    target: str | None  # of a jump, its label
    stall: int
    write_scoreboard: int
    read_scoreboard: int
    waits: int  # a bit for each scoreboard

    @property
    def pipe(self) -> str:
        return _PIPE_OF.get(self.name) or ("UNIFORM" if self.name.startswith("U") else "ALU")

    @property
    def width(self) -> int:
        """In words of 32 bits, of what moves data."""
        if ".128" in self.full or ".M88.4" in self.full or self.full.endswith(".4"):
            return 4
        return 2 if ".64" in self.full or ".M88.2" in self.full else 1


def parse(listing: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of `nvdisasm -hex -c`, and the index at which each label stands."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    text = None
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif first := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]+ \*/", line):
            text = re.sub(r"^@!?U?P\w+\s+", "", first[1])
        elif (second := re.match(r"\s+/\* 0x([0-9a-f]+) \*/", line)) and text is not None:
            bits, full = int(second[1], 16), text.split()[0]
            jump = re.search(r"\.L_x_\d+", text) if full.startswith("BRA") else None
            control = (bits >> 41) & 15, (bits >> 46) & 7, (bits >> 49) & 7, (bits >> 52) & 63
            found.append(Instruction(full.split(".")[0], full, jump[0] if jump else None, *control))
            text = None
    return found, labels


def find_loops(code: Sequence[Instruction], labels: Mapping[str, int]) -> list[list[Instruction]]:
    """Of each loop, in the order of the code, the instructions of one turn."""
    found = []
    for last, jump in enumerate(code):
        first = labels.get(jump.target or "", len(code))
        if first < last:
            turn, i = [], first
            while i <= last:
                turn.append(code[i])
                to = labels.get(code[i].target or "", -1)
                i = to if i < to <= last else i + 1
            found.append((first, turn))
    return [turn for _, turn in sorted(found, key=lambda loop: loop[0])]


@dataclasses.dataclass(eq=False)
class _Warp:
    program: int
    at: int = 0
    turns: int = 0
    ready: float = 0.0
    served: float = 0.0
    blocked: bool = False
    tensor_done: float = 0.0
    scoreboards: list[float] = dataclasses.field(default_factory=lambda: [0.0] * SCOREBOARDS)
    ends: list[float] = dataclasses.field(default_factory=list)


def simulate(turn: Sequence[Instruction], warps: int, programs: int, turns: int = 16) -> float:
    """Cycles of a turn of a loop, on a multiprocessor that has so many programs of so many warps, each of which does `turns`.

    The first quarter of all turns, in which the warps fall out of step, is left out.
    """
    everyone = [_Warp(program) for program in range(programs) for _ in range(warps)]
    quarters = [everyone[number::QUARTERS] for number in range(QUARTERS)]
    pipes: list[dict[str, float]] = [{} for _ in range(QUARTERS)]
    last: list[_Warp | None] = [None] * QUARTERS
    arrived: dict[int, list[_Warp]] = {program: [] for program in range(programs)}
    memory, now = 0.0, 0.0

    def earliest(warp: _Warp, own: Mapping[str, float]) -> float:
        one = turn[warp.at]
        time = max([warp.ready, *(warp.scoreboards[b] for b in range(SCOREBOARDS) if one.waits >> b & 1)])
        if one.pipe == "MEMORY":
            return max(time, memory - MEMORY_QUEUE)
        if one.full.startswith("WARPGROUP") and "DEPBAR" in one.full:
            return max(time, warp.tensor_done + 6)
        return time if one.pipe == "WIDE_TENSOR" else max(time, own.get(one.pipe, 0.0) - (4 if one.pipe == "TENSOR" else 0))

    while any(warp.turns < turns for warp in everyone):
        issued, soonest = False, math.inf
        for number, quarter in enumerate(quarters):
            own, chosen = pipes[number], None
            for warp in sorted(quarter, key=lambda warp: (warp is not last[number], warp.served)):
                if warp.turns == turns or warp.blocked:
                    continue
                time = earliest(warp, own)
                if time <= now:
                    chosen = warp
                    break
                soonest = min(soonest, time)
            if chosen is None:
                continue
            one, issued, last[number], chosen.served = turn[chosen.at], True, chosen, now
            done, read = now + LATENCY.get(one.name, OTHER_LATENCY), now + OPERANDS_READ
            if one.pipe == "MEMORY":
                memory = max(memory, now) + (max(2, one.width) if one.name in ("LDG", "STG") else 1 if one.name == "SHFL" else one.width)
                done, read = memory + LATENCY.get(one.name, QUEUED_LATENCY), memory + OPERANDS_READ
            elif one.pipe == "WIDE_TENSOR":
                hold = max(16.0, int(re.search(r"64x(\d+)x", one.full)[1]) / 2)  # type: ignore[index]
                start = max(own.get("TENSOR", 0.0), now + 8)
                own["TENSOR"] = start + hold
                done, read = start + hold + 18, start + hold
                chosen.tensor_done = done
            elif one.name in ("LDGDEPBAR", "DEPBAR"):
                done = read = now + GROUP_WAIT
            elif one.pipe == "TENSOR":
                own["TENSOR"] = max(own.get("TENSOR", 0.0), now) + RATE["TENSOR"]
            else:
                own[one.pipe] = now + RATE[one.pipe]
            for scoreboard, time in ((one.write_scoreboard, done), (one.read_scoreboard, read)):
                if scoreboard < SCOREBOARDS:
                    chosen.scoreboards[scoreboard] = max(chosen.scoreboards[scoreboard], time)
            chosen.ready = now + max(1, one.stall)
            if one.name == "BAR" and "SYNC" in one.full:
                waiting = arrived[chosen.program]
                waiting.append(chosen)
                chosen.blocked = True
                if len(waiting) == warps:
                    for warp in waiting:
                        warp.blocked, warp.ready = False, max(warp.ready, now + BARRIER)
                    waiting.clear()
            chosen.at += 1
            if chosen.at == len(turn):
                chosen.at, chosen.turns = 0, chosen.turns + 1
                chosen.ends.append(now)
        now = now + 1 if issued or soonest == math.inf else max(now + 1, math.ceil(soonest))
    ends = sorted(end for warp in everyone for end in warp.ends)
    skipped = len(ends) // 4
    return (ends[-1] - ends[skipped - 1]) / (turns - skipped / len(everyone))


@dataclasses.dataclass
class Predicted:
    """A compiled kernel: how many of its programs share a multiprocessor, and the turns of its loops."""

    one: Compilation
    resident: int
    loops: list[list[Instruction]]

    def cycles(self, programs: int, *loops: int) -> float:
        """Of a turn of each of these loops, one after the other, with so many programs on a multiprocessor."""
        return sum(simulate(self.loops[number], self.one.config.num_warps, programs) for number in loops)

    def time_all(self, programs: int, *loops: int) -> float:
        """Cycles of a turn of these loops in all waves that so many programs take, as many on each multiprocessor as fit."""
        waves, total = programs / (MULTIPROCESSORS * self.resident), 0.0
        total += math.floor(waves) * self.cycles(self.resident, *loops) if waves >= 1 else 0.0
        rest = programs - math.floor(waves) * MULTIPROCESSORS * self.resident
        return total + (self.cycles(math.ceil(rest / MULTIPROCESSORS), *loops) if rest else 0.0)


def predict(one: Compilation) -> Predicted:
    """Compile for sm_90 and read the loops."""
    found, listing = one.read(TARGET), disassemble(one, TARGET)
    warps = one.config.num_warps
    by_registers = REGISTERS // (-(-found["registers"] // 8) * 8 * 32 * warps)
    by_memory = SHARED_BYTES // (found["shared_bytes"] + 1024)
    return Predicted(one, min(by_registers, by_memory, WARPS // warps, 32), find_loops(*parse(listing)))


def share_of_copy(moved: int, cycles: float) -> float:
    """The time of a copy of so many bytes, in percent of so many cycles."""
    return 100 * (moved / COPY_BYTES_PER_S) / (cycles / CLOCK_HZ)


def rows(operators: Iterable[Cases]) -> Iterator[dict[str, Any]]:
    """What the model says of each operator, {operator, what, value, unit}, as it is computed."""
    for cases in operators:
        for what, value, unit in cases.predictions():
            yield {"operator": cases.NAME, "what": what, "value": float(f"{value:.4g}"), "unit": unit}


def assumptions() -> dict[str, Any]:
    """What the model takes for granted, for the record."""
    return {
        "target": f"sm_{TARGET}",
        "multiprocessors": MULTIPROCESSORS,
        "clock_ghz": CLOCK_HZ / 1e9,
        "copy_tb_per_s": COPY_BYTES_PER_S / 1e12,
        "latency_cycles": LATENCY,
        "pipe_cycles": RATE,
        "calibrated": False,
    }
