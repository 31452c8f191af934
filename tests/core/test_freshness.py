"""What an edit of a source makes old: by the kind of the number, on a copy of the project's own code."""

import shutil
from pathlib import Path

import pytest

from repro.core.freshness import FOLLOWED, OLDER_VERSION, OTHER_CODE, RENEWED, find_kind, find_old, hash_number
from tests.conftest import ROOT

MODULES = {
    "count": ("repro.models.vim", "repro.models.vittt", "stages.complexity"),
    "score": ("repro.models.vim", "repro.models.vittt", "stages.pretrain"),
    "speed": ("repro.bench.speed", "repro.models.vim", "repro.models.vittt", "stages.ablate"),
}
# kind -> modules and device
RECORDS = {kind: (modules, "cpu: some processor") for kind, modules in MODULES.items()}
RECORDS["speed on a GPU"] = MODULES["speed"], "cuda: NVIDIA H200"
RECORDS |= {"compiled": (["stages.kernels"], "none: compiled"), "interpreted": (["stages.kernels"], "cpu: interpreted")}
SPEEDS = {"speed", "speed on a GPU"}
KERNELS = {"compiled", "interpreted"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for name in ("repro", "kernels", "stages"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def hash_all(tree):
    return {kind: hash_number(tree, *record) for kind, record in RECORDS.items()}


@pytest.mark.parametrize(
    ("edited", "old"),
    [
        ("repro/core/ui.py", set()),
        ("repro/runs/pool.py", set()),
        ("repro/models/vrwkv.py", set()),
        ("kernels/bi_wkv/numba_path.py", {"interpreted"}),
        ("kernels/tools/bench.py", set()),
        ("repro/models/vim.py", {"count", "score"} | SPEEDS),
        ("repro/models/vittt_block.py", {"count", "score"} | SPEEDS),
        ("repro/models/fused_block.py", {"count"} | SPEEDS),
        ("kernels/selective_scan/reference.py", {"count", "score"} | SPEEDS | KERNELS),
        ("kernels/selective_scan/numba_path.py", {"speed", "interpreted"}),
        ("kernels/cpu_scan.py", {"speed", "interpreted"}),
        ("kernels/threads.py", SPEEDS | KERNELS),
        ("kernels/selective_scan/triton_fwd.py", {"speed on a GPU"} | KERNELS),
        ("kernels/triton_launch.py", {"speed on a GPU"} | KERNELS),
        ("repro/bench/speed.py", SPEEDS | KERNELS),
        ("repro/bench/flops.py", {"count"} | SPEEDS | KERNELS),
        ("repro/training/loop.py", {"score"}),
        ("repro/tasks/classification/task.py", {"score"}),
        ("repro/data/loader.py", {"score"}),
    ],
)
def test_an_edit_makes_old_what_depends_on_it(tree, edited, old):
    before, source = hash_all(tree), (tree / edited).read_text(encoding="utf-8")
    try:
        (tree / edited).write_text(f"{source}\nedited = 1\n", encoding="utf-8")
        after = hash_all(tree)
    finally:
        (tree / edited).write_text(source, encoding="utf-8")
    assert {kind for kind in RECORDS if before[kind] != after[kind]} == old


def test_the_kind_follows_from_the_modules():
    assert {kind: find_kind(modules) for kind, modules in MODULES.items()} == {kind: kind for kind in MODULES}
    # trainings of `repro readings` are scores, and its counts say so by the module that counts
    assert find_kind(["repro.models.vittt", "stages.readings"]) == "score"
    assert find_kind(["repro.papers.vision_ttt.readings", "stages.readings"]) == "count"
    assert find_kind(["repro.bench.forms", "repro.models.vittt"]) == find_kind(["stages.kernels"]) == "speed"


def test_old_records_and_why(tmp_path):
    (tmp_path / "repro/models").mkdir(parents=True)
    (tmp_path / "repro/models/a.py").write_text("x = 1\n")
    now = hash_number(tmp_path, ["repro.models.a"], "cpu: some processor")

    def record(number_hash, *weights, **identity):
        identity = {"code_hash": "c", "code_modules": ["repro.models.a"], "number_hash": number_hash, **identity}
        identity = {key: value for key, value in identity.items() if value is not None}
        return {"metrics": {"by_seed": [{"weights_hash": each} for each in weights]}, "identity": identity}

    begun = {
        "of w11": {"weights_hash": "w11", "number_hash": now, "follows": True},
        "of w12": {"weights_hash": "w12", "number_hash": "1", "follows": True},
        "of w13": {"weights_hash": "w13", "number_hash": now, "follows": False},
    }
    records = {
        "old": record("0", "w9"),
        "fresh": record(now, "w1", "w2"),
        "nameless": record(None),
        "no modules": record(now, code_modules=None),
        "machine": record(None, code_hash=None),
        "results/measured/a/ablate/x/metrics.json": record("0", "w7"),
        "results/measured/b/ablate/x/metrics.json": record(now, "w6"),
        "results/measured/a/ablate/y/metrics.json": record("0", "w5"),
        # fewer seeds do not renew more
        "results/measured/a/ablate/z/metrics.json": record("0", "w3", "w4"),
        "results/measured/b/ablate/z/metrics.json": record(now, "w10"),
        "begun alike": record("0", "w11"),
        "begun alike by other code": record("0", "w12"),
        "begun otherwise": record("0", "w13"),
        "begun": {"metrics": {"first_epochs": begun}, "identity": {}},
    }
    assert find_old(tmp_path, records) == {
        "old": OTHER_CODE,
        "nameless": OLDER_VERSION,
        "no modules": OLDER_VERSION,
        "results/measured/a/ablate/x/metrics.json": RENEWED,
        "results/measured/a/ablate/y/metrics.json": OTHER_CODE,
        "results/measured/a/ablate/z/metrics.json": OTHER_CODE,
        "begun alike": FOLLOWED,
        "begun alike by other code": OTHER_CODE,
        "begun otherwise": OTHER_CODE,
    }
    (tmp_path / "repro/models/a.py").write_text("x = 2\n")
    assert find_old(tmp_path, records)["fresh"] == OTHER_CODE
