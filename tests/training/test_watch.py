"""What a run writes about itself, against numbers worked out by hand on a clock that the test moves."""

import json
import math
import sys

import pytest
import torch

from repro.core.errors import RunError, UserError
from repro.core.ranks import Ranks
from repro.training.watch import Watch
from tests.training.conftest import limit_files


class Clock:
    """Seconds that pass only when the test says so; binary fractions, so that sums are exact."""

    now = 100.0

    def __call__(self):
        return self.now


def make(folder, clock=None, resumed_step=0, **changes):
    settings = {"device": "cpu", "jsonl": True, "tensorboard": False, "every": 2} | changes
    watch = Watch(folder, **settings)
    watch.clock = clock or Clock()
    return watch.follow(resumed_step)


def lines(folder):
    return [json.loads(line, parse_constant=pytest.fail) for line in (folder / "train.jsonl").read_text().splitlines()]


def wait(watch, clock, seconds):
    """Wait this long for a batch."""

    def load():
        clock.now += seconds
        yield "batch"

    assert next(watch.time_waiting(load())) == "batch"


def run(folder, steps, **changes):
    """Steps of 1 s whose loss is their number over 4."""
    clock = Clock()
    with make(folder, clock, **changes) as watch:
        for step in steps:
            clock.now += 1
            watch.step(step, (step - 1) // 5, {"loss": step / 4}, 0.5 / step, images=8)
    return watch


@pytest.mark.parametrize("jsonl", [True, False])
def test_a_window_by_hand(tmp_path, jsonl):
    """Window 1: 2 + 6 s, 1 + 3 s of them waiting; 2 ranks x 32 images in 8 s; 3 x 10 x 8 FLOP/s of 2 x 1200."""
    clock = Clock()
    settings = {"jsonl": jsonl, "ranks": Ranks(world_size=2), "flop_per_image": 10.0, "peak_flop_per_s": 1200.0}
    with make(tmp_path, clock, **settings) as watch:
        wait(watch, clock, 1)
        clock.now += 1
        assert watch.step(1, 0, {"loss": 2.0, "grad_norm": 0.5}, 0.25, images=16) is None
        with watch.paused():
            clock.now += 1000
        wait(watch, clock, 3)
        clock.now += 3
        means = {"loss": 1.5, "grad_norm": 0.75, "lr": 0.125, "img_per_s": 8.0}
        means |= {"data_wait_percent": 50.0, "skip_rate_percent": 0.0, "mfu_percent": 10.0}
        assert watch.step(2, 0, {"loss": 1.0, "grad_norm": 1.0}, 0.125, images=16) == means
        # window 2 knows nothing of window 1; the skipped step counts for the speed and the rate, not for the means
        clock.now += 1
        watch.step(3, 1, {"loss": math.nan, "grad_norm": math.inf}, 0.5, images=16, skipped=True)
        clock.now += 3
        means = watch.step(4, 1, {"loss": 4.0, "grad_norm": 2.0}, 0.5, images=16)
        assert (means["loss"], means["grad_norm"]) == (4.0, 2.0)
        assert (means["skip_rate_percent"], means["img_per_s"]) == (50.0, 16.0)
        assert means["data_wait_percent"] == 0.0 and "peak_memory_mib" not in means
        clock.now += 4
        watch.step(5, 1, {"loss": 0.0, "grad_norm": 0.0}, 0.5, images=16)
        summary = watch.summary()
    # 5 steps of 32 images in 8 + 4 + 4 s, 4 s of them waiting; the unfinished window counts, and once
    expected = {"throughput_img_per_s": 10.0, "data_wait_percent": 25.0, "skip_rate_percent": 20.0, "skipped_steps": 1}
    expected |= {"peak_memory_mib": None, "peak_memory_mib_reason": "PyTorch keeps no peak of memory on cpu"}
    # 3 x 10 FLOP x 10 img/s of 2 x 1200 FLOP/s
    assert watch.summary() == summary == expected | {"mfu_percent": 12.5}
    assert (tmp_path / "train.jsonl").exists() == jsonl


def test_a_line_by_hand(tmp_path):
    clock = Clock()
    with make(tmp_path, clock, ranks=Ranks(world_size=4)) as watch:
        wait(watch, clock, 0.5)
        clock.now += 0.25
        watch.step(1, 0, {"loss": 1.5, "top1": 0.25}, 1e-3, images=8)
        # it is there before the next step starts: a state saved now is not ahead of the file
        counted = {"step": 1, "epoch": 0, "lr": 1e-3, "images": 32, "skipped": False}
        counted |= {"seconds": 0.75, "data_wait_seconds": 0.5}
        assert lines(tmp_path) == [counted | {"loss": 1.5, "top1": 0.25}]


def test_what_is_not_finite_is_null_and_named(tmp_path):
    with make(tmp_path) as watch:
        watch.step(1, 0, {"loss": math.nan, "grad_norm": -math.inf, "top1": 0.5}, 1e-3, images=8, skipped=True)
        means = watch.step(2, 0, {"loss": math.inf, "grad_norm": 1.0, "top1": 0.5}, 1e-3, images=8)
    first, second = lines(tmp_path)
    assert (first["loss"], first["grad_norm"], first["top1"]) == (None, None, 0.5)
    assert first["not_finite"] == ["loss", "grad_norm"]
    assert (second["loss"], second["grad_norm"], second["not_finite"]) == (None, 1.0, ["loss"])
    # the clock stood still: no speed is named, rather than an infinite one; what was not skipped is not hidden
    assert means == {"loss": math.inf, "grad_norm": 1.0, "top1": 0.5, "lr": 1e-3, "skip_rate_percent": 50.0}


def test_means_are_over_the_steps_that_have_the_number_and_were_not_skipped(tmp_path):
    with make(tmp_path, jsonl=False, every=3) as watch:
        watch.step(1, 0, {"loss": 1.0, "aux": 3.0}, 0.5, images=8)
        watch.step(2, 0, {"aux": 5.0, "loss": 2.0}, 0.5, images=8)
        means = watch.step(3, 0, {"loss": 6.0}, 0.5, images=8)
        for step in (4, 5, 6):
            of_skipped = watch.step(step, 0, {"loss": math.nan}, 0.5, images=8, skipped=True)
    assert (means["loss"], means["aux"]) == (3.0, 4.0)
    assert of_skipped == {"lr": 0.5, "skip_rate_percent": 100.0}


@pytest.mark.parametrize(("saved", "cut"), [(0, 20), (6, 0), (7, 1), (9, 1), (9, 20)])
def test_a_resumed_file_is_the_one_of_an_uninterrupted_run(tmp_path, saved, cut):
    """Killed after step 9, or before the last `cut` bytes of a line were written, with the state of step `saved`."""
    run(tmp_path / "whole", range(1, 13))
    run(tmp_path / "cut", range(1, 10 + (cut > 1)))
    path = tmp_path / "cut/train.jsonl"
    path.write_bytes(path.read_bytes()[: -cut or None])
    run(tmp_path / "cut", range(saved + 1, 13), resumed_step=saved)
    assert path.read_bytes() == (tmp_path / "whole/train.jsonl").read_bytes()
    assert [entry.name for entry in path.parent.iterdir()] == ["train.jsonl"]


def test_a_damaged_line_before_the_last_is_an_error_that_changes_nothing(tmp_path):
    run(tmp_path, range(1, 4))
    path = tmp_path / "train.jsonl"
    damaged = path.read_bytes().replace(b'"step": 2', b'"step" 2')
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"train\.jsonl: line 2 does not describe a step"):
        run(tmp_path, [4], resumed_step=3)
    assert path.read_bytes() == damaged and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("tensorboard", [False, True])
