"""Sampling of pictures with a trained denoiser, and their scores."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from ..core.config import build
from ..core.errors import RunError, UserError, did_you_mean
from ..core.hashing import hash_file
from ..core.paths import Paths, find_root
from ..core.record import atomic, make_identity, write_json, write_record
from ..core.runtime import choose_device, device_label, device_slug, load_runtime
from ..core.ui import Progress
from ..data.cells import DataCell, manifest_path, open_cell
from ..data.kinds import list_wnids
from ..data.loader import EvalLoader
from ..models.registry import build_denoiser
from ..models.weights import load_state
from ..tasks.generation.data import open_denoiser, open_split, save_grid
from ..tasks.generation.diffusion import Diffusion
from ..tasks.generation.params import InputSettings, LatentSettings, SamplingParams
from ..tasks.generation.reference import SUFFIX, ReferenceBatch
from ..tasks.generation.scores import (
    INCEPTION_SHA256,
    Inception,
    Judge,
    Tally,
    compare_tallies,
    load_exported,
    load_script,
)
from ..tasks.generation.task import draw_samples, to_pictures
from .params import DrawnParams, DrawRequest

OF_EACH, MOST_BY_DEFAULT = 8, 80  # default numbers of pictures: of each class, and at most in total
_COLUMNS, _MOST_IN_GRID = 10, 100  # most classes that get a column each in the grid, and most pictures in it
_GRID = "grid.png"  # the picture of the first samples, in the folder of the others
_BATCH = 64  # real pictures per batch
# field of a record -> name of the score in print
_LABELS = {"fid": "FID", "sfid": "sFID", "inception_score": "IS", "precision": "precision", "recall": "recall"}
RELEASED_SIZE = 256  # image size of released denoisers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawer:
    """A denoiser in eval mode on its device, with its sampling; `decode` maps its outputs to uint8 pictures."""

    name: str
    model: nn.Module
    transform: InputSettings
    trained_size: int  # side of the training's images in pixels
    sampling: SamplingParams
    classes: tuple[str, ...]  # names in the order of the labels
    decode: Callable[[Tensor], Tensor]


def draw_pictures(request: DrawRequest) -> None:
    """Write `<number>_<class>.png`, `grid.png` of the first pictures, and `samples.json` into the request's folder.

    With a judge or an Inception file, the scores go to samples.json and to a record under
    results/replications/<device>/draw. The request's `data` is a cell of prepare_data, or a reference batch file.

    Raises:
        UserError: options, weights or files that do not match, before anything is drawn.
        RunError: too little memory.
    """
    request.check()
    paths, started = find_root(), time.monotonic()
    runtime = load_runtime(paths)
    device = choose_device(runtime.device)
    drawer = open_drawer(request, device)
    asked = _find_labels(request.class_label, drawer.classes)
    count = request.samples or min(OF_EACH * len(asked), MOST_BY_DEFAULT)
    labels = torch.tensor([asked[place % len(asked)] for place in range(count)], device=device)
    judge = Judge.open(request.judge, drawer.classes, device) if request.judge else None
    inception = Inception(request.inception, device, request.inception_sha256) if request.inception else None
    if inception is not None and count < 2:
        raise UserError("generate: --inception needs at least two samples")
    names = [f"{place:05d}_{_file_name(drawer.classes[label])}.png" for place, label in enumerate(labels.tolist())]
    cell = reference = None
    if request.data is not None and request.data.endswith(SUFFIX):
        if inception is None:
            raise UserError(f"generate: --data {request.data}: a judge knows no class of its pictures; name a data set")
        reference = ReferenceBatch.open(Path(request.data), drawer.transform.image_size)
    elif request.data is not None:
        cell = open_cell(paths, runtime, request.data)
    _open_folder(request.output, names)
    real = reference.read(inception) if reference else None
    if cell is not None:
        real = _read_real(cell, drawer, asked, Tally(judge, inception))

    tally, shown = Tally(judge, inception), []  # the drawn pictures, and those of the grid
    with Progress("drawing", count * drawer.sampling.steps, unit="steps") as progress:
        for batch in _draw(drawer, labels, request, progress):
            # `tally.seen` is the number of the batch's first picture until the batch is added
            own = labels[tally.seen : tally.seen + len(batch)]
            for place, picture in enumerate(batch.cpu(), tally.seen):
                with atomic(request.output / names[place]) as temporary:
                    to_pil_image(picture).save(temporary, "PNG")
                shown += [picture] if place < _MOST_IN_GRID else []
            tally.add(batch, own)
    save_grid(torch.stack(shown), len(asked) if 1 < len(asked) <= _COLUMNS else OF_EACH, request.output / _GRID)
    about = {
        "model": drawer.name,
        "weights": request.weights.name,
        "weights_hash": hash_file(request.weights),
        "samples": count,
        "classes": [drawer.classes[label] for label in asked],
        "image_size": drawer.transform.image_size,
        "seed": request.seed,
        "sampling": dataclasses.asdict(drawer.sampling),
    }
    if judge is not None or inception is not None:
        if real is not None:
            about |= {"data": reference.path.name if reference else cell.name, "real_images": real.seen}
        if reference is not None:
            about["reference_hash"] = reference.hash
        if judge is not None:
            about["judge_hash"] = judge.weights_hash
        if inception is not None:
            about |= {"inception_hash": inception.hash, **_name_protocol(inception, reference)}
        about |= compare_tallies(tally, real)
        _record(paths, request, drawer, asked, about, device, time.monotonic() - started)
    write_json(request.output / "samples.json", about)
    print("; ".join([f"{count} picture{'s' if count > 1 else ''} in {request.output}", *_describe(about)]), flush=True)


def open_drawer(request: DrawRequest, device: torch.device) -> Drawer:
    """Open the denoiser of a request.

    Raises:
        UserError: weights that cannot be read, are of another task or do not fit; steps, guidance or a size out of
            range; a VAE that is missing, invalid or not needed.
    """
    path = request.weights
    if request.model is not None:
        _require_denoiser(request.model)
    state, metadata = open_denoiser(path, *([request.model] if request.model else []))
    if metadata is None:
        if "class_embed.weight" not in state:
            raise UserError(f"{path}: holds no embedding of classes, so it is no denoiser")
        task = {"transform": {"image_size": RELEASED_SIZE, "latents": dataclasses.asdict(LatentSettings())}}
        name, options = request.model, {"num_classes": len(state["class_embed.weight"]) - 1}
        wnids = list_wnids()
        is_imagenet = options["num_classes"] == len(wnids)
        classes = wnids if is_imagenet else map(str, range(options["num_classes"]))
    else:
        task = metadata.get("task") or {"name": "classify"}
        if task["name"] != "generate":
            raise UserError(
                f"{path}: holds a model that can {task['name']}, not generate; `repro generate --cell NAME` trains one that can"
            )
        name, options, classes = metadata["model"], metadata["options"], metadata["classes"]
    transform = build(
        InputSettings,
        task["transform"] | ({} if request.image_size is None else {"image_size": request.image_size}),
        "generate",
    )
    try:
        model = build_denoiser(name, **options)
        model.grid_of(*transform.shape[1:])
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    load_state(model, state, f"{path}: does not fit {name} as built with {options}")
    sampling = build(SamplingParams, {**task.get("sampling", {}), **request.sampling}, "generate")
    decode = open_decoder(request.vae, transform, device, path)
    return Drawer(
        name=name,
        model=model.to(device).eval().requires_grad_(False),
        transform=transform,
        trained_size=task["transform"]["image_size"],
        sampling=sampling,
        classes=tuple(classes),
        decode=decode,
    )


def open_decoder(
    vae: Path | None, transform: InputSettings, device: torch.device, weights: Path
) -> Callable[[Tensor], Tensor]:
    """Return the function from samples (B, K, h, w) to uint8 pictures (B, 1 or 3, H, W); raises as `open_drawer`.

    A decoder takes one picture's unscaled latents, (1, K, h, w) fp32, and returns (1, 3, H, W) in [-1, 1].
    """
    if transform.latents is None:
        if vae is not None:
            raise UserError(f"--vae {vae}: {weights} draws pixels, which nothing decodes; leave it out")
        return to_pictures
    if vae is None:
        raise UserError(f"{weights}: draws latents; give their VAE's decoder with --vae FILE (docs/training.md)")
    if not vae.is_file():
        raise UserError(f"{vae}: no such VAE file")
    if vae.suffix == ".safetensors":
        raise UserError(
            f"{vae}: holds weights without their model; export the decoder as TorchScript or .pt2 (docs/training.md)"
        )
    side, about = transform.image_size, f"latents of shape {(1, *transform.shape)}"
    try:
        decoder = load_exported(vae, device) if vae.suffix == ".pt2" else load_script(vae, device)
        with torch.inference_mode():
            shape = tuple(decoder(torch.zeros(1, *transform.shape, device=device)).shape)
        if shape != (1, 3, side, side):
            raise UserError(f"makes {shape} of {about}, expected {(1, 3, side, side)}")
    except Exception as error:  # another file may raise anything
        why = str(error).splitlines()[0] if isinstance(error, UserError) else f"not a decoder that takes {about}"
        raise UserError(f"--vae {vae}: {why.removeprefix(f'{vae}: ')} (docs/training.md)") from None

    def decode(latents: Tensor) -> Tensor:
        """Decode latents (B, K, h, w), scaled as the denoiser draws them, to uint8 pictures (B, 3, H, W)."""
        # single pictures: a decoder needs far more memory than a denoiser, and an exported one may have a fixed batch
        # size
        return torch.cat([to_pictures(decoder(each / transform.latents.scale)) for each in latents.split(1)])

    return decode


def _find_labels(text: str, classes: Sequence[str]) -> list[int]:
    """Return the labels for `all`, the name of a class, or its number.

    Raises:
        UserError: there is no such class.
    """
    if text == "all":
        return list(range(len(classes)))
    if text in classes:
        return [classes.index(text)]
    if text.isdigit() and int(text) < len(classes):
        return [int(text)]
    hint = did_you_mean(text, classes) if not text.lstrip("-").isdigit() else ""
    raise UserError(
        f"generate: --class-label {text}: no such class; the model knows 0 to {len(classes) - 1}, or their names{hint}"
    )


def _require_denoiser(name: str) -> None:
    """Raise a UserError about the option --model unless a denoiser has this name."""
    try:
        with torch.device("meta"):
            build_denoiser(name)
    except ValueError as error:
        raise UserError(f"generate: --model {error}") from None


def _open_folder(folder: Path, names: Sequence[str]) -> None:
    """Create a folder for pictures; raises UserError if it is a file, or holds PNGs that would not be overwritten."""
    if any(place.exists() and not place.is_dir() for place in (folder, *folder.parents)):
        raise UserError(f"--output {folder}: is a file or lies in one; name a folder")
    others = {file.name for file in folder.glob("*.png")} - {_GRID, *names}
    if others:
        raise UserError(
            f"--output {folder}: holds {len(others)} other pictures, e.g. {min(others)}; name another folder, or remove it"
        )
    folder.mkdir(parents=True, exist_ok=True)


def _name_protocol(inception: Inception, reference: ReferenceBatch | None) -> dict[str, str | None]:
    """Return the published batch with which the scores are comparable as `protocol`; else None with a reason."""
    why = None
    if not INCEPTION_SHA256.startswith(inception.hash):
        why = f"the Inception file is not the published one, but has the hash {inception.hash}"
    elif reference is None:
        why = "the real pictures are those of a data set"
    elif reference.known is None:
        why = f"the reference batch is none whose SHA-256 is known, but has the hash {reference.hash}"
    return {"protocol": None, "protocol_reason": why} if why else {"protocol": reference.known}


def _describe(about: Mapping[str, Any]) -> list[str]:
    """Return the scores of `compare_tallies` in words, as far as `about` has them."""
    words = []
    if about.get("judged_percent") is not None:
        words = [f"the judge takes {about['judged_percent']:.1f} % of them for their class"]
    if about.get("real_judged_percent") is not None:  # never without the other
        words[0] += f" and {about['real_judged_percent']:.1f} % of the {about['real_images']} real ones"
    return words + [f"{label} {about[name]:.2f}" for name, label in _LABELS.items() if about.get(name) is not None]


def _file_name(name: str) -> str:
    """Return the name of a class with _ for each character that some file systems refuse."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


