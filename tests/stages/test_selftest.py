"""`repro selftest faults` hands its options to the tests of tests/faults."""

import re

import pytest

from stages.selftest import GROUPS
from tests.conftest import run_python


@pytest.mark.slow
def test_the_chosen_faults_are_done_as_often_as_asked():
    command = "-m repro selftest faults --only kill,batch --kills 3"
    done = run_python(*command.split(), PYTEST_ADDOPTS="--collect-only -qq")  # they run in tests/faults
    assert done.returncode == 0 and re.search(r"\b9/\d+ tests collected", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_has_a_test(group):
    from tests.faults import test_faults

    assert any(group in name for name in vars(test_faults) if name.startswith("test_"))
