"""Stage environment: the machine and its versions, so that DVC never restores another machine's benchmark.

It always runs, takes under a second, does not import torch, and writes nothing that changes from run to run: no date,
no host name, no commit. That is why the record is written here and not by `record.write_record`, whose identity has the
commit and the hash of the code: with these, every edit would make every benchmark stale.
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
