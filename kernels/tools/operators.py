"""The operators that the tools know, each by a module of cases: all that `check`, `bench` and `resources` need to know of it.

A module of cases has:

    NAME                its name; triton_fwd, triton_bwd: the modules of its kernels
    OP                  the function that a layer calls, of INPUTS, which are tensors, and a backend
    Sizes               a frozen dataclass of one shape, with `bytes(passes)` and `flop(passes)`

    draw(seed, sizes, device)      its inputs and a gradient of its output, fp64, of values that the low precisions have
    reference(inputs, sizes)       from these, `out` and each gradient by name, by autograd through the reference
    kernels(inputs, dtype, sizes, config=None, backward_config=None)    the same, by the kernels
    limit(name, dtype, sizes)      the largest relative error allowed of `out` or a gradient, of a norm of at least FLOOR
    ragged(interpreted), variants()         sizes to check: with every seed, and, named, with one
    TYPICAL, LONG, COMPILED                 sizes for configs and repetition, for a GPU alone, for torch.compile
    selected(sizes, dtype, device)          the backend that `auto` takes
    configs(dtype)                          the candidates of the forward and of the backward kernel at TYPICAL
    peer_checks(device)                     entries of `check`'s plan: whether implementations of others give the same

    shapes()                       sizes to time; COMPARED, the one that GOALS (key -> what, asked, unit) and AT are about
    implementations(sizes)         name -> a function of the device that makes (function, inputs), by `bench.ours` and of others
    missing(name)                  why one of another's cannot run here, or None
    PEER, DISTRIBUTIONS            what `bench.summary` calls the others, or None; key in the record -> package that has them
    tuners()                       (kernel, its tuner in bf16)

    compilations()                 what `resources` compiles
"""

from types import ModuleType

from . import bi_wkv_cases, ms_deform_attn_cases, selective_scan_cases, ttt_linear_cases

_ALL = ttt_linear_cases, selective_scan_cases, bi_wkv_cases, ms_deform_attn_cases
OPERATORS: dict[str, ModuleType] = {cases.NAME: cases for cases in _ALL}
