"""`repro kernels check|bench|resources|forms`: are the Triton kernels right and fast, what does the compiler make of them,
and which form of an inner learner is the faster one?
"""

from typing import Annotated

import typer

from repro.core.paths import find_root

from . import Stage

app = typer.Typer(help="Check and time the Triton kernels.", no_args_is_help=True)

STAGE = Stage(purpose="prove")

Op = Annotated[
    str | None,
    typer.Option("--op", help="Only this operator, such as ttt_linear or selective_scan; an unknown name lists them."),
]
Minutes = Annotated[float | None, typer.Option(min=0.1, help="Stop after this time; the next call continues.")]


@app.command()
def check(op: Op = None, minutes: Minutes = None) -> None:
    """Compare outputs and all gradients with the fp64 reference; on a CPU: TRITON_INTERPRET=1 repro kernels check
    (minutes).
    """
    from repro.bench.kernels import run_check

    run_check(find_root(), op, minutes)


@app.command()
def bench(
    op: Op = None,
    compared: Annotated[
        bool, typer.Option("--compared", help="Only the shape of each operator that its goals are about.")
    ] = False,
    minutes: Minutes = None,
) -> None:
    """Run the check, then time the kernels on the GPU: ours, the torch backend's, other projects', and a copy."""
    from repro.bench.kernels import run_bench

    run_bench(find_root(), op, compared=compared, minutes=minutes)


@app.command()
def resources(
    op: Op = None,
    defaults: Annotated[
        bool,
        typer.Option("--defaults", help="Only the default configurations, into a record named after Triton's version."),
    ] = False,
) -> None:
    """Compile every configuration for sm_80, sm_89 and sm_90, without a GPU: registers, spills, shared memory,
    instructions.
    """
    from repro.bench.kernels import run_resources

    run_resources(find_root(), op, defaults=defaults)


@app.command()
def forms() -> None:
    """Time inner learners, recurrent and parallel, over the tokens."""
    from repro.bench.forms import run_forms
    from repro.core.runtime import load_runtime

    paths = find_root()
    run_forms(paths, load_runtime(paths))
