"""`repro export`: a trained classifier as a file that other programs load: timm's folder layout, ONNX, or torch.export."""

import contextlib
import hashlib
import importlib.util
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from repro.core.errors import RunError, UserError
from repro.core.record import atomic, read_json, write_json

from . import Stage

Format = Literal["safetensors", "onnx", "torch_export"]
SUFFIXES: dict[Format, str] = {"safetensors": "", "onnx": ".onnx", "torch_export": ".pt2"}
# largest difference of a logit from the eager model's, as a share of the largest logit; the same code on the same weights gives 0
TOLERANCES: dict[Format, float] = {"safetensors": 0.0, "onnx": 1e-4, "torch_export": 1e-4}
NEEDS_EXTRA = ("onnx", "onnxscript", "onnxruntime")
METADATA = "vision_ttt_repro"  # the key of a weights file's metadata, and of what other formats carry
BATCHES = 1, 3  # that are compared; the graph is traced with another

STAGE = Stage(purpose="use")


def command(
    weights: Annotated[Path, typer.Option(help="A .safetensors file of a classifier of this project; it names its model.")],
    format: Annotated[Format, typer.Option(help="safetensors: a folder as timm and the Hugging Face hub have it.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File or folder to make; by default <model>_<size>, here.")] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Side in pixels that the file is for, where it is not the one of the training.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Read the file back with its own runtime and compare the logits.")] = True,
) -> None:
    """Write a trained classifier for timm, ONNX runtimes, or torch.export."""
    run(weights, format, output, image_size, verify)


def run(weights: Path, format: Format, output: Path | None, image_size: int | None, verify: bool) -> None:
    """Write one file (for safetensors a folder with model.safetensors and config.json), whole or not at all.

    ONNX and torch.export take images (B, 3, S, S) for any B and one S, normalised as the metadata say, and give logits (B, classes).
    Both are the model's fp32 graph in plain operations: they need none of this project's code.

    Raises:
        UserError: weights that are no classifier's, an output that exists, a size that the model cannot take, a missing package.
        RunError: a graph that the exporter refuses, or one whose logits differ.
    """
    missing = [name for name in NEEDS_EXTRA if format == "onnx" and importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"export: --format onnx needs {', '.join(missing)}: python -m pip install -e '.[export]'")
    if image_size and format == "safetensors":
        raise UserError("export: --image-size is for onnx and torch_export; weights alone are for no size")
    from repro.models.weights import build_from_weights

    try:
        model, metadata = build_from_weights(weights)
    except ValueError as error:  # a name that is not registered
        raise UserError(f"{weights}: {error}") from None
    size = image_size or metadata["preprocessing"]["input_size"][-1]
    path = output or Path(f"{metadata['model']}{f'_{size}' if SUFFIXES[format] else ''}{SUFFIXES[format]}")
    if path.exists():
        raise UserError(f"{path}: is there already; remove it, or name another with -o")
    logits = _resize(model, size, metadata)
    facts = metadata | _origin(weights)
    facts["preprocessing"] = metadata["preprocessing"] | {"input_size": [3, size, size]}
    write = {"safetensors": _write_timm, "onnx": _write_onnx, "torch_export": _write_torch_export}[format]
    with (_new_folder if format == "safetensors" else atomic)(path) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters, about their own code
        again = write(model, size, facts, temporary)
        checked = f"; {_compare(logits, again(), size, format, path)}" if verify else ""
    print(f"{path}: {metadata['model']}, {len(metadata['classes'])} classes{checked}")


def _resize(model: Any, size: int, metadata: dict) -> Callable[[Any], Any]:
    """Make a model of one image size one of another, and try it. The logits of a batch, without gradients."""
    import torch

    def logits(images: Any) -> Any:
        with torch.no_grad():
            return model(images)

    try:
        if size != metadata["preprocessing"]["input_size"][-1] and hasattr(model, "set_input_size"):  # of timm's
            model.set_input_size(img_size=(size, size))
        logits(torch.zeros(1, 3, size, size))
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UserError(f"--image-size {size}: {metadata['model']} does not take it: {str(error).splitlines()[0]}") from None
    return logits


