"""A checkout with real records: what the stages write, by the same writer, with numbers chosen by the tests."""

import dataclasses
import json
from pathlib import Path
from typing import ClassVar

import pytest

from repro.core.paths import Paths
from repro.core.record import write_record
from repro.report.claims import Verdict, judge
from repro.report.ledger import Ledger, load_ledger
from repro.report.sources import Results


@pytest.fixture(scope="session")
def ledger() -> Ledger:
    return load_ledger()


@dataclasses.dataclass
class Checkout:
    """A folder with params.yaml, one profile and results; `judge` reads it anew each time."""

    CPU: ClassVar = "cpu: some processor, 2 threads"
    L40S: ClassVar = "cuda: NVIDIA L40S"
    H200: ClassVar = "cuda: NVIDIA H200"

    paths: Paths
    ledger: Ledger

    def record(self, path: str, metrics: dict, device: str = CPU, dtype: str = "fp32") -> None:
        """Write results/<path>/{metrics.json, run.json}."""
        identity = {
            "code": "c0de",
            "params": "9a4a",
            "parent_commit": "0123456789abcdef",
            "device": device,
            "dtype": dtype,
            "backend": "torch",
            "data_manifest": None,
            "versions": {"python": "3.12.1", "torch": "2.14.1"},
        }
        write_record(self.paths.results / path, metrics, identity, seconds=1.0)

    def count(self, **rows: tuple) -> None:
        """complexity rows: `name=(model, options, side, params, macs_g)`."""
        written = {
            name: {
                "model": model,
                "options": options,
                "resolution": [side, side],
                "params": params,
                "params_m": round(params / 1e6, 3),
                "macs_g": macs_g,
                "method": "analytic",
            }
            for name, (model, options, side, params, macs_g) in rows.items()
        }
        self.record("complexity", {"rows": written, "saved_at_1280_percent": {}, "dwconv_params_m": {}})

    def train(
        self, cell: str, model: str, data: str, top1: float, *, val_images: int, epochs: int = 300, options: dict | None = None
    ) -> None:
        """A pretrain cell."""
        metrics = {
            "model": model,
            "options": options or {},
            "data": data,
            "top1_percent": top1,
            "top5_percent": 99.0,
            "val_images": val_images,
            "epochs": epochs,
            "params": 7,
        }
        self.record(f"pretrain/{cell}", metrics)

    def speed(self, *rows: dict, device: str, path: str = "efficiency", **more: object) -> None:
        """Efficiency rows; each may override the defaults of a good 1280×1280 row."""
        usual = {
            "options": {},
            "attention": None,
            "attention_reason": "no softmax attention",
            "resolution": [1280, 1280],
            "batch": 64,
            "dtype": "fp16",
            "device": device,
            "backend": "triton",
            "mode": "infer",
            "params": 7,
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
        return Results(self.paths, self.ledger.default_options, self.ledger.own_families)

    def judge(self, speed_dtype: str = "fp16") -> dict[str, Verdict]:
        return judge(self.ledger, self.results(), speed_dtype)

    def write(self, path: str, text: str) -> Path:
        file = self.paths.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def json(self, path: str):
        return json.loads((self.paths.root / path).read_text(encoding="utf-8"))


@pytest.fixture
def checkout(tmp_path: Path, ledger: Ledger) -> Checkout:
    made = Checkout(Paths(tmp_path), ledger)
    made.write("params.yaml", "report: {speed_dtype: fp16}\n")
    made.write("dvc.yaml", "stages: {}\n")
    made.write("profiles/mini.yaml", "report: {speed_dtype: fp16}\n")
    return made
