"""`repro predict`: what a trained model sees in a person's own pictures."""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from repro.core.config import build
from repro.core.errors import UserError
from repro.core.paths import find_root
from repro.core.record import atomic, write_json
from repro.core.runtime import choose_device, load_runtime
from repro.core.ui import print_table
from repro.data.settings import DetectionTransformSettings, TransformSettings
from repro.tasks.detection.params import MaskRcnnParams
from repro.tasks.segmentation.params import SegmentationTransformSettings, UperNetParams

from . import Stage

Task = Literal["classify", "detect", "segment"]
TOP = 5
BATCH = 32  # pictures of one size, as a classifier takes them

STAGE = Stage(purpose="use")


def command(
    images: Annotated[list[Path], typer.Argument(help="Pictures of any size; a folder stands for those in it.")],
    weights: Annotated[Path, typer.Option(help="A .safetensors file of this project; it names its model and its task.")],
    task: Annotated[Task | None, typer.Option(help="Only if the weights are of this task.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the pictures drawn over, and predictions.json.")] = Path(
        "predictions"
    ),
    json: Annotated[Path | None, typer.Option(help="File for the predictions; classes are not written without it.")] = None,
    min_score: Annotated[float, typer.Option(min=0, max=1, help="Detections below are not drawn.")] = 0.5,
) -> None:
    """Classify pictures, or draw what is detected or segmented in them."""
    run(images, weights, task, output, json, min_score, choose_device(load_runtime(find_root()).device))


def run(images: list[Path], weights: Path, task: Task | None, output: Path, json: Path | None, min_score: float, device: Any) -> None:
    """Print a line per picture, of classes on a terminal a table; for detection and segmentation also write <output>/<picture>.png.

    Predictions go to `json`, for detection and segmentation by default to <output>/predictions.json.

    Raises:
        UserError: weights of another task, or two pictures that would be drawn to one file, before anything is written; pictures
            that cannot be read, after the others.
    """
    from repro.models.weights import read_metadata

    metadata = read_metadata(weights)
    own_task = (metadata.get("task") or {"name": "classify"})["name"]
    if task not in (None, own_task):
        raise UserError(f"{weights}: holds a model that can {own_task}, not {task}")
    classify = own_task == "classify"
    files = pictures_in(images, drawn=not classify)
    try:
        prepare, see = {"classify": _classifier, "detect": _detector, "segment": _segmenter}[own_task](weights, metadata, device, min_score)
    except ValueError as error:
        raise UserError(f"{weights}: {error}") from None
    found, rows, unread = {}, [], []
    pictures = _read(files, prepare, unread)
    while group := list(itertools.islice(pictures, BATCH if classify else 1)):
        for (path, _), (line, seen, drawn) in zip(group, see([picture for _, picture in group]), strict=True):
            found[str(path) if classify else path.name] = seen
            if classify and sys.stdout.isatty():
                rows.append([path.name, *(f"{each['class']} {100 * each['share']:.1f} %" for each in seen)])
            else:
                print(f"{path}: {line}", flush=True)
            if drawn is not None:
                with atomic(output / f"{path.stem}.png") as temporary:
                    drawn.save(temporary, "PNG")
    if rows:
        print_table(["picture", *(str(rank) for rank in range(1, len(rows[0])))], rows)
    target = json if json or classify else output / "predictions.json"
    if target and found:
        write_json(target, {"weights": weights.name, "model": metadata["model"], "task": own_task, "pictures": found})
        print(f"{len(found)} picture{'s' if len(found) > 1 else ''} {'in' if classify else 'drawn in'} {target if classify else output}")
    if len(unread) > 1:
        print("\n".join(f"repro: {error}" for error in unread), file=sys.stderr)
        raise UserError(f"predict: {len(unread)} of {len(files)} pictures could not be read")
    if unread:
        raise unread[0]


def _read(files: list[Path], prepare: Callable[[Any], Any], unread: list[UserError]) -> Iterator[tuple[Path, Any]]:
    """Each picture that can be read, prepared; of the others the errors go to `unread`."""
    import torch

    from repro.data.pixels import read_pixels

    for path in files:
        try:
            pixels = read_pixels(path)
        except UserError as error:
            unread.append(error)
            continue
        yield path, prepare(torch.from_numpy(pixels).permute(2, 0, 1).contiguous())


