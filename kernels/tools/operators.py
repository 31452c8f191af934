"""The operators that the tools and the tests know, each by a module of cases: everything that they need to know about it.

A new operator is checked, timed, compiled and tested once its module of cases stands here. A module of cases has:

    NAME                           its name; op, triton_fwd, triton_bwd: the modules of the operator and of its kernels
    INPUTS, ACTIVATIONS            the names of its tensor inputs, and of those that a layer under autocast gives it in low precision
    Sizes                          a frozen dataclass of one shape, with `bytes(passes)` and `flop(passes)`

    draw(seed, sizes, device)      its inputs and a gradient dout of its output, fp64, of values that the low precisions have
    bind(sizes)                    the public operator at these sizes, a function of INPUTS and a backend
    arguments(inputs, sizes)       the arguments of its custom op: the inputs with the options that belong to these sizes
    kernels(arguments, dout, config, backward_config)    the output and each gradient, by the Triton kernels; None: the default config
    limit(name, dtype, sizes)      the largest relative error allowed for `out` or a gradient, of a norm of at least FLOOR
    ragged(interpreted)            sizes to check with every seed, for the interpreter fewer
    variants()                     (what is special, sizes) to check with one seed
    SMALL, TYPICAL, LONG           sizes for tests; for configs, repetition and torch.compile; for a GPU alone
    select(backend, sizes, dtype, device)    the backend that runs for a request
    configs(dtype)                 the candidate configs of the forward and of the backward kernel at TYPICAL
    peer_checks(device)            entries of `check`'s plan: whether other people's kernels give the same

    shapes()                       sizes to time; COMPARED is the one that GOALS (key -> what, target, unit) and AT are about
    layer_inputs(sizes, device)    inputs as a layer gives them
    implementations(sizes)         name -> a function of the device that makes (function, inputs): `bench.ours`, and other people's
    missing(name)                  why one of the others cannot run here, or None
    PEER, DISTRIBUTIONS            what `bench.summarise` calls the others, or None; key in the record -> package that has them
    tuners()                       (kernel, its tuner in bf16)

    compilations()                 what `resources` compiles
"""

from collections.abc import Collection, Iterable, Mapping
from types import ModuleType
from typing import Any

from . import bi_wkv_cases, ms_deform_attn_cases, selective_scan_cases, ttt_linear_cases
from .resources import source_hash

_ALL = ttt_linear_cases, selective_scan_cases, bi_wkv_cases, ms_deform_attn_cases
OPERATORS: dict[str, ModuleType] = {cases.NAME: cases for cases in _ALL}
INTERPRETED = ttt_linear_cases.triton_fwd.INTERPRETED  # whether Triton runs all kernels in its interpreter


def merge_rows(before: Mapping[str, Any], chosen: Collection[ModuleType], rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows of a record, operator by operator, and the `source_hash` of each: of the `chosen` ones as now, of the others as before.

    Args:
        before: the record until now, {rows, source_hash}; empty if there is no record.
        chosen: the cases of the operators that `rows` are about.
        rows: their rows, each with its `operator`.
    """
    names = {cases.NAME for cases in chosen}
    hashes = {name: value for name, value in before.get("source_hash", {}).items() if name not in names}
    kept = [row for row in before.get("rows", []) if row["operator"] in hashes]
    order = list(OPERATORS)
    hashes |= {cases.NAME: source_hash(cases) for cases in chosen}
    return {"rows": sorted([*kept, *rows], key=lambda row: order.index(row["operator"])), "source_hash": hashes}
