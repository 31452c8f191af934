"""The records of complexity and efficiency on small params: what they hold, and how they refuse."""

import csv
import json
import os

import pytest

from repro.bench.complexity import run_complexity
from repro.bench.efficiency import run_grid
from repro.bench.params import ComplexityParams, EfficiencyParams
from repro.core.config import build
from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.runtime import Runtime

NANO, DEIT = "vittt_nano_patch16_144", "deit_tiny_patch16_224"


def read(folder, table="rows.csv"):
    metrics = json.loads((folder / "metrics.json").read_text())["metrics"]
    with open(folder / table, encoding="utf-8") as stream:
        return metrics, list(csv.DictReader(stream))


def count(root, **sections):
    run_complexity(build(ComplexityParams, {"sizes": {}, "groups": [], **sections}, "complexity"), Paths(root))


def test_complexity_counts_every_combination(tmp_path):
    vary = {"design": ["dual", "conv2d"], "chunk_size": [8, 0]}
    groups = [
        {"models": [NANO, DEIT], "image_sizes": [144, 224]},
        {"models": [NANO], "image_sizes": [144], "vary": vary},
    ]
    adapters = {"backbones": [NANO, DEIT], "image_sizes": [{"height": 64, "width": 96}]}
    count(tmp_path, sizes={"T": {"model": NANO, "baseline": DEIT}}, groups=groups, adapters=adapters)
    folder = tmp_path / "results" / "complexity"
    metrics, table = read(folder)
    assert len(metrics["rows"]) == len(table) == 10
    assert metrics["rows"][f"{DEIT}@224"]["num_params"] == 5_717_416
    assert metrics["rows"][f"{NANO}[design=dual,chunk_size=0]@144"]["options"] == {"design": "dual", "chunk_size": 0}
    assert metrics["dwconv_params_m"]["T"] == 4 * 9 * 64 / 1e6
    assert 0 < metrics["saved_at_1280_percent"]["T"] < 100
    _, terms = read(folder, "terms.csv")
    for kind, total in (("num_params", 5_717_416), ("macs", round(metrics["rows"][f"{DEIT}@224"]["macs_g"] * 1e9))):
        own = [term for term in terms if (term["row"], term["kind"]) == (f"{DEIT}@224", kind)]
        assert sum(int(term["value"]) for term in own) == total
    name = f"vit_adapter[backbone={DEIT}]@64x96"
    adapted = metrics["rows"][name]
    assert (adapted["num_params"], adapted["image_size"]) == (7_966_640, [64, 96])
    assert adapted["options"] == {"backbone": DEIT}
    own = [term for term in terms if (term["row"], term["kind"]) == (name, "macs_paper_convention")]
    in_terms = sum(int(term["value"]) for term in own)
    assert in_terms == round(adapted["macs_g_paper_convention"] * 1e9) > round(adapted["macs_g"] * 1e9)
    lines = {line["row"]: line for line in table}
    line, by_paper = lines[name], "macs_g_paper_convention"
    assert float(line[by_paper]) == adapted[by_paper] and line["image_size"] == "64x96"
    deit = f"{DEIT}@224"
    assert lines[deit][by_paper] == "" and by_paper not in metrics["rows"][deit]


def test_complexity_has_the_counts_of_fvcore_and_of_a_familys_authors_where_they_are_asked_for(tmp_path):
    """By fvcore a LayerNorm counts 5 per value: 25 of them, of 197 tokens of width 192. Vittt's authors count as we do."""
    groups = [{"models": ["vmamba_nano_144", NANO], "image_sizes": [144]}]
    groups.append({"models": [DEIT], "image_sizes": [224], "fvcore": True})
    count(tmp_path, groups=groups)
    metrics, table = read(tmp_path / "results" / "complexity")
    vmamba, vittt, deit = (metrics["rows"][row] for row in ("vmamba_nano_144@144", f"{NANO}@144", f"{DEIT}@224"))
    assert round((deit["macs_g_fvcore"] - deit["macs_g"]) * 1e9) == 25 * 197 * 192 * 5
    assert vmamba["macs_g_paper_convention"] > vmamba["macs_g"]
    for key, own in (("macs_g_fvcore", deit), ("macs_g_paper_convention", vmamba)):
        assert [key in row for row in (vmamba, vittt, deit)] == [row is own for row in (vmamba, vittt, deit)]
        assert sorted(line[key] for line in table) == ["", "", str(own[key])]
    _, terms = read(tmp_path / "results" / "complexity", "terms.csv")
    listed = {term["term"]: int(term["value"]) for term in terms if term["kind"] == "macs_paper_convention"}
    assert {"scan", "layer_norm", "pooling"} < set(listed)
    assert sum(listed.values()) == round(vmamba["macs_g_paper_convention"] * 1e9)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"groups": [{"image_sizes": [144], "models": ["vittt_gigantic"]}]}, "complexity: vittt_gigantic@144: "),
        (
            {"groups": [{"image_sizes": [144], "models": [NANO], "vary": {"designs": ["dual"]}}]},
            r"complexity: \S+designs=dual\]@144: ",
        ),
        (
            {"adapters": {"backbones": ["resnet10t"], "image_sizes": [{"height": 64, "width": 64}]}},
            r"complexity: vit_adapter\[backbone=resnet10t\]@64: ",
        ),
        # without a depth-wise convolution
        ({"sizes": {"T": {"model": DEIT, "baseline": DEIT}}}, f"complexity.sizes.T.model: {DEIT} "),
    ],
)
def test_complexity_refuses_in_one_line(tmp_path, sections, message):
    with pytest.raises(UserError, match=f"^{message}"):
        count(tmp_path, **sections)