def pictures_in(given: list[Path], *, drawn: bool = False) -> list[Path]:
    """The files that a person means, folders read out.

    Raises:
        UserError: a folder without pictures or, where results are `drawn` into files of the same names, two of one name.
    """
    from repro.data.tree import EXTENSIONS

    files = []
    for path in given:
        inside = sorted(each for each in path.iterdir() if each.suffix.lower() in EXTENSIONS) if path.is_dir() else [path]
        if not inside:
            raise UserError(f"{path}: holds no picture ({', '.join(EXTENSIONS)})")
        files += inside
    stems = [path.stem for path in files]
    twice = next((path for path in files if drawn and stems.count(path.stem) > 1), None)
    if twice is not None:
        raise UserError(f"{twice}: another picture has the name {twice.stem}, too, and would be drawn over it; rename one")
    return files


def _classifier(weights: Path, metadata: dict, device: Any, min_score: float) -> Any:
    import torch
    from torchvision.transforms.functional import to_pil_image

    from repro.data.imagenet import ToInput, eval_transform
    from repro.models.checkpoints import open_weights

    model, settings = open_weights(weights).build().to(device), TransformSettings.from_preprocessing(metadata["preprocessing"])
    transform, to_input = eval_transform(settings), ToInput(settings, device)

    @torch.inference_mode()
    def see(inputs: list[Any]) -> list[tuple[str, Any, None]]:
        ranked = model(to_input(torch.stack(inputs))).float().softmax(1).cpu().sort(descending=True)
        seen = []
        for shares, indices in zip(ranked.values[:, :TOP].tolist(), ranked.indices[:, :TOP].tolist(), strict=True):
            best = [{"class": metadata["classes"][index], "share": round(share, 4)} for share, index in zip(shares, indices, strict=True)]
            seen.append((", ".join(f"{each['class']} {100 * each['share']:.1f} %" for each in best), best, None))
        return seen

    return lambda picture: transform(to_pil_image(picture)), see


def _detector(weights: Path, metadata: dict, device: Any, min_score: float) -> Any:
    from repro.data.detection import resize
    from repro.tasks.detection.draw import draw, predict

    from .detect import build as build_detector

    parts, names = metadata["task"], metadata["classes"]
    settings = build(DetectionTransformSettings, parts["transform"], f"{weights}: transform")
    sizes = build(MaskRcnnParams, parts["mask_rcnn"], f"{weights}: mask_rcnn")
    model = _filled(weights, metadata, "last", lambda adapter: build_detector(adapter, len(names), sizes)).to(device)

    def see(pictures: list[Any]) -> list[tuple[str, Any, Any]]:
        (picture,) = pictures
        (seen,) = predict(model, [picture], lambda image: resize(image, settings))
        kept = seen["scores"] >= min_score
        objects = [
            {"class": names[label - 1], "score": round(score, 4), "box_xyxy": [round(side, 1) for side in box]}
            for box, label, score in zip(*(seen[key][kept].tolist() for key in ("boxes", "labels", "scores")), strict=True)
        ]
        listed = ", ".join(f"{each['class']} {each['score']:.2f}" for each in objects)
        return [(listed or f"nothing with a score of {min_score} or more", objects, draw(picture, seen, names, min_score))]

    return lambda picture: picture, see


def _segmenter(weights: Path, metadata: dict, device: Any, min_score: float) -> Any:
    from repro.tasks.segmentation.draw import draw, predict

    from .segment import build as build_segmenter

    parts, names = metadata["task"], metadata["classes"]
    settings = build(SegmentationTransformSettings, parts["transform"], f"{weights}: transform")
    widths = build(UperNetParams, parts["upernet"], f"{weights}: upernet")
    model = _filled(weights, metadata, "each", lambda adapter: build_segmenter(adapter, len(names), widths, settings)).to(device)

    def see(pictures: list[Any]) -> list[tuple[str, Any, Any]]:
        (picture,) = pictures
        labels = predict(model, picture, settings, device)
        shares = {names[index]: round(float((labels == index).float().mean()), 4) for index in labels.unique().tolist()}
        shares = dict(sorted(shares.items(), key=lambda item: -item[1]))
        return [(", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items()), shares, draw(picture, labels, names))]

    return lambda picture: picture, see


def _filled(weights: Path, metadata: dict, features: Literal["last", "each"], wrap: Any) -> Any:
    """A dense model as its weights file describes it, in eval mode."""
    from repro.models.checkpoints import open_weights
    from repro.models.pyramid import build_pyramid

    model = wrap(build_pyramid(metadata["model"], options=metadata["options"], features=features))
    open_weights(weights).load_into(model)
    return model.eval()
