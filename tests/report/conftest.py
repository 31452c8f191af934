"""A checkout with real records: what the stages write, by the same writer, with numbers chosen by the tests."""

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from repro.core.paths import Paths
from repro.core.record import write_record
from repro.papers import load_primary
from repro.report.claims import Report, judge_paper
from repro.report.ledger import Ledger
from repro.report.markdown import render_markdown
from repro.report.pages import build_document
from repro.report.paper import Paper
from repro.report.results import Results
from repro.report.verdicts import Verdict

TOP = {"top1_percent": "top1", "top5_percent": "top5"}
# stages of the graph -> their scores, as the table of stages has them
SCORES: dict[str, dict[str, str]] = {
    "complexity": {},
    "pretrain": TOP,
    "baselines": TOP,
    "detect": {"ap_box_percent": "box AP", "ap50_box_percent": "AP50", "ap_mask_percent": "mask AP"},
    "segment": {"miou_percent": "mIoU", "aacc_percent": "pixels"},
    "ablate": TOP,
    "efficiency": {},
    "visualize": {},
}
VERBS = ("complexity", "pretrain", "detect", "segment", "ablate", "efficiency", "visualize", "evaluate", "profile", "data", "kernels")


@pytest.fixture(scope="session")
def paper() -> Paper:
    return load_primary()


@pytest.fixture(scope="session")
def ledger(paper) -> Ledger:
    return paper.ledger


@dataclasses.dataclass
class Checkout:
    """A folder with params.yaml, one profile and results; `judge` reads it anew each time."""

    CPU: ClassVar = "cpu: some processor, 2 threads"
    L40S: ClassVar = "cuda: NVIDIA L40S"
    H200: ClassVar = "cuda: NVIDIA H200"

    paths: Paths
    paper: Paper

    @property
    def ledger(self) -> Ledger:
        return self.paper.ledger

    def record(self, path: str, metrics: dict, device: str = CPU, dtype: str = "fp32", name: str = "metrics") -> None:
        """Write results/<path>/<name>.json and its run.json."""
        identity = {
            "code_hash": "c0de",
            "command": f"repro {path.split('/')[0]}",
            "machine": {"vector": "AVX2"},
            "params_hash": "9a4a",
            "parent_commit": "0123456789abcdef",
            "device": device,
            "dtype": dtype,
            "backend": "torch",
            "data_manifest_hash": None,
            "versions": {"python": "3.12.1", "torch": "2.14.1"},
        }
        write_record(self.paths.results / path, metrics, identity, seconds=1.0, name=name)

    def count(self, **rows: tuple) -> None:
        """complexity rows: `name=(model, options, image size, num_params, macs_g)`."""
        written = {
            name: {
                "model": model,
                "options": options,
                "image_size": [size, size],
                "num_params": num_params,
                "params_m": round(num_params / 1e6, 3),
                "macs_g": macs_g,
                "method": "analytic",
            }
            for name, (model, options, size, num_params, macs_g) in rows.items()
        }
        self.record("complexity", {"rows": written, "saved_at_1280_percent": {}, "dwconv_params_m": {}})

    def train(self, path: str, model: str, kind: str, *, held_out_images: int, top1: float | tuple[float, ...] = (), **more: Any) -> None:
        """The record of a training cell, with one seed for each of `top1`; `more` overrides and adds."""
        values = top1 if isinstance(top1, tuple) else (top1,)
        runs = [{"seed": seed, "top1_percent": value, "top1_previous_percent": value - 0.1} for seed, value in enumerate(values)]
        scores = {"top1_percent": sum(values) / len(values), "top5_percent": 99.0} if values else {}
        usual = {
            "model": model,
            "options": {},
            "data": kind,
            "kind": kind,
            "init": None,
            "init_reason": "random weights",
            "seeds": list(range(len(runs) or 1)),
            "by_seed": runs or [{"seed": 0}],
            "epochs": 300,
            "image_size": 224,
            "classes": 10,
            "num_params": 7,
            "held_out_images": held_out_images,
            "recipe_hash": "r",
            **scores,
        }
        self.record(path, {**usual, **more})

    def speed(self, *rows: dict, device: str, path: str = "efficiency", **more: object) -> None:
        """Efficiency rows; each may override the defaults of a good 1280×1280 row."""
        usual = {
            "options": {},
            "attention": None,
            "attention_reason": "no softmax attention",
            "image_size": [1280, 1280],
            "batch_size": 64,
            "dtype": "fp16",
            "device": device,
            "backend": "triton",
            "mode": "infer",
            "num_params": 7,
            "macs_g": 1.0,
            "latency_ms": 10.0,
            "latency_ms_ci95": [9.0, 11.0],
            "throughput_img_per_s": 100.0,
            "peak_memory_mib": 1000.0,
            "status": "ok",
            "samples_ms": [],
        }
        self.record(path, {"rows": [{**usual, **row} for row in rows], "op": {"share_of_matmul_rate": 0.25}, **more}, device)

    def results(self) -> Results:
        return Results(self.paths, [self.paper], SCORES)

    def report(self, speed_dtype: str = "fp16") -> Report:
        return judge_paper(self.paper, self.results(), speed_dtype=speed_dtype, verbs=VERBS, profile="mini")

    def judge(self, speed_dtype: str = "fp16") -> dict[str, Verdict]:
        return dict(self.report(speed_dtype).verdicts)

    def page(self) -> str:
        """tables.md."""
        return render_markdown(build_document(self.report()))

    def write(self, path: str, text: str) -> Path:
        file = self.paths.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def json(self, path: str):
        return json.loads((self.paths.root / path).read_text(encoding="utf-8"))


@pytest.fixture
def checkout(tmp_path: Path, paper: Paper) -> Checkout:
    made = Checkout(Paths(tmp_path), paper)
    made.write("params.yaml", "report: {speed_dtype: fp16}\n")
    made.write("dvc.yaml", "stages: {}\n")
    made.write("profiles/mini.yaml", "report: {speed_dtype: fp16}\n")
    return made
