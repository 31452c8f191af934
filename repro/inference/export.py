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
from typing import Any, Literal, NamedTuple

import timm
import torch
from timm.models import filter_pretrained_cfg
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
CLASS_MAP = "class_map.txt"  # in the folder of `safetensors`: a class in each line, in the order of the logits
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
COMPARED_BATCHES = 1, 3  # the graph is traced with another one


class Sides(NamedTuple):
    """The images that a graph takes, in pixels: squares of `size`; with `step`, all sides that are multiples of it."""

    size: int
    step: int | None = None

    def list_shapes(self) -> list[tuple[int, ...]]:
        """Shapes (B, 3, H, W) on which a file is compared with its model."""
        squares = [(count, 3, self.size, self.size) for count in COMPARED_BATCHES]
        return squares if self.step is None else [*squares, (2, 3, self.size + self.step, self.size + 4 * self.step)]


def export(
    weights: Path, format: Format, output: Path | None, image_size: int | None, verify: bool, any_size: bool = False
) -> None:
    """Write one file (for `safetensors` a folder with model.safetensors, config.json and class_map.txt), whole or not at
    all.

    ONNX and torch.export take images (B, 3, S, S) for any B and one S, or (B, 3, H, W) for any sides that the model
    takes, normalised as the metadata say, and return logits (B, classes). Both hold the model's fp32 graph in plain
    operations, which need no code of this project.

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
    if format == "onnx":
        _require_onnx()
    if (image_size or any_size) and format == "safetensors":
        option = "--image-size" if image_size else "--any-size"
        raise UserError(f"export: {option} is for onnx and torch_export; weights alone are for any size")
    read_metadata(weights)  # refuses files of other projects, which name neither model nor classes
    checkpoint = open_weights(weights).require_classifier()
    size = image_size or checkpoint.image_size
    suffix = f"_{'any' if any_size else size}{SUFFIXES[format]}" if SUFFIXES[format] else ""
    path = output or Path(f"{checkpoint.model}{suffix}")
    if path.exists():
        raise UserError(f"{path}: already exists; remove it, or choose another name with -o")
    model = _build(checkpoint, size)
    facts = {"model": checkpoint.model, "options": dict(checkpoint.options), "classes": list(checkpoint.classes)}
    facts |= _find_origin(checkpoint) | {"preprocessing": {**checkpoint.preprocessing, "input_size": [3, size, size]}}
    sides = Sides(size, model.feature_info[-1]["reduction"] if any_size else None)
    if any_size:
        facts["sides_multiple_of"] = sides.step
    with (_new_folder if format == "safetensors" else atomic)(path) as temporary:
        load = _write(format, model, sides, facts, temporary)
        compared = f"; {_compare(model, load(), sides, format, path)}" if verify else ""
    print(f"{path}: {checkpoint.model}, {checkpoint.num_classes} classes{compared}")


def _require_onnx() -> None:
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"export: --format onnx needs {', '.join(missing)}: python -m pip install -e '.[export]'")


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
    """The weights' hash; and the commit and params hash that made them, if their record is in their folder."""
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


def _write(format: Format, model: nn.Module, sides: Sides, facts: dict[str, Any], path: Path) -> Callable[[], Classify]:
    """Write a format's file or fill its folder; returns what reads it back."""
    write = {"safetensors": _write_timm, "onnx": _write_onnx, "torch_export": _write_torch_export}[format]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters warn about their own code
        logging.getLogger("torch.export").setLevel(logging.CRITICAL)  # what fails is one line of ours
        return write(model, sides, facts, path)