def test_other_ranks_write_nothing_and_count_the_same(tmp_path, tensorboard):
    if tensorboard:
        pytest.importorskip("tensorboard")
    first = run(tmp_path / "first", range(1, 4), ranks=Ranks(world_size=2))
    other = run(tmp_path / "other", range(1, 4), ranks=Ranks(rank=1, world_size=2), tensorboard=tensorboard)
    assert not (tmp_path / "other").exists()
    assert other.summary() == first.summary()


def test_summary_of_a_run_without_steps_gives_reasons(tmp_path):
    with make(tmp_path, resumed_step=7) as watch:
        pass
    summary = watch.summary()
    missing = {name for name, value in summary.items() if value is None}
    assert missing == {"throughput_img_per_s", "data_wait_percent", "skip_rate_percent", "peak_memory_mib"}
    assert all(summary[f"{name}_reason"] for name in missing) and summary["skipped_steps"] == 0
    assert set(summary) == missing | {f"{name}_reason" for name in missing} | {"skipped_steps"}


@pytest.mark.parametrize("name", ["step", "img_per_s"])
def test_a_number_cannot_have_a_name_of_ours(tmp_path, name):
    with make(tmp_path) as watch, pytest.raises(ValueError, match=f"named {name}"):
        watch.step(1, 0, {"loss": 1.0, name: 1.0}, 0.5, images=8)


