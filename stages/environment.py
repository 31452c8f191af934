"""Stage environment: the machine and its versions, so that DVC never restores another machine's benchmark.

It always runs, takes under a second, and does not import torch. Its record must not change from run to run, so it has
no date, host name or commit. `record.write_record` would not do: it adds the commit, and it keeps a record where only
the versions differ, so that a new PyTorch would leave the old benchmarks fresh.
"""

from repro.core.paths import find_root
from repro.core.record import versions, write_json
from repro.core.runtime import describe_machine

from . import Stage

STAGE = Stage(hidden=True)


def command() -> None:
    """Record the machine and its versions, on which benchmark numbers depend."""
    record = {"metrics": describe_machine(), "identity": {"versions": versions()}}
    write_json(find_root().results / "environment" / "metrics.json", record)
