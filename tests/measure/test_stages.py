"""The complexity and efficiency stages on small params: what they write, and how they refuse."""

import csv
import json

import pytest

from repro.core.config import build
from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.runtime import Runtime
from stages import complexity, efficiency

NANO, DEIT = "vittt_nano_patch16_144", "deit_tiny_patch16_224"


def read(folder):
    metrics = json.loads((folder / "metrics.json").read_text())["metrics"]
    with open(folder / "rows.csv", encoding="utf-8") as stream:
        return metrics, list(csv.DictReader(stream))


def test_complexity_counts_every_combination(tmp_path):
    params = build(
        complexity.ComplexityParams,
        {
            "sizes": {"T": {"vittt": NANO, "baseline": DEIT}},
            "groups": [
                {"models": [NANO, DEIT], "resolutions": [144, 224]},
                {"models": [NANO], "resolutions": [144], "vary": {"design": ["dual", "conv2d"], "chunk_size": [8, 0]}},
            ],
            "adapters": {"backbones": [NANO, DEIT], "images": [{"height": 64, "width": 96}]},
        },
        "complexity",
    )
    complexity.run(params, Paths(tmp_path))
    metrics, table = read(tmp_path / "results" / "complexity")
    assert len(metrics["rows"]) == len(table) == 10
    assert metrics["rows"][f"{DEIT}@224"]["params"] == 5_717_416
    assert metrics["rows"][f"{NANO}[design=dual,chunk_size=0]@144"]["options"] == {"design": "dual", "chunk_size": 0}
    assert metrics["dwconv_params_m"]["T"] == 4 * 9 * 64 / 1e6
    assert 0 < metrics["saved_at_1280_percent"]["T"] < 100
    with open(tmp_path / "results" / "complexity" / "terms.csv", encoding="utf-8") as stream:
        terms = list(csv.DictReader(stream))
    for kind, total in (("params", 5_717_416), ("macs", round(metrics["rows"][f"{DEIT}@224"]["macs_g"] * 1e9))):
        assert sum(int(t["value"]) for t in terms if (t["row"], t["kind"]) == (f"{DEIT}@224", kind)) == total
    name = f"vit_adapter[backbone={DEIT}]@64x96"
    adapted = metrics["rows"][name]
    assert (adapted["params"], adapted["resolution"], adapted["options"]) == (7_966_640, [64, 96], {"backbone": DEIT})
    in_terms = sum(int(t["value"]) for t in terms if (t["row"], t["kind"]) == (name, "macs_paper_convention"))
    assert in_terms == round(adapted["macs_g_paper_convention"] * 1e9) > round(adapted["macs_g"] * 1e9)
    lines = {line["row"]: line for line in table}
    assert float(lines[name]["macs_g_paper_convention"]) == adapted["macs_g_paper_convention"] and lines[name]["resolution"] == "64x96"
    assert lines[f"{DEIT}@224"]["macs_g_paper_convention"] == "" and "macs_g_paper_convention" not in metrics["rows"][f"{DEIT}@224"]


@pytest.mark.parametrize("group", [{"models": ["vittt_gigantic"]}, {"models": [NANO], "vary": {"designs": ["dual"]}}])
def test_complexity_refuses_in_one_line(tmp_path, group):
    data = {"sizes": {}, "groups": [{"resolutions": [144], **group}]}
    with pytest.raises(UserError, match=r"^complexity: \S+@144: "):
        complexity.run(build(complexity.ComplexityParams, data, "complexity"), Paths(tmp_path))


def test_a_backbone_without_adapter_is_refused_in_one_line(tmp_path):
    data = {"sizes": {}, "groups": [], "adapters": {"backbones": ["resnet10t"], "images": [{"height": 64, "width": 64}]}}
    with pytest.raises(UserError, match=r"^complexity: vit_adapter\[backbone=resnet10t\]@64: resnet10t: is not a plain backbone"):
        complexity.run(build(complexity.ComplexityParams, data, "complexity"), Paths(tmp_path))


def test_efficiency_measures_both_kinds_of_attention(tmp_path):
    params = build(
        efficiency.EfficiencyParams,
        {
            "sizes": {"T": {"vittt": NANO, "baseline": DEIT}},
            "resolutions": [32],
            "op": {"tokens": 40, "heads": 1, "matmul_side": 64, "repeats": 6},
        },
        "efficiency",
    )
    efficiency.run(params, Paths(tmp_path), Runtime(device="cpu", data_roots={}))
    metrics, table = read(tmp_path / "results" / "efficiency")
    assert [(row["model"], row["attention"]) for row in metrics["rows"]] == [(NANO, None), (DEIT, "unfused"), (DEIT, "fused")]
    assert [row["row"] for row in metrics["rows"]] == [row["row"] for row in table]
    for row, line in zip(metrics["rows"], table, strict=True):
        assert row["status"] == line["status"] == "ok" and row["device"].startswith("cpu: ")
        assert float(line["latency_ms_low"]) <= row["latency_ms"] <= float(line["latency_ms_high"])
    op = metrics["op"]
    assert op["share_of_matmul_rate"] == pytest.approx(op["op_gflop_per_s"] / op["matmul_gflop_per_s"])
    # 2 FLOPs per MAC, two directions, 40 tokens in chunks of 16, 16 and 8, head 64
    flops = 2 * 2 * (3 * 40 * 64**2 + 2 * (16**2 + 16**2 + 8**2) * 64)
    assert op["op_gflop_per_s"] == pytest.approx(flops / 1e9 / (op["op_ms"] / 1e3))
    assert op["matmul_gflop_per_s"] == pytest.approx(2 * 64**3 / 1e9 / (op["matmul_ms"] / 1e3))
    # the op keeps its inputs, which are q, k, v (40 tokens, one head of 64), lr, 16 factors, W0 and three vectors, and one state, in fp32
    assert op["kept_kernel_mib"] == pytest.approx(4 * (3 * 40 * 64 + 40 + 16 + 64**2 + 3 * 64 + 64**2 + 64) / 2**20)
    assert op["kept_reference_mib"] > 4 * 3 * 64**2 / 2**20  # the equations keep a state for each of three chunks
    assert op["memory_reference_over_kernel"] == pytest.approx(op["kept_reference_mib"] / op["kept_kernel_mib"])
    # nothing was measured at 1280, so nothing is claimed there
    for name in ("speedup_at_1280", "memory_saved_at_1280_percent"):
        assert metrics[name]["T"]["vs_deit_fused"] is None and "1280" in metrics[name]["T"]["vs_deit_fused_reason"]


def test_comparison_is_of_the_same_place():
    params = build(
        efficiency.EfficiencyParams,
        {
            "sizes": {"T": {"vittt": "v", "baseline": "d"}},
            "resolutions": [224, 1280],
            "op": {"tokens": 1, "heads": 1, "matmul_side": 1, "repeats": 6},
        },
        "efficiency",
    )
    rows = [
        {"model": model, "attention": attention, "resolution": [side, side], "status": "ok", "latency_ms": latency}
        for model, attention, side, latency in [("v", None, 224, 9.0), ("v", None, 1280, 2.0), ("d", "fused", 1280, 3.0)]
    ]
    rows.append({"model": "d", "attention": "unfused", "resolution": [1280, 1280], "status": "oom", "latency_ms": None})
    compared = efficiency._compare(params, rows, "latency_ms", lambda ours, theirs: theirs / ours)
    assert compared == {"T": {"vs_deit_fused": 1.5, "vs_deit_unfused": None, "vs_deit_unfused_reason": "at 1280: v ok, d oom"}}
