"""Everything that can happen to a training run, done to real runs of this code in temporary checkouts.

`make test` does the usual faults once, `make test-all` each; FAULT_KILLS, FAULT_FLIPS and FAULT_SEED in the environment
say how many and which moments and bytes, and FAULT_KEEP keeps the checkouts. Each run must end with the bits of an
uninterrupted one, or with one line that says why it does not.
"""

import contextlib
import functools
import io
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from repro.core.record import read_record
from repro.training.checkpoint import Checkpointer
from tests.faults.lab import SAVE_EVERY, Lab, flip, kill_all_in, require_kept, step_of

USUAL = {"FAULT_KILLS": 1, "FAULT_FLIPS": 5, "FAULT_SEED": 0}
KILLS, FLIPS, SEED = (int(os.environ.get(name, usual)) for name, usual in USUAL.items())
NO_PROC = "the processes of a run are found in /proc, which this system lacks"
pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason=NO_PROC)


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("faults").resolve()
    try:
        lab = Lab(folder)
        lab.train_whole()
        yield lab
    finally:
        kill_all_in(folder)
        if not os.environ.get("FAULT_KEEP"):
            shutil.rmtree(folder, ignore_errors=True)


def choose_moments(purpose: str) -> list[float]:
    """A random moment in each of `KILLS` equal parts of a run, as a share of its time."""
    chosen = random.Random(f"{SEED} {purpose}")
    return [(i + chosen.random()) / KILLS for i in range(KILLS)]


@pytest.mark.parametrize(
    ("share", "processes"),
    [pytest.param(share, 1, id=f"one-{share:.3f}") for share in choose_moments("kill")]
    + [pytest.param(share, 2, id=f"two-{share:.3f}", marks=pytest.mark.slow) for share in choose_moments("two")],
)
def test_a_killed_run_ends_with_the_same_bytes(lab, share, processes):
    assert processes == 1 or (lab.begun_by_two and 2 in lab.whole)
    checkout, killed = lab.kill_run(share, processes)
    reached = killed.find_step("step")
    # once the results are written the states are removed, and nothing is lost with them
    ended = (checkout.results / "metrics.json").exists()
    continued = lab.finish_run(checkout, processes)
    assert ended or reached - continued <= SAVE_EVERY


@pytest.mark.slow
def test_a_signal_to_the_launcher_stops_two_processes_which_end_with_the_same_bytes(lab):
    assert lab.begun_by_two
    record = read_record(lab.whole[2].results / "metrics.json")
    assert record["identity"]["device"].endswith(", 2 processes")
    assert lab.finish_run(lab.stop_run(signal.SIGTERM, 143, processes=2), 2) > 0


@pytest.mark.slow
def test_a_changed_number_of_processes_is_refused_from_two_to_one_and_back(lab):
    lab.begun_by_two.wait(lab.begun_by_two.start_training()).require(2, "was stopped with 2 process")
    checkout, states = lab.copy_stopped()
    checkout.wait(checkout.start_training(2)).require(2, "was stopped with 1 process")
    require_kept(states)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_a_signal_stopped_ends_with_the_same_bytes(lab, number, code):
    stopped = lab.stopped if number == signal.SIGTERM else lab.stop_run(number, code)
    assert lab.finish_run(lab.make_checkout(stopped)) > 0


def require_loaded(wanted: Path, newest: Path, change: Callable[[], Any]) -> None:
    """Assert that the state `wanted` is loaded after the change, and that the newest one, which is passed over, is named."""
    content, printed = newest.read_bytes(), io.StringIO()
    change()
    with contextlib.redirect_stdout(printed):
        loaded = Checkpointer(newest.parent).restore()["run"]["step"]
    newest.write_bytes(content)
    assert loaded == step_of(wanted) and any(
        newest.name in line and "damaged" in line for line in printed.getvalue().splitlines()
    )


def test_a_state_with_a_flipped_byte_or_cut_off_is_never_loaded_and_the_one_before_always(lab):
    newest, before = lab.copy_stopped()[0].states
    chosen, size = random.Random(f"{SEED} state"), newest.stat().st_size
    for at in [0, size - 1, *(chosen.randrange(size) for _ in range(FLIPS - 2))][:FLIPS]:
        require_loaded(before, newest, functools.partial(flip, newest, at, chosen.randrange(1, 256)))
    for length in (chosen.randrange(size), size - 1, 0):
        require_loaded(before, newest, functools.partial(os.truncate, newest, length))


def test_a_run_continues_from_the_undamaged_state_and_leaves_nothing_behind(lab):
    checkout, (newest, before) = lab.copy_stopped()
    os.truncate(newest, newest.stat().st_size // 2)
    newest.with_name(f"step_000000999.{'0' * 16}.pt").touch()
    newest.with_name(f".{newest.name}.a_letter.tmp").write_bytes(b"half")
    assert lab.finish_run(checkout) == step_of(before)


@pytest.mark.slow
def test_no_room_in_read_only_results_loses_nothing(lab):
    checkout, _ = lab.copy_stopped()
    (checkout.root / "results").chmod(0o555)
    if os.access(checkout.root / "results", os.W_OK):
        pytest.skip("permissions do not bind root; run it as another user")
    result = checkout.wait(checkout.start_training())
    (checkout.root / "results").chmod(0o755)
    result.require(result.code or 1, "results")
    lab.finish_run(checkout)


@pytest.mark.slow
def test_data_that_changed_under_a_stopped_run_are_refused(lab):
    checkout, states = lab.copy_stopped()
    (checkout.root / "data").unlink()
    checkout.edit(generate={"seed": 1})
    checkout.wait(checkout.start("prepare-data")).require(0)
    checkout.wait(checkout.start_training()).require(2, "changed since this run began")
    require_kept(states)


@pytest.mark.slow
def test_parameters_that_changed_under_a_stopped_run_start_another(lab):
    checkout, states = lab.copy_stopped()
    checkout.edit(seeds=[1], epochs=1, snapshot_epochs=[])
    result = checkout.wait(checkout.start_training())
    result.require(0)
    assert not result.find_step("continuing after step")
    require_kept(states)


@pytest.mark.slow
def test_a_batch_that_the_data_do_not_allow_is_refused(lab):
    (checkout := lab.make_checkout()).edit(batch_size=4096)
    checkout.wait(checkout.start_training()).require(2, "only 1079 training")
