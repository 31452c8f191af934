"""A trained classifier as a file that other programs load: timm's folder layout, ONNX, or torch.export."""

import contextlib
import importlib.util
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from torch import Tensor, nn

from kernels.decompositions import DECOMPOSITIONS

from ..core.errors import RunError, UserError
from ..core.record import atomic, read_record, write_json
from ..models.checkpoints import Checkpoint, open_weights
from ..models.weights import METADATA_KEY, read_metadata, save_weights

Format = Literal["safetensors", "onnx", "torch_export"]
Classify = Callable[[Tensor], Tensor]  # images (B, 3, S, S) -> logits (B, classes)
SUFFIXES: dict[Format, str] = {"safetensors": "", "onnx": ".onnx", "torch_export": ".pt2"}
# largest difference of a logit from the eager model's, as a share of the largest logit; the same code on the same
# weights gives 0
TOLERANCES: dict[Format, float] = {"safetensors": 0.0, "onnx": 1e-4, "torch_export": 1e-4}
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
COMPARED_BATCHES = 1, 3  # the graph is traced with another one


def export(weights: Path, format: Format, output: Path | None, image_size: int | None, verify: bool) -> None:
    """Write one file (for `safetensors` a folder with model.safetensors and config.json), whole or not at all.

    ONNX and torch.export take images (B, 3, S, S) for any B and one S, normalised as the metadata say, and return
    logits (B, classes). Both hold the model's fp32 graph in plain operations, which need no code of this project.

    Args:
        weights: a file of a classifier of this project.
        output: by default <model>_<size> in the working directory.
        image_size: side S in pixels, by default that of the training.
        verify: read the file back with its own runtime and compare the logits.

    Raises:
        UserError: weights that are not a classifier's, an output that exists, a size that the model does not take, a
            missing package.
        RunError: a graph that the exporter refuses, or whose logits differ.
    """
    missing = [name for name in ONNX_PACKAGES if format == "onnx" and importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"export: --format onnx needs {', '.join(missing)}: python -m pip install -e '.[export]'")
    if image_size and format == "safetensors":
        raise UserError("export: --image-size is for onnx and torch_export; weights alone are for any size")
    read_metadata(weights)  # refuses files of other projects, which name neither model nor classes
    checkpoint = open_weights(weights).require_classifier()
    size = image_size or checkpoint.image_size
    path = output or Path(f"{checkpoint.model}{f'_{size}' if SUFFIXES[format] else ''}{SUFFIXES[format]}")
    if path.exists():
        raise UserError(f"{path}: already exists; remove it, or choose another name with -o")
    model = _build(checkpoint, size)
    facts = {"model": checkpoint.model, "options": dict(checkpoint.options), "classes": list(checkpoint.classes)}
    facts |= _find_origin(checkpoint) | {"preprocessing": {**checkpoint.preprocessing, "input_size": [3, size, size]}}
    write = {"safetensors": _write_timm, "onnx": _write_onnx, "torch_export": _write_torch_export}[format]
    with (_new_folder if format == "safetensors" else atomic)(path) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters warn about their own code
        load = write(model, size, facts, temporary)
        compared = f"; {_compare(model, load(), size, format, path)}" if verify else ""
    print(f"{path}: {checkpoint.model}, {checkpoint.num_classes} classes{compared}")


def _build(checkpoint: Checkpoint, size: int) -> nn.Module:
    """The classifier for images of this size, on which it was tried."""
    model = checkpoint.build(size)
    try:
        with torch.no_grad():
            model(torch.zeros(1, 3, size, size))
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UserError(
            f"--image-size {size}: {checkpoint.model} does not take it: {str(error).splitlines()[0]}"
        ) from None
    return model


def _find_origin(checkpoint: Checkpoint) -> dict[str, Any]:
    """The hash of the weights; and the commit and the hash of the params that made them, if their record lies beside
    them.
    """
    path = checkpoint.path.with_name("metrics.json")
    record = read_record(path) if path.is_file() else {"metrics": {}}
    if record["metrics"].get("weights_hash") != checkpoint.hash:
        origin = {"commit": None, "params_hash": None, "reason": "no record of these weights lay beside them"}
    else:
        origin = {"commit": record["identity"]["parent_commit"], "params_hash": record["identity"]["params_hash"]}
    return {"weights_hash": checkpoint.hash, **origin}


