"""Image sizes and names as the command line takes them, and the rows that follow from params."""

import pytest

from repro.bench.params import EfficiencyParams, SweepParams, parse_image_sizes, parse_names
from repro.bench.sweep import FAMILIES, IMAGE_SIZES, SIZES
from repro.core.config import build
from repro.core.errors import UserError


@pytest.mark.parametrize(
    ("text", "sides"),
    [
        ("224..1280", IMAGE_SIZES),
        ("384..800", (384, 512, 640, 768)),
        ("224..1280:128", (224, 352, 480, 608, 736, 864, 992, 1120, 1248)),
        ("512, 224", (224, 512)),
        ("32,64..96:16,224", (32, 64, 80, 96, 224)),
    ],
)
def test_image_sizes(text, sides):
    assert parse_image_sizes(text) == sides


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1280..224", "1280..224: begins above its end; write 224..1280"),
        ("225", "225: not a positive multiple of the patch, 16 pixels; the nearest is 224"),
        ("0", "0: not a positive multiple of the patch, 16 pixels; the nearest is 16"),
        ("230..300", "230..300: contains none of 224, "),
        ("224..300:0", "a step of 0 leads nowhere"),
        ("big", "'big': not an image size; write 224, "),
    ],
)
def test_refused_image_sizes(text, message):
    with pytest.raises(UserError, match="^efficiency: --res ") as error:
        parse_image_sizes(text)
    assert message in str(error.value)


def test_names_come_in_the_order_of_the_table():
    assert parse_names("--families", "vim, vittt", FAMILIES) == ("vittt", "vim")
    assert parse_names("--sizes", "B,T", SIZES) == ("T", "B")


def test_the_grid_measures_what_is_compared_next_to_each_other():
    sizes = {"T": {"model": "v", "baseline": "d"}}
    section = {"sizes": sizes, "others": ["o"], "image_sizes": [64, 32], "steps": 12}
    params = build(EfficiencyParams, section, "efficiency")
    specs = params.specs("cuda", threads=3)
    assert [(spec.image_size[0], spec.model, spec.attention) for spec in specs] == [
        (side, *model) for side in (64, 32) for model in (("v", None), ("d", "unfused"), ("d", "fused"), ("o", None))
    ]
    assert {(spec.device, spec.threads, spec.steps, spec.budget_s) for spec in specs} == {("cuda", 3, 12, 120.0)}


def test_a_sweep_takes_the_defaults_of_its_device():
    cpu, gpu = (SweepParams(minutes=3.0).with_defaults(device) for device in ("cpu", "cuda"))
    assert (cpu.sizes, cpu.batch_size, cpu.dtype, cpu.minutes) == (("T",), 1, "fp32", 3.0)
    assert (gpu.sizes, gpu.batch_size, gpu.dtype, gpu.minutes) == (("T", "S", "B"), 64, "bf16", 3.0)
    assert SweepParams(batch_size=2).with_defaults("cuda").batch_size == 2
    assert len(gpu.specs("cuda")) == 9 * 3 * len(FAMILIES)
