"""No int32 in a kernel passes 2³¹ at the longest sequences: the intermediate code, computed with the ranges of sizes."""

import math
import re

import pytest
import torch

from kernels.bi_wkv.triton_fwd import count_segments
from kernels.selective_scan import triton_fwd
from kernels.selective_scan.reference import Arguments
from tests.kernels.compiled import KERNELS

TOKENS = 2**24  # of an image, 65,535 segments of 256
# the largest size or stride that each argument has; B·T is 16 times T
LARGEST = {"T": TOKENS, "width": TOKENS, "count": 16 * TOKENS, "R": 2, "H": 16, "E": 4096}
LARGEST |= {"v_rows": 2**10, "reverse": 15}
LARGEST |= {"segments": 65535, "S": TOKENS, "Q": TOKENS, "cells": 2 * TOKENS, "first": TOKENS, "first_cell": 2 * TOKENS}
LARGEST |= dict.fromkeys(("h", "w", *(f"{side}{level}" for side in "hw" for level in range(4))), 2**10)
STRIDE = 2**31 // LARGEST["R"] - 1  # of a route, see `selective_scan.triton_fwd.shared_arguments`
# widest models, and the sizes with most chunks or widest tiles
OPTIONS = {
    "ttt_linear": [{"width": 128, "chunk_size": 4}, {"width": 64}],
    "bi_wkv": [{"channels": 4096}],
    **{name: [{"channels": 768}] for name in ("conv_norm", "scan_convs", "gated_norm", "gated_linear")},
}
COMPILED = [
    pytest.param(name, kernel, options, id=f"{kernel}-{'-'.join(map(str, options.values()))}")
    for name, kernels in KERNELS.items()
    for kernel in kernels.table
    for options in OPTIONS.get(name, [{}])
]


def find_overflows(code, programs, largest):
    """The lines of intermediate code at which an int32 can pass 2³¹, with so many `programs` on each axis of the grid,
    and with the `largest` value of each argument.

    Backward scans count down: what they can reach below 0 is what others reach above.
    """
    known, found = {}, []
    for name in re.findall(r"%(\w+): i(?:32|64)", code.split("{\n", 2)[1]):
        known[f"%{name}"] = (1, largest.get(name, STRIDE))
    for line in code.splitlines():
        if loop := re.search(r"scf\.for (%[-\w]+) = (%[-\w]+) to (%[-\w]+)", line):
            bounds = [known.get(each) for each in loop.groups()[1:]]
            known[loop[1]] = (bounds[0][0], bounds[1][1]) if all(bounds) else None
        if not (parsed := re.match(r"\s*(%[-\w]+) = ([\w.]+) ?(.*)", line)):
            continue
        name, operation, rest = parsed.groups()
        arguments = [known.get(each) for each in re.findall(r"%[-\w]+(?:#\d+)?", rest)]
        known[name] = compute(operation, rest, arguments, programs)
        is_int32 = re.search(r": (?:tensor<[\dx]+x)?i32>? loc", rest)
        if known[name] and is_int32 and known[name][1] >= 2**31:
            found.append(line.strip())
            known[name] = None  # what follows from it is the same finding
    return found


def compute(operation, rest, arguments, programs):
    """The lowest and highest value of an operation's result; None where nobody knows."""
    if operation == "arith.constant":
        value = re.match(r"(?:dense<)?(-?\d+)>? : \S*i(?:32|64)\b", rest)
        return (int(value[1]),) * 2 if value else None
    if operation == "tt.get_program_id":
        return 0, programs[rest[0]] - 1
    if operation == "tt.make_range":
        return int(re.search(r"start = (\d+)", rest)[1]), int(re.search(r"end = (\d+)", rest)[1]) - 1
    if operation in ("arith.extsi", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans"):
        return arguments[0]
    if operation == "arith.select" and len(arguments) == 3:
        arguments = arguments[1:]
    if len(arguments) != 2 or None in arguments:
        return None
    (a, b), (c, d) = arguments
    if operation == "arith.select":
        return min(a, c), max(b, d)
    if operation == "arith.remsi":
        return 0 if a >= 0 else -d, min(b, d - 1)
    if operation == "arith.andi":
        return 0, d
    ends = {
        "arith.addi": lambda x, y: x + y,
        "arith.subi": lambda x, y: x - y,
        "arith.muli": lambda x, y: x * y,
        "arith.divsi": lambda x, y: int(x / y) if y else 0,
        "arith.shrsi": lambda x, y: x >> min(y, 31),
        "arith.minsi": min,
        "arith.maxsi": max,
    }.get(operation)
    all_ends = [ends(x, y) for x in (a, b) for y in (c, d)] if ends else []
    return (min(all_ends), max(all_ends)) if all_ends else None


@pytest.mark.parametrize(("name", "kernel", "options"), COMPILED)
def test_no_offset_overflows(name, kernel, options):
    if not KERNELS[name].find_configs(kernel, torch.bfloat16, **options):
        pytest.skip("not written for these sizes")
    one = KERNELS[name].compilation(kernel, "bf16", **options)
    rows = math.prod(one.config.kwargs.get(each, 1) for each in ("ROWS", "TOKENS", "LOOP"))
    count = LARGEST["count" if "count" in one.kernel.arg_names else "T"]
    if kernel == "conv_norm_forward":  # on a grid of one column, or of one row, most of a program is outside
        rows = 1
    columns = -(-one.constants["HIDDEN"] // one.config.kwargs["BLOCK"]) if kernel == "gated_linear_forward" else 1
    programs = {"x": columns * -(-count // rows), "y": 64 if "BLOCK" in one.config.kwargs else 65535, "z": 65535}
    largest = LARGEST
    if name == "bi_wkv" and one.constants.get("SEGMENT") == 0:  # a longer sequence is cut
        largest = LARGEST | {"T": next(tokens for tokens in range(1, TOKENS) if count_segments(tokens + 1) > 1)}
    assert find_overflows(str(one.lower(90, "ttir")[0]), programs, largest) == []


def test_routes_of_the_selective_scan_that_lie_too_far_apart_are_copied():
    """The kernels' product of a route and its stride is an int32."""
    T, R, E, N = 2**19, 4, 1536, 16
    u, near = (torch.empty(shape, device="meta") for shape in ((1, R, T, E), (1, T, R, E)))
    B, A, D = (torch.empty(shape, device="meta") for shape in ((1, T, R, N), (R, E, N), (R, E)))
    x = Arguments(u.transpose(1, 2), near, A, B, B, D, None, D, (False,) * R, False)
    found = triton_fwd.shared_arguments(x)
    assert found["u_r"] == found["delta_r"] == E and found["delta_ptr"] is near
