"""Where `repro generate` records the scores of its pictures: nothing of another draw is replaced."""

import dataclasses

import pytest
from torch import nn

from repro.inference.generate import Drawer, name_record
from repro.inference.params import DrawnParams
from repro.tasks.generation.params import InputSettings, SamplingParams
from repro.tasks.generation.task import to_pictures

SAMPLING = SamplingParams(sampler="ddim", steps=50, guidance=1.5)
DRAWER = Drawer(
    name="dit_nano_patch4",
    model=nn.Identity(),
    transform=InputSettings(image_size=32),
    trained_size=32,
    sampling=SAMPLING,
    classes=("a", "b"),
    decode=to_pictures,
)
PARAMS = DrawnParams(
    weights_hash="0123456789abcdef", labels=(0, 1), samples=20, image_size=32, sampling=SAMPLING, seed=0, files=()
)
NAME = "dit_nano_patch4_01234567_ddim50_guidance1_5_20samples_seed0"


@pytest.mark.parametrize(
    ("changed", "files", "data", "added"),
    [
        ({}, {}, None, ""),
        ({}, {}, "digits", "_digits"),
        ({"labels": (1,)}, {}, None, "_class1"),
        ({"image_size": 48}, {}, None, "_size48"),
        ({}, {"judge": "89abcdef00000000"}, "digits", "_judge89abcdef_digits"),
        ({}, {"inception": "f" * 16, "vae": "e" * 16}, None, "_inceptionffffffff_vaeeeeeeeee"),
        ({}, {"reference": "d" * 16}, "batch.npz", "_referencedddddddd_batch"),
    ],
)
def test_a_record_is_named_by_all_that_changes_its_scores(changed, files, data, added):
    assert name_record(DRAWER, dataclasses.replace(PARAMS, **changed), files, data) == NAME + added