def test_a_full_disk_ends_the_run_with_one_line_and_the_file_can_be_resumed(tmp_path):
    """A limit on the size of files stands for the disk: the write that passes it is cut short."""
    run(tmp_path / "whole", range(1, 13))
    size = len(b"".join((tmp_path / "whole/train.jsonl").read_bytes().splitlines(keepends=True)[:6])) + 10
    with pytest.raises(RunError, match="step 7 cannot be written: File too large"), limit_files(size):
        run(tmp_path / "full", range(1, 13))
    assert (tmp_path / "full/train.jsonl").stat().st_size == size
    run(tmp_path / "full", range(5, 13), resumed_step=4)
    assert (tmp_path / "full/train.jsonl").read_bytes() == (tmp_path / "whole/train.jsonl").read_bytes()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/run: cannot be written"), make(tmp_path / "file/run"):
        pass


def test_without_tensorboard_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"\[tensorboard\]") as error:
        make(tmp_path, tensorboard=True)
    assert "\n" not in str(error.value)
    make(tmp_path)  # not asked for, not needed


def test_tensorboard_shows_the_means_of_the_windows_also_after_a_resume(tmp_path):
    """Killed after step 7 with the state of step 4 on disk: the events of step 6 come again and are there once."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    clock = Clock()
    killed_run = make(tmp_path, clock, tensorboard=True, jsonl=False)
    killed = killed_run.__enter__()
    for step in range(1, 8):
        clock.now += 2
        killed.step(step, 0, {"loss": step / 4}, 0.5 / step, images=8)
    run(tmp_path, range(5, 12), resumed_step=4, tensorboard=True, jsonl=False)
    read = reader.EventAccumulator(str(tmp_path))
    read.Reload()
    seen = {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    names = "loss lr img_per_s data_wait_percent skip_rate_percent".split()
    assert set(seen) == {f"train/{name}" for name in names}
    # windows end at 2, 4, ...; the last one, of step 11 alone, at the end of the run
    assert seen["train/loss"] == [(2, 0.375), (4, 0.875), (6, 1.375), (8, 1.875), (10, 2.375), (11, 2.75)]
    assert seen["train/img_per_s"] == [(2, 4.0), (4, 4.0), (6, 8.0), (8, 8.0), (10, 8.0), (11, 8.0)]
    assert seen["train/lr"][1] == (4, 0.125)
    killed_run.__exit__(None, None, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peak_memory_is_the_runs_own(tmp_path):
    big = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    del big
    with make(tmp_path, device="cuda", every=1) as watch:
        held = torch.empty(32 * 2**20, dtype=torch.uint8, device="cuda")
        means = watch.step(1, 0, {"loss": 1.0}, 0.5, images=8)
    assert 32 <= means["peak_memory_mib"] < 64 and means["loss"] == 1.0
    assert watch.summary()["peak_memory_mib"] == means["peak_memory_mib"] and held.is_cuda
