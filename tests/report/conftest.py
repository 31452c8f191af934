"""A checkout with real records: what the stages write, by the same writer, with numbers chosen by the tests."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from repro.bench.rows import write_rows
from repro.core.paths import Paths
from repro.core.record import read_json, write_json, write_record, write_run
from repro.papers import load_papers
from repro.papers.vision_ttt.paper import PAPER as VISION_TTT
from repro.report.claims import Report, judge_paper
from repro.report.ledger import Ledger
from repro.report.markdown import place_on_page
from repro.report.pages import build_document, build_runs
from repro.report.paper import Paper
from repro.report.results import Results
from repro.report.verdicts import Verdict
from stages.report import load_scores, report_on_papers
from tests.conftest import ROOT

SCORES = load_scores()
JUDGE = judge_paper


def visualized() -> dict:
    """A record of `repro visualize` whose every number speaks for the paper."""

    def field(ahead: float, anisotropy: float = 0.1) -> dict:
        about = {"image_size": 144, "weights": "artifacts/pretrain/v/weights.safetensors"}
        return {"share_ahead": ahead, "anisotropy": anisotropy, "radius_90_px": 40.0, **about}

    gradients = {
        name: {"top30_share_percent": share, "ink": {"later_top30_percent": on_ink, "later_percent": 28.0}}
        for name, share, on_ink in (("before", 35.0, 30.0), ("after", 60.0, 70.0))
    }
    losses = {"epoch_0": ([1.0, 3.0], 0.9), "epoch_3": ([4.0, 8.0], 0.5), "epoch_12": ([2.0, 4.0], 0.25)}
    shares = {"Vanilla TTT": (0,), "+ Dual": (0.5, 0.2), "+ Conv2d": (0.5, 0.05), "DeiT": (0.5,), "Vim": (0.5,)}
    return {
        "model": "vittt_nano_patch16_144",
        "data": "digits",
        "held_out_images": 8,
        "gradient_magnitude": gradients,
        "receptive_fields": {name: field(*share) for name, share in shares.items()},
        "reconstruction_loss": {
            epoch: {"mean_by_layer": means, "smallest": least} for epoch, (means, least) in losses.items()
        },
    }


@pytest.fixture(scope="session")
def paper() -> Paper:
    return VISION_TTT


@pytest.fixture(scope="session")
def ledger(paper) -> Ledger:
    return paper.ledger


@pytest.fixture(scope="session")
def committed() -> list[Report]:
    """What the records of this repository come to, for every paper."""
    paths, papers = Paths(ROOT), list(load_papers().values())
    results = Results(paths, papers, SCORES)
    return [JUDGE(paper, results) for paper in papers]


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

    def record(
        self, path: str, metrics: dict, device: str = CPU, dtype: str = "fp32", curve: list[str] | None = None
    ) -> None:
        """Write results/<path>/metrics.json or, below replications/, results/<path>.json; and its run.json."""
        stage = path.split("/")[0]
        identity = {"params_hash": "9a4a"}
        identity |= {"command": f"repro {stage}", "machine": {"vector": "AVX2"}, "parent_commit": "0123456789abcdef"}
        identity |= {"device": device, "dtype": dtype, "backend": "torch", "data_manifest_hash": None}
        identity |= {"versions": {"python": "3.12.1", "torch": "2.14.1"}}
        identity |= {"recipe": {"precision": {"dtype": dtype, "device": device}}}
        is_own = path.startswith("replications/")
        file = self.paths.results / (f"{path}.json" if is_own else f"{path}/metrics.json")
        write_record(file, metrics, identity, seconds=1.0, curve=curve)

    def count(self, saved: dict | None = None, dwconv: dict | None = None, **rows: tuple) -> None:
        """complexity rows: `name=(model, options, size, num_params, macs_g)`; % saved at 1280, M of 3×3 convolutions."""
        written = {}
        for name, (model, options, size, num_params, macs_g) in rows.items():
            about = {"model": model, "options": options, "image_size": [size, size], "method": "analytic"}
            counted = {"num_params": num_params, "params_m": round(num_params / 1e6, 3), "macs_g": macs_g}
            written[name] = about | counted
        metrics = {"rows": written, "saved_at_1280_percent": saved or {}, "dwconv_params_m": dwconv or {}}
        self.record("complexity", metrics)

    def train(
        self, path: str, model: str, kind: str, *, top1: float | tuple = (), curve: list[str] | None = None, **more: Any
    ) -> None:
        """The record of a training cell, with one seed for each of `top1`; `more` overrides and adds."""
        values = top1 if isinstance(top1, tuple) else (top1,)
        runs = [
            {"seed": n, "top1_percent": value, "top1_previous_percent": value - 0.1} for n, value in enumerate(values)
        ]
        scores = {"top1_percent": sum(values) / len(values), "top5_percent": 99.0} if values else {}
        usual = {"model": model, "options": {}, "data": kind, "kind": kind, "classes": 10, "image_size": 224}
        usual |= {"init": None, "init_reason": "random weights", "epochs": 300, "num_params": 7, "recipe_hash": "r"}
        usual |= {"steps": 100, "batch_size": 64, "weights_hash": path}
        usual |= {"seeds": list(range(len(runs) or 1)), "by_seed": runs or [{"seed": 0}], "split": "val", **scores}
        self.record(path, {**usual, **more}, curve=curve)

    def speed(self, *rows: dict, device: str, path: str = "efficiency") -> None:
        """Rows of speed; each may override the defaults of a good 1280×1280 row. `path`: the stage, or a name in speed/.

        `ends`: the latencies of the fastest and of the slowest of three processes, as shares of the median; None is one
        process. The latency follows from the throughput where it is not given.
        """
        usual = {"options": {}, "attention": None, "num_params": 7, "attention_kernel": "flash", "compile": False}
        usual |= {"image_size": [1280, 1280], "batch_size": 64, "dtype": "fp16", "mode": "infer", "macs_g": 1.0}
        usual |= {"device": device, "backend": "triton", "status": "ok", "peak_memory_mib": 1000.0}
        usual |= {"commit": "0123456789ab", "torch_version": "2.14.1", "ends": (0.9, 1.1)}
        written = []
        for row in ({**usual, **each} for each in rows):
            ends, times = row.pop("ends"), 1e3 * row["batch_size"]
            latency = row.get("latency_ms", times / (row.get("throughput_img_per_s") or 100.0))
            for number, factor in enumerate((1.0, *(ends or ())), 1):
                measured = None if row["status"] != "ok" else latency * factor
                speed = {"latency_ms": measured, "throughput_img_per_s": measured and times / measured}
                written.append({**row, **speed, "run": number})
        folder = self.paths.results
        write_rows(folder / ("efficiency/rows.csv" if path == "efficiency" else f"speed/{path}.csv"), written)
        if path == "efficiency":
            write_run(folder / "efficiency/rows.csv", 1.0)

    def results(self) -> Results:
        return Results(self.paths, [self.paper], SCORES)

    def report(self) -> Report:
        return JUDGE(self.paper, self.results())

    def judge(self) -> dict[str, Verdict]:
        return dict(self.report().verdicts)

    def report_on(self, ledger: str, **more: Any) -> Report:
        """What the records say of a made-up paper; `more` are fields of its `Paper`."""
        about = "paper: {title: t, version: v, speed_device: L40S, speed_batch: 64}\n"
        file = self.write("made_up/ledger.yaml", about + ledger)
        paper = Paper(id="made_up", name="Made-up", model="Made-up", ledger_file=file, **more)
        return JUDGE(paper, Results(self.paths, [paper], SCORES))

    def page(self) -> str:
        """tables.md."""
        return place_on_page(build_document(self.report()), self.paper.page)

    def runs(self) -> str:
        """The page of the runs on other data."""
        return place_on_page(build_runs(self.report()), self.paper.runs_page)

    def write(self, path: str, text: str) -> Path:
        file = self.paths.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def read(self, path: str) -> str:
        return (self.paths.root / path).read_text(encoding="utf-8")

    def json(self, path: str):
        return json.loads(self.read(path))

    @contextlib.contextmanager
    def edit(self, path: str) -> Iterator[dict]:
        """A record under results/, which is written as it is left."""
        file = self.paths.results / path
        yield (content := read_json(file))
        write_json(file, content)

    def run_stage(self, **options: bool) -> None:
        """`repro report`."""
        report_on_papers(self.paths, **options)


@pytest.fixture
def checkout(tmp_path: Path, paper: Paper) -> Checkout:
    made = Checkout(Paths(tmp_path), paper)
    for name in ("params.yaml", "profiles/mini.yaml"):
        made.write(name, "runtime: {device: cpu}\n")
    made.write("dvc.yaml", "stages: {}\n")
    return made
