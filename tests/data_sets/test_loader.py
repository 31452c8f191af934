import contextlib
import dataclasses
import errno
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data.auto_augment import RandAugment

from repro.core.errors import RunError, UserError
from repro.data.check.run import run_parallel
from repro.data.classification import ImageFolder, ToInput, eval_transform, train_transform
from repro.data.loader import EvalLoader, TrainLoader, TrainOrder
from repro.data.settings import TransformSettings
from repro.data.tree import scan_tree
from tests.conftest import ROOT

PLAIN = TransformSettings(image_size=16, crop_pct=1.0)
HEAVY = TransformSettings(image_size=16, scale=(0.3, 1.0), color_jitter=0.4, auto_augment="rand-m9-n2-mstd0.5-inc1")


def places(images: torch.Tensor) -> list[int]:
    """The place of each image in the split, read from its pixels; see the fixture `root`."""
    return (images.float().mean(dim=(1, 2, 3)) / 10).round().int().tolist()


def plain(root, split="train", **options):
    return ImageFolder(scan_tree(root, "folder"), split, eval_transform(PLAIN), **options)


def training(root, **options):
    return ImageFolder(scan_tree(root, "folder"), "train", train_transform(HEAVY), **options)


def spoil(root, split, number):
    """Cut the files at these places of the split short, and return their paths."""
    tree = scan_tree(root, "folder")
    paths = [tree.path(split, n) for n in number]
    for path in paths:
        os.truncate(path, 30)
    return paths


LABELS = [0] * 5 + [1] * 9 + [2] * 6


def pairs(loader) -> list[tuple[int, int]]:
    """(place, target) of each image."""
    return [pair for images, targets in loader for pair in zip(places(images), targets.tolist())]


@pytest.fixture
def loader_of():
    with contextlib.ExitStack() as stack:
        yield lambda cls, *args, **options: stack.enter_context(contextlib.closing(cls(*args, **options)))
    assert not multiprocessing.active_children(), "close left worker processes behind"


@pytest.mark.parametrize(("workers", "world_size"), [(0, 1), (2, 3)])
def test_evaluation_sees_every_sample_once_with_its_label(root, loader_of, workers, world_size):
    seen, options = [], {"batch_size": 3, "workers": workers, "world_size": world_size}
    for rank in range(world_size):
        loader = loader_of(EvalLoader, plain(root, "val"), rank=rank, **options)
        next(iter(loader))  # an epoch that is left begins anew
        for repetition in range(2):
            mine = pairs(loader)
            assert len(mine) in (20 // world_size, 20 // world_size + 1)
            assert sum(1 for _ in loader) == len(loader)
        seen += mine
    assert sorted(seen) == list(zip(range(20), LABELS))


def test_a_rank_without_a_held_out_image_is_refused(root, loader_of):
    """It would know neither the number of classes nor the names of the losses."""
    with pytest.raises(UserError, match="20 .* 21 processes"):
        loader_of(EvalLoader, plain(root, "val"), batch_size=3, rank=20, world_size=21)
    assert len(pairs(loader_of(EvalLoader, plain(root, "val"), batch_size=3, rank=19, world_size=20))) == 1


def test_training_epoch_is_a_permutation_without_the_remainder(root, loader_of):
    loader = loader_of(TrainLoader, plain(root), batch_size=6, seed=0)
    epochs = [[p for images, _ in loader.batches(epoch) for p in places(images)] for epoch in range(4)]
    assert len(loader) == 3
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 18
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert len({frozenset(epoch) for epoch in epochs}) > 1, "always the same samples are left out"


def test_ranks_share_out_the_batches_of_one_process(root, loader_of):
    dataset = plain(root)
    whole = loader_of(TrainLoader, dataset, batch_size=6, seed=3)
    parts = [loader_of(TrainLoader, dataset, batch_size=2, seed=3, rank=rank, world_size=3) for rank in range(3)]
    together = [torch.cat([images for images, _ in batches]) for batches in zip(*(part.batches(5) for part in parts))]
    expected = [images for images, _ in whole.batches(5)]
    assert len(together) == len(expected) == 3
    for ours, theirs in zip(together, expected):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("workers", [0, 2])
def test_continuing_in_the_middle_equals_not_stopping(root, loader_of, workers):
    dataset, how = training(root, seed=7), {"batch_size": 3, "seed": 7}
    reference, first, second = (loader_of(TrainLoader, dataset, **how, workers=n) for n in (0, workers, workers))
    expected = [batch for epoch in range(2) for batch in reference.batches(epoch)]
    got = [*first.batches(0), *itertools.islice(first.batches(1), 2), *second.batches(1, 2)]
    # and in a loader whose workers were left in the middle of an epoch
    got += first.batches(1, 2)
    assert len(expected) == 12
    for (ours, our_targets), (theirs, their_targets) in zip(got, [*expected, *expected[8:]], strict=True):
        assert torch.equal(ours, theirs) and torch.equal(our_targets, their_targets)
    assert not list(second.batches(1, 6))


def test_augmentation_differs_between_epochs_and_seeds(root):
    one, other = training(root, seed=1), training(root, seed=2)
    samples = [one[(0, 12)][0], one[(1, 12)][0], other[(0, 12)][0]]
    assert torch.equal(samples[0], one[(0, 12)][0])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(samples, 2))