def _draw(drawer: Drawer, labels: Tensor, request: DrawRequest, progress: Progress) -> Iterator[Tensor]:
    """Yield batches of uint8 pictures of the classes `labels`; RunError if the device has too little memory.

    The progress counts the steps of all pictures.
    """
    batches = draw_samples(
        drawer.model,
        Diffusion.linear(labels.device),
        drawer.transform,
        labels,
        range(len(labels)),
        sampling=drawer.sampling,
        seed=request.seed,
        batch_size=request.batch_size,
        progress=lambda samples: progress.update(progress.done + samples),
    )
    try:
        with torch.inference_mode():
            for part in batches:
                yield drawer.decode(part)
    except RuntimeError as error:  # includes torch.OutOfMemoryError; a CPU raises a plain RuntimeError
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise RunError("generate: the device has too little memory; lower --batch-size") from None


def _read_real(cell: DataCell, drawer: Drawer, asked: Sequence[int], tally: Tally) -> Tally:
    """Add to a tally the real pictures of the requested classes in the reported split, at the samples' size."""
    tree = cell.open_tree()
    if tuple(tree.classes) != drawer.classes or cell.kind == "latents":
        raise UserError(f"generate: --data {cell.name}: holds no pictures of the classes that the denoiser knows")
    wanted = torch.tensor(asked)
    loader = EvalLoader(
        open_split(tree, cell.row.reported_split, dataclasses.replace(drawer.transform, latents=None)),
        batch_size=_BATCH,
    )
    with contextlib.closing(loader):
        for pictures, labels in loader:
            chosen = torch.isin(labels, wanted)
            if chosen.any():
                tally.add(pictures[chosen], labels[chosen])
    return tally


