"""The records of complexity and efficiency on small params: what they hold, and how they refuse."""

import csv
import json

import pytest

from repro.bench.complexity import run_complexity
from repro.bench.efficiency import run_grid
from repro.bench.params import ComplexityParams, EfficiencyParams
from repro.bench.rows import read_rows
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


# what the terms of each kind add up to, and their unit
TOTALS = {"num_params": ("num_params", 1), "macs": ("macs_g", 1e-9)}
TOTALS |= {f"macs_{by}": (f"macs_g_{by}", 1e-9) for by in ("paper_convention", "fvcore")}


def test_complexity_counts_every_combination_by_each_convention(tmp_path):
    """By fvcore a LayerNorm counts 5 per value: 25 of them, of 197 tokens of width 192. Vittt's authors count as we do."""
    groups = [
        {"models": [NANO, "vmamba_nano_144"], "image_sizes": [144, 288]},
        {"models": [DEIT], "image_sizes": [224], "fvcore": True},
        {"models": [NANO], "image_sizes": [144], "vary": {"design": ["dual", "conv2d"], "chunk_size": [8, 0]}},
    ]
    adapters = {"backbones": [NANO, DEIT], "image_sizes": [{"height": 64, "width": 96}]}
    count(tmp_path, sizes={"T": {"model": NANO, "baseline": DEIT}}, groups=groups, adapters=adapters)
    metrics, table = read(tmp_path / "results" / "complexity")
    _, terms = read(tmp_path / "results" / "complexity", "terms.csv")
    rows, lines = metrics["rows"], {line["row"]: line for line in table}
    assert rows.keys() == lines.keys() and len(table) == 11
    assert metrics["dwconv_params_m"]["T"] == 4 * 9 * 64 / 1e6 and 0 < metrics["saved_at_1280_percent"]["T"] < 100
    assert rows[f"{NANO}[design=dual,chunk_size=0]@144"]["options"] == {"design": "dual", "chunk_size": 0}
    names = f"{NANO}@144", f"{DEIT}@224", "vmamba_nano_144@144", f"vit_adapter[backbone={DEIT}]@64x96"
    vittt, deit, vmamba, adapted = (rows[name] for name in names)
    assert deit["num_params"] == 5_717_416
    assert (adapted["num_params"], adapted["options"]) == (7_966_640, {"backbone": DEIT})
    assert (adapted["image_size"], lines[names[-1]]["image_size"]) == ([64, 96], "64x96")
    assert round((deit["macs_g_fvcore"] - deit["macs_g"]) * 1e9) == 25 * 197 * 192 * 5
    assert all(row["macs_g_paper_convention"] > row["macs_g"] for row in (vmamba, adapted))
    for key, own in (("macs_g_fvcore", [deit]), ("macs_g_paper_convention", [vmamba, adapted])):
        assert [row for row in (vittt, deit, vmamba, adapted) if key in row] == own
        assert [lines[name][key] for name in names] == [str(rows[name].get(key, "")) for name in names]
    kinds = {(term["row"], term["kind"]) for term in terms}
    assert kinds >= {(names[1], kind) for kind in ("num_params", "macs", "macs_fvcore")}
    assert kinds >= {(name, "macs_paper_convention") for name in names[2:]}
    for name, kind in kinds:
        values = {term["term"]: int(term["value"]) for term in terms if (term["row"], term["kind"]) == (name, kind)}
        key, unit = TOTALS[kind]
        assert sum(values.values()) == round(rows[name][key] / unit)
        assert (name, kind) != (names[2], "macs_paper_convention") or {"scan", "layer_norm", "pooling"} < values.keys()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"groups": [{"image_sizes": [144], "models": ["vittt_gigantic"]}]}, "complexity: vittt_gigantic@144: "),
        ({"groups": [{"image_sizes": [64], "models": [NANO], "vary": {"designs": [1]}}]}, r"complexity: \S+=1\]@64: "),
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
def test_the_grid_measures_both_kinds_of_attention_once_each(tmp_path):
    sizes = {"T": {"model": NANO, "baseline": DEIT}}
    params = build(EfficiencyParams, {"sizes": sizes, "image_sizes": [32], "budget_s": 600.0}, "efficiency")
    for _ in range(2):  # always anew
        run_grid(params, Paths(tmp_path), Runtime(device="cpu", data_roots={}))
        found = read_rows(tmp_path / "results/efficiency/rows.csv")
        measured = {(row["model"], row["attention"], row["run"]) for row in found}
        assert measured == {(NANO, None, 1), (DEIT, "unfused", 1), (DEIT, "fused", 1)} and len(found) == 3
    assert all(row["status"] == "ok" and row["device"].startswith("cpu: ") and row["threads"] >= 1 for row in found)
    assert (tmp_path / "results/efficiency/run.json").is_file()
