"""`repro efficiency`: throughput, latency and peak memory over the image size (Fig. 1 and 6), on any device."""

import dataclasses
import time
from typing import Annotated, Literal

import typer

from repro.bench.params import EfficiencyParams, SweepParams, parse_image_sizes, parse_names
from repro.bench.sweep import FAMILIES, PAIR, SIZES
from repro.core.config import load_section
from repro.core.errors import UserError
from repro.core.paths import find_root
from repro.core.runtime import load_runtime

from . import Stage

STAGE = Stage(params=EfficiencyParams, alone=True)


def command(
    res: Annotated[
        str | None,
        typer.Option(help="Image sizes in pixels: 224,512, or 224..1280 (nine sizes), or 224..1280:64 (every 64)."),
    ] = None,
    families: Annotated[
        str | None,
        typer.Option(help=f"Some of {','.join(FAMILIES)}. Default: all, {', '.join(PAIR)} before the others."),
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="Some of T,S,B. Default: T on a CPU, all of them on a GPU.")] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", "--batch", min=1, help="Images per step. Default: 1 on a CPU, 64 on a GPU."),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="Dtype of weights and inputs. Default: fp32 on a CPU, bf16 on a GPU."),
    ] = None,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Measure on this device.")] = None,
    mode: Annotated[
        Literal["infer", "train"] | None, typer.Option(help="A step: forward only, or forward, backward and AdamW.")
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Run the models through torch.compile.")] = False,
    graphs: Annotated[
        bool,
        typer.Option(
            "--graphs",
            help="Infer through CUDA graphs, which spares the time between launches: for small batches on a GPU.",
        ),
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Limit for the call, kept to a quarter; what does not fit is left out. Default: 10 on a CPU, none on a GPU.",
        ),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            min=1, max=9, help="Measure every row so often, each time in a process of its own; five make an interval."
        ),
    ] = None,
) -> None:
    """Measure speed and peak memory, each row in a fresh process.

    Without options, measure the rows of the `efficiency:` section of params.yaml. With any option, measure a sweep into
    results/speed/<device>.csv, with figures in artifacts/; a call after an interruption goes on.
    """
    started = time.monotonic()  # `--minutes` also counts the imports below
    if compile and graphs:
        raise UserError("efficiency: --compile and --graphs: both compile the models; take one of them")
    paths = find_root()
    runtime = load_runtime(paths)
    given = {
        "image_sizes": parse_image_sizes(res) if res else None,
        "families": parse_names("--families", families, FAMILIES) if families else None,
        "sizes": parse_names("--sizes", sizes, SIZES) if sizes else None,
        "batch_size": batch_size,
        "dtype": dtype,
        "mode": mode,
        "compile": "graphs" if graphs else compile or None,  # as `SweepParams.compile`: True, or "graphs"
        "minutes": minutes,
        "runs": runs,
    }
    options = {name: value for name, value in given.items() if value is not None}
    from repro.bench.efficiency import run_grid, run_sweep

    if not options and device is None:
        run_grid(load_section(EfficiencyParams, paths.params, "efficiency"), paths, runtime)
    else:
        runtime = dataclasses.replace(runtime, device=device or runtime.device)
        run_sweep(SweepParams(**options), paths, runtime, started=started)