def test_loading_leaves_the_global_randomness_alone(root, loader_of):
    drawn = []
    for load in (False, True):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        if load:
            list(loader_of(TrainLoader, training(root), batch_size=4, seed=0).batches(0))
            list(loader_of(EvalLoader, plain(root, "val"), batch_size=4))
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_files_are_counted_once_and_replaced_by_the_next(root, loader_of, workers):
    # places 8, 9 and 19: the neighbour of 8 is unreadable too, the last one's neighbour is the first
    bad = spoil(root, "train", [8, 9, 19])
    dataset = plain(root, max_unreadable=3)
    loader = loader_of(TrainLoader, dataset, batch_size=4, seed=0, workers=workers)
    expected = [({8: 10, 9: 10, 19: 0}.get(place, place)) for place in range(20)]
    for epoch in range(2):
        assert sorted(pairs(loader.batches(epoch))) == sorted((place, LABELS[place]) for place in expected)
    assert dataset.unreadable() == bad


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_unreadable_files_end_the_run_with_one_line(root, loader_of, workers):
    bad = spoil(root, "train", [3, 8, 15])
    dataset = training(root, max_unreadable=2)
    loader = loader_of(TrainLoader, dataset, batch_size=4, seed=0, workers=workers)
    with pytest.raises(UserError, match=r"unreadable images \(3, at most 2 allowed\)") as caught:
        list(loader.batches(0))
    assert "\n" not in str(caught.value) and all(str(path) in str(caught.value) for path in bad)
    (path,) = spoil(root, "val", [11])  # evaluation replaces nothing
    with pytest.raises(UserError, match=r"unreadable image \(1, at most 0 allowed\)") as caught:
        list(loader_of(EvalLoader, plain(root, "val"), batch_size=4, workers=workers))
    assert str(caught.value).startswith(str(path))


def test_what_leaves_nothing_to_train_on_is_refused(root):
    with pytest.raises(UserError, match=r"batch size 7 on 3 process\(es\): there are only 20 training images"):
        TrainLoader(training(root), batch_size=7, seed=0, world_size=3)
    spoil(root, "train", range(20))
    with pytest.raises(UserError, match="none of the 20 images can be read"):
        training(root, max_unreadable=100)[(0, 4)]


def test_a_dead_worker_is_one_line(root, loader_of):
    def die_at_place_five(image: Image.Image) -> torch.Tensor:
        if image.getpixel((0, 0))[0] == 50:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
        return torch.zeros(3, 1, 1, dtype=torch.uint8)

    dataset = ImageFolder(scan_tree(root, "folder"), "val", die_at_place_five)
    with pytest.raises(RunError, match="a loading process died, .* lower runtime.workers"):
        list(loader_of(EvalLoader, dataset, batch_size=1, workers=2))


