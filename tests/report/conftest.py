"""A checkout with real records: what the stages write, by the same writer, with numbers chosen by the tests."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from repro.core.freshness import hash_number
from repro.core.paths import Paths
from repro.core.record import write_record
from repro.papers import load_primary
from repro.report.claims import Report, judge_paper
from repro.report.ledger import Ledger
from repro.report.markdown import render_markdown
from repro.report.pages import build_document, build_runs
from repro.report.paper import Paper
from repro.report.results import Results
from repro.report.verdicts import Verdict

TOP = {"top1_percent": "top1", "top5_percent": "top5"}
# stages of the graph -> their scores, as the table of stages has them
SCORES: dict[str, dict[str, str]] = {
    "complexity": {},
    "readings": {},
    "resolution": {},
    "theory": {},
    "pretrain": TOP,
    "detect": {"ap_box_percent": "box AP", "ap50_box_percent": "AP50", "ap_mask_percent": "mask AP"},
    "segment": {"miou_percent": "mIoU", "aacc_percent": "pixels"},
    "ablate": TOP,
    "efficiency": {},
    "visualize": {},
}
VERBS = (*SCORES, "evaluate", "profile", "data", "kernels")
JUDGE = partial(judge_paper, speed_dtype="fp16", verbs=VERBS, profile="mini")


def theorems(**changes: float) -> dict:
    """The errors that `repro theory` measures, as they are where every theorem holds and A.2 is misprinted."""
    exact = ("a2_corrected", "c1_linear_attention", "c2_delta_rule", "c2_adapted_value_view")
    return {**dict.fromkeys(exact, 1e-15), "a2_printed_largest": 3.9, **changes}


def visualized() -> dict:
    """A record of `repro visualize` whose every number speaks for the paper."""

    def field(ahead: float, anisotropy: float = 0.1) -> dict:
        about = {"image_size": 144, "weights": "results/pretrain/v/weights.safetensors"}
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
        stage = path.split("/")[0]
        code, code_hash = [f"stages.{stage}"], hash_number(self.paths.root, [f"stages.{stage}"], device)
        identity = {"code_hash": "c0de", "code_modules": code, "number_hash": code_hash, "params_hash": "9a4a"}
        identity |= {"command": f"repro {stage}", "machine": {"vector": "AVX2"}, "parent_commit": "0123456789abcdef"}
        identity |= {"device": device, "dtype": dtype, "backend": "torch", "data_manifest_hash": None}
        identity |= {"versions": {"python": "3.12.1", "torch": "2.14.1"}}
        identity |= {"recipe": {"precision": {"dtype": dtype, "device": device}}}
        write_record(self.paths.results / path, metrics, identity, seconds=1.0, name=name)

    def count(self, saved: dict | None = None, dwconv: dict | None = None, **rows: tuple) -> None:
        """complexity rows: `name=(model, options, image size, num_params, macs_g)`; percents saved at 1280, M of the
        3×3 convolutions.
        """
        written = {}
        for name, (model, options, size, num_params, macs_g) in rows.items():
            about = {"model": model, "options": options, "image_size": [size, size], "method": "analytic"}
            counted = {"num_params": num_params, "params_m": round(num_params / 1e6, 3), "macs_g": macs_g}
            written[name] = about | counted
        metrics = {"rows": written, "saved_at_1280_percent": saved or {}, "dwconv_params_m": dwconv or {}}
        self.record("complexity", metrics)

    def train(
        self,
        path: str,
        model: str,
        kind: str,
        *,
        held_out_images: int,
        top1: float | tuple[float, ...] = (),
        **more: Any,
    ) -> None:
        """The record of a training cell, with one seed for each of `top1`; `more` overrides and adds."""
        values = top1 if isinstance(top1, tuple) else (top1,)
        runs = [
            {"seed": seed, "top1_percent": value, "top1_previous_percent": value - 0.1}
            for seed, value in enumerate(values)
        ]
        scores = {"top1_percent": sum(values) / len(values), "top5_percent": 99.0} if values else {}
        usual = {"model": model, "options": {}, "data": kind, "kind": kind, "classes": 10, "image_size": 224}
        usual |= {"init": None, "init_reason": "random weights", "epochs": 300, "num_params": 7, "recipe_hash": "r"}
        usual |= {"seeds": list(range(len(runs) or 1)), "by_seed": runs or [{"seed": 0}], **scores}
        usual |= {"split": "val", "held_out_images": held_out_images}
        self.record(path, {**usual, **more})

    def speed(self, *rows: dict, device: str, path: str = "efficiency", **more: object) -> None:
        """Efficiency rows; each may override the defaults of a good 1280×1280 row."""
        usual = {"options": {}, "attention": None, "attention_reason": "no softmax attention", "num_params": 7}
        usual |= {"image_size": [1280, 1280], "batch_size": 64, "dtype": "fp16", "mode": "infer", "macs_g": 1.0}
        usual |= {"device": device, "backend": "triton", "status": "ok", "samples_ms": [], "peak_memory_mib": 1000.0}
        usual |= {"latency_ms": 10.0, "latency_ms_ci95": [9.0, 11.0], "throughput_img_per_s": 100.0}
        metrics = {"rows": [{**usual, **row} for row in rows], "op": {"share_of_matmul_rate": 0.25}, **more}
        self.record(path, metrics, device)

    def results(self) -> Results:
        return Results(self.paths, [self.paper], SCORES)

    def report(self, speed_dtype: str = "fp16") -> Report:
        return JUDGE(self.paper, self.results(), speed_dtype=speed_dtype)

    def judge(self, speed_dtype: str = "fp16") -> dict[str, Verdict]:
        return dict(self.report(speed_dtype).verdicts)

    def report_on(self, ledger: str, **more: Any) -> Report:
        """What the records say of a made-up paper; `more` are fields of its `Paper`."""
        file = self.write(
            "made_up/ledger.yaml", f"paper: {{title: t, version: v, speed_device: L40S, speed_batch: 64}}\n{ledger}"
        )
        paper = Paper(id="made_up", name="Made-up", model="Made-up", ledger_file=file, **more)
        results = Results(self.paths, [paper], SCORES)
        return JUDGE(paper, results)

    def page(self) -> str:
        """tables.md."""
        return render_markdown(build_document(self.report()))

    def runs(self) -> str:
        """The page of the runs on other data."""
        return render_markdown(build_runs(self.report()))

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