@pytest.mark.slow
def test_the_grid_measures_both_kinds_of_attention(tmp_path):
    op = {"tokens": 40, "heads": 1, "matmul_side": 64, "repeats": 6}
    sizes = {"T": {"model": NANO, "baseline": DEIT}}
    params = build(EfficiencyParams, {"sizes": sizes, "image_sizes": [32], "budget_s": 600.0, "op": op}, "efficiency")
    run_grid(params, Paths(tmp_path), Runtime(device="cpu", data_roots={}))
    metrics, table = read(tmp_path / "results" / "efficiency")
    found = [(row["model"], row["attention"]) for row in metrics["rows"]]
    assert found == [(NANO, None), (DEIT, "unfused"), (DEIT, "fused")]
    # every DataFrame column of the table, in order; the rows of a sweep have more
    assert ",".join(table[0]) == (
        "row,model,attention,image_size,batch_size,dtype,device,backend,status,noisy,throughput_img_per_s,latency_ms,latency_ms_low,"
        "latency_ms_high,peak_memory_mib,macs_g"
    )
    for row, line in zip(metrics["rows"], table, strict=True):
        assert row["status"] == line["status"] == "ok"
        assert row["device"].startswith("cpu: ") and line["image_size"] == "32"
        assert not {"run", "code_hash", "torch_version"} & row.keys()
        # whether it is noisy depends on what else the machine does
        assert row["attempts"] in (1, 2, 3) and line["noisy"] == " ".join(row["noisy"])
        assert row["threads"] >= 1 and row["cores"] == os.cpu_count() and row["load_average"] >= 0
        low, high = row["latency_ms_ci95"] or ("", "")
        assert (line["latency_ms_low"], line["latency_ms_high"]) == (str(low), str(high))
    op = metrics["op"]
    assert op["share_of_matmul_rate"] == pytest.approx(op["op_gflop_per_s"] / op["matmul_gflop_per_s"])
    # 2 FLOPs per MAC, two directions, 40 tokens in chunks of 16, 16 and 8, head 64
    flops = 2 * 2 * (3 * 40 * 64**2 + 2 * (16**2 + 16**2 + 8**2) * 64)
    assert op["op_gflop_per_s"] == pytest.approx(flops / 1e9 / (op["op_ms"] / 1e3))
    assert op["matmul_gflop_per_s"] == pytest.approx(2 * 64**3 / 1e9 / (op["matmul_ms"] / 1e3))
    # fp32: q, k, v (40 tokens, one head of 64), lr, 16 factors, W0 and three vectors, and one state
    assert op["kept_kernel_mib"] == pytest.approx(4 * (3 * 40 * 64 + 40 + 16 + 64**2 + 3 * 64 + 64**2 + 64) / 2**20)
    assert op["kept_reference_mib"] > 4 * 3 * 64**2 / 2**20  # the equations keep a state for each of three chunks
    assert op["memory_reference_over_kernel"] == pytest.approx(op["kept_reference_mib"] / op["kept_kernel_mib"])
    # nothing was measured at 1280, and nothing is claimed there
    for name in ("speedup_at_1280", "memory_saved_at_1280_percent"):
        assert metrics[name]["T"]["vs_deit_fused"] is None and "1280" in metrics[name]["T"]["vs_deit_fused_reason"]
