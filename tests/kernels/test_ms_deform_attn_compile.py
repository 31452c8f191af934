"""The Triton kernels of multi-scale deformable attention compiled for three GPUs, without a GPU. Not for Triton's interpreter."""

import json
from pathlib import Path

import pytest

from kernels.ms_deform_attn import triton_bwd, triton_fwd
from kernels.tools.ms_deform_attn_cases import KERNELS, NAME, compilation

RECORD = Path(__file__).parents[2] / "results" / "measured" / "compile" / "resources.json"
# every kernel, dtype and target; the widths of the ViT-Adapters, the widest that there may be, and one that is no power of two
CASES = [
    ("forward", "bf16", 90, 32),
    ("forward", "fp32", 80, 256),
    ("backward_points", "bf16", 90, 64),
    ("backward_points", "fp32", 89, 32),
    ("backward_value", "bf16", 90, 32),
    ("backward_value", "fp16", 80, 48),
]


@pytest.mark.parametrize(("name", "dtype", "target", "head_dim"), CASES)
def test_default_config_compiles_without_spills(name, dtype, target, head_dim):
    found = compilation(f"ms_deform_attn_{name}", dtype, head_dim).read(target)
    assert len(found["loops"]) == (2 if name == "backward_value" else 3)  # one for each stretch of the order, or for each level
    assert (found["stack_bytes"], found["instructions"]["LDL"], found["instructions"]["STL"]) == (0, 0, 0)
    assert found["registers"] <= 128 and found["shared_bytes"] <= 2048


def test_the_record_has_no_spills_in_default_configs():
    rows = [row for row in json.loads(RECORD.read_text())["metrics"]["rows"] if row["operator"] == NAME and row["default"]]
    assert len(rows) == len(KERNELS) * 3 * 3
    assert {(row["stack_bytes"], row["instructions"]["LDL"], row["instructions"]["STL"]) for row in rows} == {(0, 0, 0)}


@pytest.mark.parametrize("head_dim", [1, 5, 32, 64, 256])
@pytest.mark.parametrize("module", [triton_fwd, triton_bwd])
def test_configs_differ(module, head_dim):
    found = [str(config) for config in module.configs(head_dim)]
    assert 1 < len(set(found)) == len(found) <= 4