def _origin(weights: Path) -> dict[str, Any]:
    """Hash of the weights; the commit and the hash of the params that made them, where the record beside them is theirs."""
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:16]
    record = weights.with_name("metrics.json")
    record = read_json(record) if record.is_file() else {"metrics": {}}
    if record["metrics"].get("weights") != digest:
        return {"weights": digest, "commit": None, "params": None, "reason": "no record of these weights lay beside them"}
    return {"weights": digest, "commit": record["identity"]["parent_commit"], "params": record["identity"]["params"]}


@contextlib.contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """As `atomic`, for a folder that is not there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as around:
        folder = Path(around) / "folder"
        folder.mkdir()
        yield folder
        os.rename(folder, path)


def _write_timm(model: Any, size: int, facts: dict, folder: Path) -> Callable[[], Any]:
    """What `timm.create_model("local-dir:...", pretrained=True)` reads, and a weights file of this project at once."""
    import timm

    from repro.models.weights import save_weights

    own = {key: facts[key] for key in ("options", "preprocessing", "classes")}
    save_weights(folder / "model.safetensors", model, name=facts["model"], **own)
    num_classes = len(facts["classes"])
    layers = {key: model.pretrained_cfg[key] for key in ("first_conv", "classifier", "fixed_input_size") if key in model.pretrained_cfg}
    config = {
        "architecture": facts["model"],
        "model_args": {key: value for key, value in facts["options"].items() if key != "num_classes"},
        "num_classes": num_classes,
        "num_features": model.num_features,
        "label_names": facts["classes"],
        "pretrained_cfg": facts["preprocessing"] | layers | {"num_classes": num_classes},
        METADATA: {key: facts[key] for key in ("weights", "commit", "params", "reason") if key in facts},
    }
    write_json(folder / "config.json", config)
    return lambda: timm.create_model(f"local-dir:{folder.absolute()}", pretrained=True).eval()


def _trace(model: Any, size: int, facts: dict) -> Any:
    """The model's graph for any number of images, this project's operators in it written as plain ones."""
    import torch

    from kernels.decompositions import DECOMPOSITIONS

    images = {0: torch.export.Dim("batch")}
    with torch.no_grad(), _exporting(facts):
        # strict: the other mode takes len() of a tensor for a constant
        program = torch.export.export(model, (torch.zeros(2, 3, size, size),), dynamic_shapes=(images,), strict=True)
        return program.run_decompositions(DECOMPOSITIONS)


@contextlib.contextmanager
def _exporting(facts: dict) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a model outside this project's families may hit in there
        raise RunError(f"export: {facts['model']} has no such graph: {type(error).__name__}: {str(error).splitlines()[0]}") from error


def _write_torch_export(model: Any, size: int, facts: dict, file: Path) -> Callable[[], Any]:
    import torch

    with open(file, "wb") as stream:  # by name, it would insist on one that ends in .pt2
        torch.export.save(_trace(model, size, facts), stream, extra_files={f"{METADATA}.json": json.dumps(facts, sort_keys=True)})
    return lambda: torch.export.load(file.open("rb")).module()


def _write_onnx(model: Any, size: int, facts: dict, file: Path) -> Callable[[], Any]:
    import logging

    import torch

    program = _trace(model, size, facts)
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    with _exporting(facts):
        onnx = torch.onnx.export(program, dynamo=True, input_names=["images"], output_names=["logits"], verbose=False)
    onnx.model.metadata_props[METADATA] = json.dumps(facts, sort_keys=True)
    onnx.save(file)

    def load() -> Callable[[Any], Any]:
        import onnxruntime

        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])

    return load


def _compare(logits: Callable, again: Callable, size: int, format: Format, path: Path) -> str:
    """The largest difference over batches of several lengths, in words; a RunError beyond the tolerance."""
    import torch

    images = torch.randn(max(BATCHES), 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pairs = [(logits(images[:count]), again(images[:count])) for count in BATCHES]
    difference = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    allowed = TOLERANCES[format] * max(float(ours.abs().max()) for ours, _ in pairs)
    found = f"read back, logits differ by at most {difference:.1e} (allowed: {allowed:.1e})"
    if not difference <= allowed:  # NaN, too
        raise RunError(f"{path}: not written: {found}")
    return found
