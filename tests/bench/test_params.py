"""Image sizes and names as the command line takes them, and the rows that follow from params."""

import sys

import pytest

from repro.bench.efficiency import describe_left_out
from repro.bench.params import EfficiencyParams, SweepParams, parse_image_sizes, parse_names
from repro.bench.speed import RowSpec
from repro.bench.sweep import FAMILIES, IMAGE_SIZES, SIZES
from repro.core.config import build
from repro.core.errors import UserError
from tests.conftest import run_main


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
        ("224²", "'224²': not an image size; write 224, "),
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
    assert sum(map(len, gpu.plan("cuda"))) == 9 * 3 * len(FAMILIES)


def list_rows(params):
    plan = params.with_defaults("cpu").plan("cpu")
    return [[(spec.image_size[0], spec.model.split("_")[0], spec.attention) for spec in block] for block in plan]


def test_the_papers_pair_comes_first_at_all_image_sizes():
    pair, others = list_rows(SweepParams(image_sizes=(224, 384, 640, 1280)))
    three = ("vittt", None), ("deit", "unfused"), ("deit", "fused")
    assert pair == [(side, *each) for side in (224, 1280, 640, 384) for each in three]
    seven = ("vim", "vrwkv", "vit3", "t5", "hvit3", "vmamba", "mambavision")
    assert others == [(side, name, None) for side in (224, 1280, 640, 384) for name in seven]


def test_families_that_are_asked_for_are_measured_side_by_side():
    (block,) = list_rows(SweepParams(image_sizes=(224, 384), families=("vittt", "vim")))
    assert block == [(side, name, None) for side in (224, 384) for name in ("vittt", "vim")]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"families": ("vittt", "deit_fused"), "sizes": ("T", "B")},
        {"image_sizes": (32,), "minutes": 0.5, "batch_size": 3, "runs": 5},
        {"dtype": "bf16", "mode": "train", "compile": True},
        {"compile": "graphs"},
    ],
)
def test_the_command_of_a_sweep_measures_it(monkeypatch, changes):
    """As the command line reads it."""
    asked, params = [], SweepParams(**changes).with_defaults("cpu")
    monkeypatch.setattr("repro.bench.efficiency.run_sweep", lambda params, paths, runtime, **_: asked.append(params))
    monkeypatch.setattr(sys, "argv", params.command("cpu").split())
    assert run_main() == 0 and asked == [params]


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ([("vim", 64), ("vittt", 64)], "64² of vittt, vim"),
        ([("vim", 64), ("vim", 64)], "64² of vim"),
        ([("deit_fused", 64), ("vim", 32)], "32² of vim; 64² of deit_fused"),
        ([("deit_fused", 64), ("vim", 64), ("vim", 32)], "32² of vim; 64² of deit_fused, vim"),
    ],
)
def test_what_is_left_out_is_named_with_its_command(left, said):
    specs = []
    for family, side in left:
        pattern, attention = FAMILIES[family]
        specs.append(RowSpec(model=pattern.format("tiny"), attention=attention, image_size=(side, side)))
    params = SweepParams(minutes=1.0, runs=2).with_defaults("cpu")
    line = describe_left_out(specs, 8 * 60.0, params, "cpu")
    sides = ",".join(map(str, sorted({side for _, side in left})))
    families = ",".join(name for name in FAMILIES if name in {family for family, _ in left})
    assert f": {said}; `" in line and "\n" not in line
    # 8 minutes, a quarter more, and one to start
    command = f"--res {sides} --families {families} --sizes T --batch-size 1 --dtype fp32 --device cpu --mode infer"
    assert f"`repro efficiency {command} --minutes 11 --runs 2`" in line