PROGRAM = """
    import os, signal, sys
    from pathlib import Path
    from repro.data.loader import EvalLoader
    from tests.data_sets.test_loader import plain

    loader = EvalLoader(plain(Path(sys.argv[1]), "val"), batch_size=1, workers=2)
    received = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, frame: received.append(signum))
    seen = 0
    for images, targets in loader:
        seen += len(targets)
        if seen == 2:
            os.killpg(0, signal.SIGINT)
            os.killpg(0, signal.SIGTERM)
    print(seen, sorted(received), signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL, flush=True)
    for images, targets in loader:
        raise ValueError("the program failed")
"""


@pytest.mark.slow
def test_workers_outlive_signals_to_the_group_but_not_the_program(root):
    """Neither do they keep a program alive that fails."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(root)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, start_new_session=True)
    assert (done.returncode, done.stdout.strip()) == (1, "20 [2, 15] True"), done.stderr


@pytest.mark.parametrize("hflip", [0, 1])
def test_flipping_is_a_parameter(hflip):
    pixels = np.zeros((16, 16, 3), dtype=np.uint8)
    pixels[:, :8] = 255
    transform = train_transform(TransformSettings(image_size=16, scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=hflip))
    results = [transform(Image.fromarray(pixels)) for _ in range(40)]
    assert sum(bool(tensor[0, 8, 0] < tensor[0, 8, 15]) for tensor in results) == 40 * hflip


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        # timm asks for int(4 - 10 / 10 * 4) = 0 and int(0 / 10 * 4) = 0 bits here; a value keeps v & 0 = 0
        ("rand-m10-n1-p1.0-inc1", 0),
        ("rand-m0-n1-p1.0", 0),
        # 4 - int(1 / 10 * 4) = 4 and int(10 / 10 * 4) = 4 bits: the lower 4 are cleared
        ("rand-m1-n1-p1.0-inc1", 0xF0),
        ("rand-m10-n1-p1.0", 0xF0),
    ],
)
def test_posterisation_keeps_the_bits_that_it_should(text, mask):
    transform = train_transform(TransformSettings(image_size=16, auto_augment=text))
    (step,) = [step for step in transform.transforms if hasattr(step, "ops")]
    step.ops = [op for op in step.ops if op.name.startswith("Posterize")]
    assert len(step.ops) == 1
    values = transform(Image.new("RGB", (16, 16), (200, 100, 50)))
    assert values.unique(dim=1).unique(dim=2).flatten().tolist() == [200 & mask, 100 & mask, 50 & mask]


@pytest.mark.parametrize(("padding", "hflip"), [(0, 0.0), (2, 1.0)])
def test_a_padded_crop_is_one_of_those_that_are_cut_by_hand(padding, hflip):
    """Of an image on a black ground, at every place with the same probability, pixel by pixel."""
    settings = TransformSettings(image_size=16, crop_padding=padding, hflip=hflip, crop_pct=1.0)
    pixels = np.random.default_rng(0).integers(1, 256, (16, 16, 3), dtype=np.uint8)
    ground = np.zeros((16 + 2 * padding, 16 + 2 * padding, 3), dtype=np.uint8)
    ground[padding : padding + 16, padding : padding + 16] = pixels
    by_hand = {}
    for top, left in itertools.product(range(2 * padding + 1), repeat=2):
        crop = ground[top : top + 16, left : left + 16]
        by_hand[(crop[:, ::-1] if hflip else crop).tobytes()] = (top, left)
    transform, image = train_transform(settings), Image.fromarray(pixels)
    torch.manual_seed(0)
    drawn = [by_hand[transform(image).permute(1, 2, 0).numpy().tobytes()] for _ in range(20 * len(by_hand))]
    counts = [drawn.count(place) for place in by_hand.values()]
    assert len(counts) == (2 * padding + 1) ** 2 and min(counts) >= 5 and max(counts) <= 40
    assert np.array_equal(eval_transform(settings)(image).permute(1, 2, 0).numpy(), pixels), "judged as it is"


def test_a_padded_crop_of_another_size_begins_with_a_resize():
    settings = TransformSettings(image_size=16, crop_padding=0, hflip=0.0, crop_pct=1.0)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 32, 3), dtype=np.uint8))
    resized = np.array(image.resize((16, 20), Image.Resampling.BICUBIC))
    by_hand = {resized[top : top + 16].tobytes() for top in range(5)}
    transform = train_transform(settings)
    assert {transform(image).permute(1, 2, 0).numpy().tobytes() for _ in range(60)} == by_hand
    heavy = train_transform(dataclasses.replace(HEAVY, scale=(0.08, 1.0), crop_padding=2))
    assert any(isinstance(step, RandAugment) for step in heavy.transforms) and heavy(image).shape == (3, 16, 16)


@pytest.mark.parametrize("other", [{"scale": (0.25, 1.0)}, {"ratio": (1.0, 1.0)}])
def test_a_padded_crop_takes_the_place_of_the_other(other):
    with pytest.raises(ValueError, match=f"crop_padding: takes the place of the crop by {next(iter(other))}; leave"):
        TransformSettings(image_size=16, crop_padding=2, **other)
    assert TransformSettings(image_size=16, crop_padding=None, **other).crop_padding is None


def test_transform_settings_that_timm_takes_and_others():
    for text in ("rand-m5-n1", "rand-mstdinf", "rand-m9-tweights", "rand-mmax20-p0.3"):
        train_transform(TransformSettings(image_size=16, auto_augment=text))(Image.new("RGB", (20, 20)))
    bad = {"auto_augment": ("rand", "rand-q9", "autoaugment"), "scale": [(1.0, 0.5)], "ratio": [(1.0,)]}
    for field, values in (bad | {"mean": [(0.5,)], "std": [(0.5, 0.5)]}).items():
        for value in values:
            with pytest.raises(ValueError, match=field):
                TransformSettings(image_size=16, **{field: value})


def test_preprocessing_travels_with_weights_and_is_read_from_timm():
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (70, 50, 3), dtype=np.uint8))
    shown = {"interpolation": "bilinear", "crop_pct": 0.9, "mean": (0.1, 0.2, 0.3)}
    settings = TransformSettings(image_size=48, scale=(0.5, 1.0), **shown)
    again, small = (TransformSettings.from_preprocessing(settings.preprocessing(), *size) for size in ((), (32,)))
    assert torch.equal(eval_transform(again)(picture), eval_transform(settings)(picture))
    assert eval_transform(small)(picture).shape == (3, 32, 32)
    squashed = "convnext_tiny.in12k_ft_in1k_384"  # its crop_mode is squash
    for name in ("deit_tiny_patch16_224.fb_in1k", squashed):
        config = timm.get_pretrained_cfg(name).to_dict()
        theirs = timm.data.create_transform(**timm.data.resolve_data_config(pretrained_cfg=config))
        settings = TransformSettings.from_preprocessing(TransformSettings.from_preprocessing(config).preprocessing())
        scan = eval_transform(settings)(picture)
        (ours,) = ToInput(settings, torch.device("cpu"))(scan[None])
        assert (scan.dtype, ours.dtype) == (torch.uint8, torch.float32)
        torch.testing.assert_close(ours, theirs(picture))


def test_random_erasing_is_a_rectangle_of_noise_in_training_alone():
    """After normalisation, each value of the rectangle is N(0, 1), in images chosen with `re_prob`."""
    settings, cpu = TransformSettings(image_size=32, re_prob=0.25), torch.device("cpu")
    images = torch.randint(0, 256, (400, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    plain = ToInput(settings, cpu)(images)
    assert torch.equal(plain, ToInput(dataclasses.replace(settings, re_prob=0.0), cpu, training=True)(images))
    random.seed(0), torch.manual_seed(0)
    erased = ToInput(settings, cpu, training=True)(images)
    touched = (erased != plain).any(dim=1)
    chosen = touched.any(dim=(1, 2))
    assert 70 <= int(chosen.sum()) <= 130  # 100 expected; 3.5 standard deviations
    noise = []
    for image, mask in zip(erased[chosen], touched[chosen]):
        rows, columns = mask.any(dim=1).nonzero().flatten(), mask.any(dim=0).nonzero().flatten()
        inside = image[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert mask.sum() == inside[0].numel(), "not a filled rectangle"
        # a share of 0.02 to 1/3, rounded to whole rows and columns
        assert 0.01 * 1024 <= inside[0].numel() <= 0.36 * 1024
        noise.append(inside.flatten())
    noise = torch.cat(noise)
    assert abs(float(noise.mean())) < 0.02 and abs(float(noise.std()) - 1) < 0.02


@pytest.mark.parametrize("world_size", [1, 2])
def test_pairs_of_one_group_cover_everything_once(world_size):
    groups = np.array([0, 1, 1, 0, 1, 0, 0, 0, 1, 2, 0, 1])  # 6 of one group, 5 of another, one alone
    ranks = [TrainOrder(12, 4 // world_size, 5, rank, world_size, groups) for rank in range(world_size)]
    whole, epochs = TrainOrder(12, 4, 5, groups=groups), set()
    for epoch in range(6):
        parts = zip(*(order.batches(epoch, 0) for order in ranks), strict=True)
        indices = [pair for batch in parts for part in batch for pair in part]
        flat = [index for _, index in indices]
        assert sorted(flat) == list(range(12)) and {number for number, _ in indices} == {epoch}
        # 6, 5 and 1 make five pairs, and the two samples that remain make a sixth at the end
        assert all(groups[a] == groups[b] for a, b in zip(flat[:10:2], flat[1:10:2]))
        assert list(ranks[0].batches(epoch, 2)) == list(ranks[0].batches(epoch, 0))[2:]
        assert indices == list(itertools.chain(*whole.batches(epoch, 0)))
        epochs.add(tuple(flat))
    assert len(epochs) == 6
    plain, alone = TrainOrder(12, 4, 5), TrainOrder(12, 4, 5, groups=np.zeros(12))
    assert list(plain.batches(2, 0)) == list(alone.batches(2, 0)), "one group keeps the order"


# bytes of shared memory that are free -> how many worker processes there are, of two
ROOMS = {0: 0, 2**20 - 1: 0, 2**20: 2, 2**30: 2}


@pytest.mark.parametrize("free", ROOMS)
def test_batches_are_the_same_in_every_room(root, loader_of, monkeypatch, capfd, free):
    expected = list(loader_of(EvalLoader, plain(root, "val"), batch_size=3))
    for module in ("repro.core.runtime", "repro.data.loader"):
        monkeypatch.setattr(f"{module}.measure_shared_memory", lambda: free)
    loader = loader_of(EvalLoader, plain(root, "val"), batch_size=3, workers=2)
    for (pictures, labels), (ours, same) in zip(expected, loader, strict=True):
        assert torch.equal(pictures, ours) and torch.equal(labels, same)
    assert len(multiprocessing.active_children()) == ROOMS[free]
    assert ("shared memory" in capfd.readouterr().err) == (not ROOMS[free])


@pytest.mark.parametrize(("error", "workers"), [(errno.ENOSPC, 2), (None, 2), (errno.EROFS, 0)])
def test_without_shared_memory_nothing_asks_for_it(root, loader_of, monkeypatch, error, workers):
    def fail(*args, **kwargs):
        raise ImportError("no synchronization primitives") if error is None else OSError(error, os.strerror(error))

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", fail)
    monkeypatch.setattr("torch.UntypedStorage._share_fd_cpu_", fail)
    monkeypatch.setattr("torch.UntypedStorage._share_filename_cpu_", fail)
    assert sum(len(labels) for _, labels in loader_of(EvalLoader, plain(root, "val"), batch_size=3, workers=workers))
    assert sorted(run_parallel(abs, range(-40, 0), 4)) == [*range(1, 41)]
