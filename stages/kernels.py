"""`repro kernels check|bench|forms`: correctness and speed of the Triton kernels, and of inner learners' forms."""

from typing import Annotated

import typer

from repro.core.errors import UserError
from repro.core.paths import find_root

from . import Stage

app = typer.Typer(help="Check and time the Triton kernels.", no_args_is_help=True)

STAGE = Stage(purpose="prove")

_Op = Annotated[
    str | None,
    typer.Option("--op", help="Only this operator, such as ttt_linear or selective_scan; an unknown name lists them."),
]
_Minutes = Annotated[float | None, typer.Option(min=0.1, help="Stop after this time; the next call continues.")]


@app.command()
def check(op: _Op = None, minutes: _Minutes = None) -> None:
    """Compare outputs and all gradients with the fp64 reference; on a CPU: TRITON_INTERPRET=1 repro kernels check
    (minutes).
    """
    from repro.bench.kernels import check_kernels

    check_kernels(find_root(), op, minutes)


@app.command()
def bench(
    op: _Op = None,
    compared: Annotated[
        bool, typer.Option("--compared", help="Only the shape of each operator that its goals are about.")
    ] = False,
    minutes: _Minutes = None,
    base: Annotated[
        str | None, typer.Option(help="A commit: time its kernels too, and compare ours with them.")
    ] = None,
) -> None:
    """Time the kernels on the GPU: ours, the torch backend's, other projects', and a copy."""
    from repro.bench.kernels import bench_against, run_bench

    if base is None:
        run_bench(find_root(), op, compared=compared, minutes=minutes)
    elif minutes is not None:
        raise UserError("kernels bench: --minutes stops one call, and --base makes two; take --op or --compared")
    else:
        bench_against(find_root(), base, op, compared=compared)


@app.command()
def forms() -> None:
    """Time inner learners, recurrent and parallel, over the tokens."""
    from repro.bench.forms import run_forms
    from repro.core.runtime import Runtime

    run_forms(find_root(), Runtime(data_roots={}))