def _write_timm(model: nn.Module, sides: Sides, facts: dict[str, Any], folder: Path) -> Callable[[], Classify]:
    """Write what `timm.create_model("local-dir:...", pretrained=True)` reads; its weights are also a file of ours."""
    own = {key: facts[key] for key in ("options", "preprocessing", "classes")}
    save_weights(folder / "model.safetensors", model, name=facts["model"], **own)
    num_classes = len(facts["classes"])
    # as timm's own `push_to_hf_hub` writes it; the tag is that of the weights, not of the model that was built for them
    known = filter_pretrained_cfg(model.pretrained_cfg, remove_source=True)
    known |= {**facts["preprocessing"], "num_classes": num_classes, "tag": facts["weights_hash"]}
    config = {
        "architecture": known.pop("architecture"),
        "model_args": {key: value for key, value in facts["options"].items() if key != "num_classes"},
        "num_classes": num_classes,
        "num_features": model.num_features,
        "global_pool": model.global_pool,
        "label_names": facts["classes"],
        "pretrained_cfg": known,
        METADATA_KEY: {key: facts[key] for key in ("weights_hash", "commit", "params_hash", "reason") if key in facts},
    }
    write_json(folder / "config.json", config)
    # for timm's --class-map: its scripts sort folders by the numbers in their names, where ours sorts by letters
    (folder / CLASS_MAP).write_text("".join(f"{name}\n" for name in facts["classes"]), "utf-8", "surrogateescape")
    return lambda: timm.create_model(f"local-dir:{folder.absolute()}", pretrained=True).eval()


def _trace(model: nn.Module, sides: Sides, facts: dict[str, Any]) -> torch.export.ExportedProgram:
    """The model's graph for any number of images, with this project's operators written as plain ones."""
    free, height, width = {0: torch.export.Dim("batch")}, sides.size, sides.size
    if step := sides.step:
        free |= {2: step * torch.export.Dim("rows"), 3: step * torch.export.Dim("columns")}
        # where a side equals the model's own, or the other, the tracer takes one for the other
        height, width = height + 2 * step, width + 3 * step
    with torch.no_grad(), _one_line_errors(facts, " for --any-size" if step else ""):
        # strict, because the other mode takes len() of a tensor for a constant
        program = torch.export.export(model, (torch.zeros(2, 3, height, width),), dynamic_shapes=(free,), strict=True)
        program = program.run_decompositions(DECOMPOSITIONS)
        if step:
            program.module()(torch.zeros(1, 3, sides.size, sides.size))  # its guards refuse what it took for a constant
    return program


@contextlib.contextmanager
def _one_line_errors(facts: dict[str, Any], option: str = "") -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a model outside this project's families may hit in there
        raise RunError(
            f"export: {facts['model']} has no such graph{option}: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


def _write_torch_export(model: nn.Module, sides: Sides, facts: dict[str, Any], file: Path) -> Callable[[], Classify]:
    with open(file, "wb") as stream:  # given a name, it would insist on one that ends in .pt2
        torch.export.save(
            _trace(model, sides, facts), stream, extra_files={f"{METADATA_KEY}.json": json.dumps(facts, sort_keys=True)}
        )
    return lambda: torch.export.load(file.open("rb")).module()


def _write_onnx(model: nn.Module, sides: Sides, facts: dict[str, Any], file: Path) -> Callable[[], Classify]:
    import onnxscript.optimizer

    program = _trace(model, sides, facts)
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

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])

    return load


def _compare(model: Classify, loaded: Classify, sides: Sides, format: Format, path: Path) -> str:
    """What `_find_difference` finds, in words.

    Raises:
        RunError: the difference is larger than the format's tolerance.
    """
    difference, largest = _find_difference(model, loaded, sides)
    allowed = TOLERANCES[format] * largest
    found = f"read back, logits differ by at most {difference:.1e} (allowed: {allowed:.1e})"
    if not difference <= allowed:  # also for NaN
        raise RunError(f"{path}: not written: {found}")
    return found


def _find_difference(model: Classify, loaded: Classify, sides: Sides) -> tuple[float, float]:
    """The largest difference of logits over batches of several lengths and sides, and the model's largest logit."""
    generator, pairs = torch.Generator().manual_seed(0), []
    with torch.no_grad():
        for shape in sides.list_shapes():
            images = torch.randn(shape, generator=generator)
            pairs.append((model(images), loaded(images)))
    # PyTorch's maximum is NaN where one is
    difference = torch.stack([(ours - theirs).abs().max() for ours, theirs in pairs]).max()
    return float(difference), max(float(ours.abs().max()) for ours, _ in pairs)
