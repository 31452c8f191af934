"""The fault lab sees every difference, and every outcome that is not the required one."""

import pytest

from tests.faults.lab import CELL, Checkout, CommandResult


@pytest.mark.parametrize("name", ["weights.safetensors", "curve.csv", "snapshots/epoch_000.safetensors"])
def test_one_byte_more_or_less_is_seen(tmp_path, name):
    ours, theirs = Checkout(tmp_path / "ours"), Checkout(tmp_path / "theirs")
    for checkout in (ours, theirs):
        (checkout.results / "snapshots").mkdir(parents=True)
        for file in ("weights.safetensors", "curve.csv", "snapshots/epoch_000.safetensors"):
            (checkout.results / file).write_bytes(b"content")
    ours.compare(theirs)
    (ours.results / name).write_bytes(b"content.")
    with pytest.raises(AssertionError, match=f"{CELL}/{name}: differs"):
        ours.compare(theirs)
    (ours.results / name).unlink()
    with pytest.raises(AssertionError, match=f"{CELL}/{name}: is missing"):
        ours.compare(theirs)


WRONG_RESULTS = [
    (CommandResult(0, "", ""), "exit code 0 instead of 2"),
    (CommandResult(2, "", "Traceback\nrepro: bad"), "2 lines of error"),
    (CommandResult(2, "", "bad"), "1 lines of error"),
    (CommandResult(2, "", "repro: worse"), "does not mention 'bad'"),
]


@pytest.mark.parametrize(("result", "message"), WRONG_RESULTS)
def test_a_result_that_is_not_the_required_one(result, message):
    CommandResult(2, "", "repro: bad\n").require(2, "bad")
    with pytest.raises(AssertionError, match=message):
        result.require(2, "bad")


def test_the_last_step_is_found():
    result = CommandResult(0, "step 3, loss 1\nstep 12, loss 0.5\nat step 99\n", "")
    assert result.find_step("step") == 12 and result.find_step("continuing after step") == 0
