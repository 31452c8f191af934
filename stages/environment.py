"""Stage environment: what machine and which versions this is, so that DVC never restores another machine's benchmark.

Always run, never slow, and without anything that changes from run to run: no date, no host name, no commit. The record is
therefore written here and not by `record.write_record`, whose identity holds the commit and the code's hash: with these, every
edit would make every benchmark stale.
"""

import os

from repro.core.paths import Paths, find_root
from repro.core.record import versions, write_json
from repro.core.runtime import cpu_name, gpu_names, usable_cores

from . import Stage

STAGE = Stage()


def command() -> None:
    """Record the machine and its versions, on which benchmark numbers depend."""
    run(find_root())


def run(paths: Paths) -> None:
    """Write `results/environment/metrics.json`, in under a second and without importing torch.

    `gpus` lists name and driver of each NVIDIA GPU; `usable_cores` counts the CPUs that this process may run on.
    """
    metrics = {"cpu": cpu_name(), "cores": os.cpu_count(), "usable_cores": usable_cores(), "gpus": gpu_names(), **_memory()}
    write_json(paths.results / "environment" / "metrics.json", {"metrics": metrics, "identity": {"versions": versions()}})


def _memory() -> dict[str, int | str | None]:
    """Physical memory in whole GiB, so that a kernel update which reserves a little more changes nothing."""
    try:
        return {"memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)}
    except (AttributeError, ValueError, OSError):
        return {"memory_gib": None, "memory_gib_reason": "this system does not report it through sysconf"}
