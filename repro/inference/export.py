"""Export of a trained classifier for other programs: timm's folder layout, ONNX, or torch.export."""

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
from timm.models import filter_pretrained_cfg
from torch import Tensor, nn

from kernels.decompositions import DECOMPOSITIONS

from ..core.errors import RunError, UserError
from ..core.record import atomic, write_json
from ..models.checkpoints import open_own
from ..models.weights import METADATA_KEY, save_weights

_Format = Literal["safetensors", "onnx", "torch_export"]  # the choices of `repro export --format`
_Classify = Callable[[Tensor], Tensor]  # images (B, 3, S, S) -> logits (B, classes)
SUFFIXES: dict[_Format, str] = {"safetensors": "", "onnx": ".onnx", "torch_export": ".pt2"}
# largest difference of a logit from the eager model's, as a share of the largest logit; `safetensors` is read back by
# the same code, and must be equal
TOLERANCES: dict[_Format, float] = {"safetensors": 0.0, "onnx": 1e-4, "torch_export": 1e-4}
CLASS_MAP = "class_map.txt"  # in the folder of `safetensors`: a class per line, in the order of the logits
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # of the extra `export`


def export(
    weights: Path, format: _Format, output: Path | None, image_size: int | None, verify: bool, any_size: bool = False
) -> None:
    """Write a classifier as one file (for `safetensors` a folder, see `_write_timm`), whole or not at all.

    ONNX and torch.export take images (B, 3, S, S) for any B and one S, or (B, 3, H, W) for any sides that the model
    takes, normalised as the metadata specify, and return logits (B, classes). Both hold the model's fp32 graph in
    standard operations, which need no code of this project.

    Args:
        weights: a file of a classifier of this project.
        output: by default, in the working directory, <model>; of a file <model>_<size>, or _any, and its suffix.
        image_size: side S in pixels, by default that of the training.
        verify: read the file back with its own runtime and compare the logits.
        any_size: export for all sides that are multiples of the model's stride.

    Raises:
        UserError: weights that are not a classifier's, an output that exists, a size that the model does not take, or a
            missing package.
        RunError: a graph that the exporter refuses, or whose logits differ.
    """
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if missing and format == "onnx":
        raise UserError(f"export: --format onnx needs {', '.join(missing)}: python -m pip install -e '.[export]'")
    if (image_size or any_size) and format == "safetensors":
        option = "--image-size" if image_size else "--any-size"
        raise UserError(f"export: {option} is for onnx and torch_export; weights alone are for any size")
    checkpoint = open_own(weights).require_classifier()
    size = image_size or checkpoint.image_size
    suffix = f"_{'any' if any_size else size}{SUFFIXES[format]}" if SUFFIXES[format] else ""
    path = output or Path(f"{checkpoint.model}{suffix}")
    if path.exists():
        raise UserError(f"{path}: already exists; remove it, or choose another name with -o")
    model = checkpoint.build(size)
    try:
        with torch.no_grad():
            model(torch.zeros(1, 3, size, size))
    except (ValueError, AssertionError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"--image-size {size}: {checkpoint.model} does not take it: {why}") from None
    # what the written file says about itself
    facts = {
        "model": checkpoint.model,
        "options": dict(checkpoint.options),
        "classes": list(checkpoint.classes),
        "preprocessing": {**checkpoint.preprocessing, "input_size": [3, size, size]},
        "weights_hash": checkpoint.hash,
    }
    if any_size:
        facts["sides_multiple_of"] = model.feature_info[-1]["reduction"]
    write = {"safetensors": _write_timm, "onnx": _write_onnx, "torch_export": _write_torch_export}[format]
    with (_new_folder if format == "safetensors" else atomic)(path) as temporary:
        with warnings.catch_warnings(action="ignore"):  # the exporters warn about their own code
            logging.getLogger("torch.export").setLevel(logging.CRITICAL)  # a failure is reported in one line
            load = write(model, facts, temporary)
        compared = f"; {_compare(model, load(), facts, TOLERANCES[format], path)}" if verify else ""
    print(f"{path}: {checkpoint.model}, {checkpoint.num_classes} classes{compared}")


