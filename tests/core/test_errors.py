"""Errors that end a command."""

import pickle

import pytest

from repro.core.errors import Diverged, Interrupted


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [(Diverged(7, "p.nano: the loss is nan"), "p.nano: the loss is nan", 1), (Interrupted(15, "saved"), "saved", 143)],
)
def test_an_error_reaches_the_parent_of_a_worker_process_whole(error, text, code):
    found = pickle.loads(pickle.dumps(error))
    assert text in str(found) == str(error)
    assert found.exit_code == code and vars(found) == vars(error)
