"""The model that issues machine code: its reading against a listing of known bits, its cycles against counts by hand, its record."""

import json
from pathlib import Path

import pytest

from kernels.tools import predict
from kernels.tools.operators import OPERATORS
from kernels.tools.predict import Instruction, find_loops, parse, simulate
from kernels.tools.resources import source_hash

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "results/measured/compile/predicted.json").read_text())["metrics"]


def make(full, *, stall=1, writes=7, reads=7, waits=(), target=None):
    return Instruction(full.split(".")[0], full, target, stall, writes, reads, sum(1 << b for b in waits))


def encode(stall, writes, reads, waits):
    return f"{stall << 41 | writes << 46 | reads << 49 | waits << 52:016x}"


LISTING = f"""
.L_x_0:
        /*0000*/                   LDG.E.128 R4, desc[UR6][R2.64] ;  /* 0x0000000000000001 */
                                                                     /* 0x{encode(2, 3, 0, 0)} */
        /*0010*/              @!P1 BRA `(.L_x_1) ;                   /* 0x0000000000000001 */
                                                                     /* 0x{encode(5, 7, 7, 0)} */
        /*0020*/                   MUFU.EX2 R5, R4 ;                 /* 0x0000000000000001 */
                                                                     /* 0x{encode(1, 1, 7, 0b1000)} */
.L_x_1:
        /*0030*/               @P0 BRA `(.L_x_0) ;                   /* 0x0000000000000001 */
                                                                     /* 0x{encode(6, 7, 7, 0b10)} */
        /*0040*/                   EXIT ;                            /* 0x0000000000000001 */
                                                                     /* 0x{encode(15, 7, 7, 0)} */
"""


def test_a_listing_is_read():
    code, labels = parse(LISTING)
    assert [one.full for one in code] == ["LDG.E.128", "BRA", "MUFU.EX2", "BRA", "EXIT"] and labels == {".L_x_0": 0, ".L_x_1": 3}
    load, skip, power, back, _ = code
    assert (load.stall, load.write_scoreboard, load.read_scoreboard, load.waits, load.width) == (2, 3, 0, 0, 4)
    assert (power.pipe, power.waits, power.write_scoreboard) == ("SPECIAL", 0b1000, 1) and back.waits == 0b10
    assert find_loops(code, labels) == [[load, skip, back]]  # a jump forward within the loop is taken


@pytest.mark.parametrize(
    ("turn", "warps", "programs", "cycles"),
    [
        ([make("FFMA")] * 10, 1, 1, 10),  # one a cycle
        ([make("FFMA", stall=4)] * 10, 1, 1, 40),  # the compiler's stalls
        ([make("FFMA", stall=4)] * 10, 4, 1, 40),  # a quarter for each warp
        ([make("FFMA", stall=4)] * 10, 4, 4, 40),  # four warps of a quarter fill each other's stalls
        ([make("FFMA")] * 10, 4, 3, 30),  # and wait for each other where there are none
        ([make("IADD3")] * 10, 1, 1, 20),  # half rate
        ([make("MUFU.EX2")] * 4, 1, 1, 32),  # a quarter of a warp's lanes a cycle, and half of that
        # 700 cycles to come back, and 2 of the memory's queue
        ([make("LDG.E", writes=0), make("FFMA", waits=[0])], 1, 1, 703),
        ([make("LDG.E", writes=0), make("LDG.E", writes=1), make("FFMA", waits=[0, 1])], 1, 1, 705),  # both under way together
        ([make("FFMA"), make("BAR.SYNC")], 4, 1, 17),  # 16 for all to go on
    ],
)
def test_cycles_by_hand(turn, warps, programs, cycles):
    assert simulate(turn, warps, programs) == pytest.approx(cycles, abs=1)


def test_waves():
    """Of three programs on a multiprocessor, 384 take one wave; of two, 264 and then 120, one on each."""
    one = OPERATORS["ttt_linear"].compilation("ttt_linear_forward", "bf16")
    loop = [make("FFMA")] * 10  # of four warps: ten cycles for each program
    assert predict.Predicted(one, 3, [loop]).time_all(384, 0) == pytest.approx(30, abs=1)
    assert predict.Predicted(one, 2, [loop]).time_all(384, 0) == pytest.approx(20 + 10, abs=2)
    assert predict.Predicted(one, 2, [loop]).time_all(264, 0) == pytest.approx(20, abs=1)


def test_the_record_is_of_these_kernels():
    assert RECORD["source_hash"] == {name: source_hash(cases) for name, cases in OPERATORS.items()}, "repro kernels predict"


def value(operator, what):
    return next(row["value"] for row in RECORD["rows"] if row["operator"] == operator and row["what"].startswith(what))


def test_what_was_aimed_at():
    """Against the configuration that takes two waves, and the forward pass in one phase."""
    assert value("ttt_linear", "backward, 384 programs, of these two") <= 0.65
    assert value("ttt_linear", "forward in two phases") <= 1050 < value("ttt_linear", "forward in one phase")
    assert value("bi_wkv", "forward") >= 30
    assert RECORD["block"]["fused"]["units"] <= 51 and RECORD["block"]["fused"]["launches"] <= 15