@contextlib.contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Like `atomic`, for a folder that does not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as around:
        folder = Path(around) / "folder"
        folder.mkdir()
        yield folder
        os.rename(folder, path)


def _write_timm(model: nn.Module, size: int, facts: dict[str, Any], folder: Path) -> Callable[[], Classify]:
    """Write what `timm.create_model("local-dir:...", pretrained=True)` reads; its weights are also a weights file of
    this project.
    """
    own = {key: facts[key] for key in ("options", "preprocessing", "classes")}
    save_weights(folder / "model.safetensors", model, name=facts["model"], **own)
    num_classes = len(facts["classes"])
    layers = {
        key: model.pretrained_cfg[key]
        for key in ("first_conv", "classifier", "fixed_input_size")
        if key in model.pretrained_cfg
    }
    config = {
        "architecture": facts["model"],
        "model_args": {key: value for key, value in facts["options"].items() if key != "num_classes"},
        "num_classes": num_classes,
        "num_features": model.num_features,
        "label_names": facts["classes"],
        "pretrained_cfg": facts["preprocessing"] | layers | {"num_classes": num_classes},
        METADATA_KEY: {key: facts[key] for key in ("weights_hash", "commit", "params_hash", "reason") if key in facts},
    }
    write_json(folder / "config.json", config)
    return lambda: timm.create_model(f"local-dir:{folder.absolute()}", pretrained=True).eval()


def _trace(model: nn.Module, size: int, facts: dict[str, Any]) -> torch.export.ExportedProgram:
    """The model's graph for any number of images, with this project's operators written as plain ones."""
    images = {0: torch.export.Dim("batch")}
    with torch.no_grad(), _one_line_errors(facts):
        # strict, because the other mode takes len() of a tensor for a constant
        program = torch.export.export(model, (torch.zeros(2, 3, size, size),), dynamic_shapes=(images,), strict=True)
        return program.run_decompositions(DECOMPOSITIONS)


@contextlib.contextmanager
def _one_line_errors(facts: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a model outside this project's families may hit in there
        raise RunError(
            f"export: {facts['model']} has no such graph: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


def _write_torch_export(model: nn.Module, size: int, facts: dict[str, Any], file: Path) -> Callable[[], Classify]:
    with open(file, "wb") as stream:  # given a name, it would insist on one that ends in .pt2
        torch.export.save(
            _trace(model, size, facts), stream, extra_files={f"{METADATA_KEY}.json": json.dumps(facts, sort_keys=True)}
        )
    return lambda: torch.export.load(file.open("rb")).module()


def _write_onnx(model: nn.Module, size: int, facts: dict[str, Any], file: Path) -> Callable[[], Classify]:
    import onnxscript.optimizer

    program = _trace(model, size, facts)
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    with _one_line_errors(facts):
        names = {"input_names": ["images"], "output_names": ["logits"]}
        # the exporter's own optimiser takes time with the square of the graph's length, and onnxruntime repeats its work
        onnx = torch.onnx.export(program, dynamo=True, **names, verbose=False, optimize=False)
        onnxscript.optimizer.fold_constants(onnx.model)
        onnxscript.optimizer.remove_unused_nodes(onnx.model)
    onnx.model.metadata_props[METADATA_KEY] = json.dumps(facts, sort_keys=True)
    onnx.save(file)

    def load() -> Classify:
        import onnxruntime

        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])

    return load


def _compare(model: Classify, loaded: Classify, size: int, format: Format, path: Path) -> str:
    """The largest difference of logits over batches of several lengths, in words.

    Raises:
        RunError: the difference is larger than the format's tolerance.
    """
    images = torch.randn(max(COMPARED_BATCHES), 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pairs = [(model(images[:count]), loaded(images[:count])) for count in COMPARED_BATCHES]
    difference = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    allowed = TOLERANCES[format] * max(float(ours.abs().max()) for ours, _ in pairs)
    found = f"read back, logits differ by at most {difference:.1e} (allowed: {allowed:.1e})"
    if not difference <= allowed:  # also for NaN
        raise RunError(f"{path}: not written: {found}")
    return found
