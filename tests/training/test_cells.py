"""What is recorded of a cell's training."""

import json
from types import SimpleNamespace

import pytest

from repro.core.paths import Paths
from repro.core.ranks import Ranks
from repro.training.cells import record_speed

UNTIMED = {"throughput_img_per_s": None, "throughput_img_per_s_reason": "no step was timed"}


@pytest.mark.parametrize(
    ("speeds", "recorded"),
    [
        ([{"throughput_img_per_s": 100.0}, {"throughput_img_per_s": 50.0}, {"throughput_img_per_s": 70.0}], 70.0),
        ([{"throughput_img_per_s": 50.0}, UNTIMED], 50.0),
        ([UNTIMED, UNTIMED], None),
    ],
)
def test_the_speed_of_a_cell_is_that_of_its_last_seed(tmp_path, speeds, recorded):
    """Or of the one before, where an earlier call trained the last seed to its last step."""
    params = SimpleNamespace(model="m", options={"depth": 1})
    cell = SimpleNamespace(params=params, ranks=Ranks(world_size=2), paths=Paths(tmp_path), stage="pretrain", name="nano")
    record_speed(cell, speeds, "gpu", {"device": "cuda: GPU"}, 1.0)
    folder = tmp_path / "results/measured/gpu/pretrain"
    assert {file.name for file in folder.iterdir()} == {"nano.json", "nano.run.json"}
    record = json.loads((folder / "nano.json").read_text())
    assert record["metrics"]["throughput_img_per_s"] == recorded and record["identity"] == {"device": "cuda: GPU"}
    assert (record["metrics"]["model"], record["metrics"]["options"], record["metrics"]["processes"]) == ("m", {"depth": 1}, 2)