@contextlib.contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` on success, as `atomic` does for a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as around:
        folder = Path(around) / "folder"
        folder.mkdir()
        yield folder
        os.rename(folder, path)


def _write_timm(model: nn.Module, facts: dict[str, Any], folder: Path) -> Callable[[], _Classify]:
    """Write the folder for `timm.create_model("local-dir:...", pretrained=True)`: config.json, weights, class map.

    Returns the function that reads the model back, as the other `_write_` functions do.
    """
    own = {key: facts[key] for key in ("options", "preprocessing", "classes")}
    save_weights(folder / "model.safetensors", model, name=facts["model"], **own)
    # in the format of timm's `push_to_hf_hub`; the tag belongs to these weights, not to the pretrained cfg of the model
    known = filter_pretrained_cfg(model.pretrained_cfg, remove_source=True)
    known |= {**facts["preprocessing"], "num_classes": len(facts["classes"]), "tag": facts["weights_hash"]}
    config = {
        "architecture": known.pop("architecture"),
        "model_args": {key: value for key, value in facts["options"].items() if key != "num_classes"},
        "num_classes": len(facts["classes"]),
        "num_features": model.num_features,
        "label_names": facts["classes"],
        "pretrained_cfg": known,
        METADATA_KEY: {"weights_hash": facts["weights_hash"]},
    }
    pooling = getattr(model, "global_pool", None)
    if isinstance(pooling, str):  # some of timm's models have a module of this name, or none
        config["global_pool"] = pooling
    write_json(folder / "config.json", config)
    # for timm's --class-map: timm's scripts sort class folders by the numbers in their names, and ours alphabetically
    (folder / CLASS_MAP).write_text("".join(f"{name}\n" for name in facts["classes"]), "utf-8", "surrogateescape")
    return lambda: timm.create_model(f"local-dir:{folder.absolute()}", pretrained=True).eval()


def _trace(model: nn.Module, facts: dict[str, Any]) -> torch.export.ExportedProgram:
    """Trace the model's graph for any number of images, with this project's operators decomposed into standard ones.

    With `sides_multiple_of` in the facts, it is for images of any sides that are multiples of that.
    """
    size, step = facts["preprocessing"]["input_size"][-1], facts.get("sides_multiple_of")
    free, height, width = {0: torch.export.Dim("batch")}, size, size
    if step:
        free |= {2: step * torch.export.Dim("rows"), 3: step * torch.export.Dim("columns")}
        # distinct sides: the tracer would identify a side with the model's own size, or with the other side, if they
        # were equal
        height, width = height + 2 * step, width + 3 * step
    with torch.no_grad(), _one_line_errors(facts, " for --any-size" if step else ""):
        # strict, because the other mode makes len() of a tensor a constant
        program = torch.export.export(model, (torch.zeros(2, 3, height, width),), dynamic_shapes=(free,), strict=True)
        program = program.run_decompositions(DECOMPOSITIONS)
        if step:
            program.module()(torch.zeros(1, 3, size, size))  # fails if the trace made a size constant
    return program


@contextlib.contextmanager
def _one_line_errors(facts: dict[str, Any], option: str = "") -> Iterator[None]:
    """Convert whatever an exporter raises to a RunError of one line, which names the model and the `option`."""
    try:
        yield
    except Exception as error:  # models outside this project's families may raise anything here
        raise RunError(
            f"export: {facts['model']} has no such graph{option}: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


def _write_torch_export(model: nn.Module, facts: dict[str, Any], file: Path) -> Callable[[], _Classify]:
    """Write the graph for torch.export.load, with the facts inside; return the function that reads it back."""
    extra = {f"{METADATA_KEY}.json": json.dumps(facts, sort_keys=True)}
    with open(file, "wb") as stream:  # for a path, torch.export.save requires the suffix .pt2
        torch.export.save(_trace(model, facts), stream, extra_files=extra)
    return lambda: torch.export.load(file.open("rb")).module()


def _write_onnx(model: nn.Module, facts: dict[str, Any], file: Path) -> Callable[[], _Classify]:
    """Write the graph as ONNX, with the facts in its metadata; return the function that reads it back."""
    import onnxscript.optimizer

    program = _trace(model, facts)
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    with _one_line_errors(facts):
        # the exporter's optimiser is quadratic in the length of the graph, and onnxruntime repeats most of its work
        onnx = torch.onnx.export(
            program, dynamo=True, input_names=["images"], output_names=["logits"], verbose=False, optimize=False
        )
        onnxscript.optimizer.fold_constants(onnx.model)
        onnxscript.optimizer.remove_unused_nodes(onnx.model)
    onnx.model.metadata_props[METADATA_KEY] = json.dumps(facts, sort_keys=True)
    onnx.save(file)

    def load() -> _Classify:
        """Open the file with onnxruntime on the CPU."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])

    return load


def _compare(model: _Classify, loaded: _Classify, facts: dict[str, Any], tolerance: float, path: Path) -> str:
    """Compare logits over batches of several lengths and sides, and describe their largest difference.

    Raises:
        RunError: it is more than `tolerance`, a share of the model's largest logit, or NaN.
    """
    size, step = facts["preprocessing"]["input_size"][-1], facts.get("sides_multiple_of")
    # batch sizes other than the 2 of the trace
    shapes = [(1, size, size), (3, size, size), *([(2, size + step, size + 4 * step)] if step else [])]
    generator, differences, largest = torch.Generator().manual_seed(0), [], 0.0
    with torch.no_grad():
        for count, height, width in shapes:
            images = torch.randn(count, 3, height, width, generator=generator)
            ours = model(images)
            differences.append((ours - loaded(images)).abs().max())
            largest = max(largest, float(ours.abs().max()))
    difference = float(torch.stack(differences).max())  # max propagates NaN
    found = f"read back, logits differ by at most {difference:.1e} (allowed: {tolerance * largest:.1e})"
    if not difference <= tolerance * largest:  # also for NaN
        raise RunError(f"{path}: not written: {found}")
    return found
