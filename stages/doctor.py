"""`repro doctor`: machine, packages, checkout, kernels, data and disk as plain text, to paste into an issue.

Every line begins with its mark: `ok`; `note`, nothing to do; `warning`, works but not as intended; `error`, a command
will fail. A warning or an error ends with its fix.
"""

from repro.core.errors import RunError
from repro.core.paths import find_root
from repro.doctor import examine

from . import Stage

STAGE = Stage(purpose="check", records=False)


def command() -> None:
    """Report what this machine has and lacks, with a fix for each problem; exit code 1 if a command would fail."""
    marks = []
    for mark, subject, text in examine(find_root()):
        print(f"{mark:<8} {subject}: {text}")
        marks.append(mark)
    errors, warnings = (f"{marks.count(mark)} {mark}{'s' * (marks.count(mark) != 1)}" for mark in ("error", "warning"))
    print(f"{errors}, {warnings}")
    if "error" in marks:
        raise RunError(f"doctor: {errors}; each is named above with its fix")