def name_record(drawer: Drawer, params: DrawnParams, files: Mapping[str, str], data: str | None) -> str:
    """Return the name of a record without its suffix; it must hold all that changes the scores.

    Otherwise a record replaces another.

    Args:
        files: use -> hash, in the order of `params.files`.
        data: the cell or the file of the real pictures.
    """
    sampling, labels = params.sampling, params.labels
    parts = [drawer.name, params.weights_hash[:8]]
    parts += [f"{sampling.sampler}{sampling.steps}", f"guidance{sampling.guidance:g}"]
    parts += [f"{params.samples}samples", f"seed{params.seed}", *([] if len(labels) > 1 else [f"class{labels[0]}"])]
    parts += [f"size{params.image_size}"] if params.image_size != drawer.trained_size else []
    parts += [f"{use}{hash[:8]}" for use, hash in files.items()]
    parts += [Path(data).stem] if data else []
    return "_".join(parts).replace(".", "_")


def _record(
    paths: Paths,
    request: DrawRequest,
    drawer: Drawer,
    asked: Sequence[int],
    about: dict[str, Any],
    device: torch.device,
    seconds: float,
) -> None:
    """Write the record of scores `about`; the pictures are of the labels `asked`, and took `seconds`."""
    given = {"judge": request.judge, "inception": request.inception, "vae": request.vae}
    files = {use: hash_file(file) for use, file in given.items() if file is not None}
    if "reference_hash" in about:
        files["reference"] = about["reference_hash"]
    params = DrawnParams(
        weights_hash=about["weights_hash"],
        labels=tuple(asked),
        samples=about["samples"],
        image_size=drawer.transform.image_size,
        sampling=drawer.sampling,
        seed=request.seed,
        files=tuple(files.values()),
    )
    has_cell = request.data is not None and "reference_hash" not in about
    identity = make_identity(
        paths.root,
        params,
        data_manifest=manifest_path(paths, request.data) if has_cell else None,
        device=device_label(device),
        dtype="fp32",
        backend="torch",
    )
    name = name_record(drawer, params, files, about.get("data"))
    write_record(paths.replications(device_slug(device)) / "draw" / f"{name}.json", about, identity, seconds)
