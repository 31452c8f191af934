"""`repro evaluate`: accuracy of any registered model, or of published weights, on a prepared data set, at any resolutions."""

import contextlib
import csv
import dataclasses
import hashlib
import io
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from repro.core.errors import RunError, UserError
from repro.core.paths import Paths, find_root
from repro.core.record import atomic, make_identity, write_record, write_text
from repro.core.runtime import Runtime, choose_device, device_label, device_slug, load_runtime, torch_dtype
from repro.data.settings import TransformSettings

from . import Stage

LIMIT_SEED = 0  # of the images that --limit draws: the same ones for every model
CURVE = ("image_size", "top1_percent", "top5_percent", "val_loss", "images")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What an evaluation depends on beside the data: model, weights (a file's hash, or `timm`), transform, share of the images."""

    model: str
    weights: str
    transform: TransformSettings
    limit: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for, beside the data; the fields are the command's options."""

    weights: Path | None = None
    models: tuple[str, ...] = ()
    pretrained: bool = False
    table1: bool = False
    image_sizes: tuple[int, ...] = ()
    batch_size: int = 64
    limit: int | None = None
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """One model with its weights.

    Args:
        name: what the record calls it; `model` is the registered name.
        weights: first 16 hex digits of the file's SHA-256, or `timm`.
        facts: what else the record says of them.
        preprocessing: as timm names it; input_size is the one of the training.
        sizes: image sides in pixels to evaluate at.
        build: image side -> the model with its weights.
    """

    name: str
    model: str
    weights: str
    facts: Mapping[str, Any]
    preprocessing: Mapping[str, Any]
    sizes: tuple[int, ...]
    build: Callable[[int], Any]


STAGE = Stage(purpose="use")


def command(
    data: Annotated[str, typer.Option(help="A cell of `prepare_data`, e.g. digits or imagenet.")],
    weights: Annotated[
        Path | None,
        typer.Option(help="A .safetensors file of this project, which names its model; or, with --model, an official file of that model."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "--models", help="A registered name; several with --pretrained; with --weights the file's own."),
    ] = None,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="With --model: timm's published weights, of ImageNet-1K alone where there are.")
    ] = False,
    table1: Annotated[bool, typer.Option("--table1", help="Every model of Table 1 with published weights, at the table's size.")] = False,
    image_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Side in pixels, where it is not the one of the training; several give a curve.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 64,
    limit: Annotated[
        int | None, typer.Option(min=1, help="A quick look at so many images, drawn with a fixed seed; no full score.")
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"], typer.Option(help="bf16 and fp16 by autocast; the papers evaluate in fp32.")
    ] = "fp32",
) -> None:
    """Measure top-1 and top-5 accuracy on the validation split; written under results/measured."""
    paths = find_root()
    asked = Request(
        weights=weights,
        models=tuple(model or ()),
        pretrained=pretrained,
        table1=table1,
        image_sizes=tuple(image_size or ()),
        batch_size=batch_size,
        limit=limit,
        dtype=dtype,
    )
    run(paths, load_runtime(paths), data, asked)


def run(paths: Paths, runtime: Runtime, data: str, asked: Request) -> None:
    """Evaluate each model at each size, print a line for each, and write the records.

    results/measured/<device>/evaluate/<model>_<data>_<size>_<weights>/metrics.json (a limit, and a dtype that is not fp32, end the
    name); at several sizes also <model>_<data>_<weights>/curve.{csv,png}. Of several models, one that fails is a line on stderr.

    Raises:
        UserError: nothing to evaluate, or weights, model, classes, image size, limit and data that do not belong together.
        RunError: weights that cannot be fetched, logits not finite, a GPU too small; of several models, after the last.
    """
    import torch

    from repro.data.cells import open_cell

    _check(asked)
    prepared = open_cell(paths, runtime, data)
    manifest_path, manifest = prepared.manifest_path, prepared.manifest
    if asked.limit is not None:
        _check_limit(asked.limit, manifest.splits["val"].images)
    tree = prepared.open_tree()
    subjects = list(_subjects(asked, tree.classes, data))
    if asked.limit is not None:
        tree = some(tree, asked.limit, LIMIT_SEED)
    device = choose_device(runtime.device)
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    bench = _Bench(paths, runtime, data, manifest.kind, manifest_path, tree, device, asked)
    failed = []
    for subject in subjects:
        try:
            bench.evaluate(subject)
        except (UserError, RunError) as error:
            if len(subjects) == 1:
                raise
            failed.append(subject.name)
            print(f"repro: {error}", file=sys.stderr, flush=True)
    if failed:
        raise RunError(f"evaluate: {len(failed)} of {len(subjects)} models were not evaluated: {', '.join(failed)}")


@dataclasses.dataclass(frozen=True)
class _Bench:
    """What all models of a call share."""

    paths: Paths
    runtime: Runtime
    data: str
    kind: str
    manifest_path: Path
    tree: Any
    device: Any
    asked: Request

    def evaluate(self, subject: Subject) -> None:
        """One model at all its sizes."""
        if len(subject.sizes) > 1:  # a size that the model cannot take is found before hours go into the others
            for size in subject.sizes:
                self._try(subject, size)
        rows = [self._at(subject, size) for size in subject.sizes]
        if len(rows) > 1:
            folder = self._folder(subject)
            _write_curve(folder, rows, subject, self.data)
            print(f"{subject.name} on {self.data}: curve in {folder.relative_to(self.paths.root)}")

    def _folder(self, subject: Subject, size: int | None = None) -> Path:
        parts = [subject.name, self.data, *([str(size)] if size else []), subject.weights[:8]]
        parts += [f"limit{self.asked.limit}"] if self.asked.limit else []
        parts += [self.asked.dtype] if self.asked.dtype != "fp32" else []
        return self.paths.measured(device_slug(self.device)) / "evaluate" / "_".join(parts)

    def _try(self, subject: Subject, size: int) -> None:
        import torch

        network = subject.build(size).to(self.device).eval()
        with torch.inference_mode(), _one_line(subject.name, size):
            network(torch.zeros(1, 3, size, size, device=self.device))

    def _at(self, subject: Subject, size: int) -> dict[str, Any]:
        import torch

        from repro.data.classification import ImageFolder, ToInput, eval_transform
        from repro.data.loader import EvalLoader
        from repro.models.registry import family_module, kernel_backend
        from repro.tasks.classification import accuracy

        started = time.monotonic()
        asked, device = self.asked, self.device
        dtype = torch_dtype(asked.dtype)
        network = subject.build(size).to(device).eval()
        transform = TransformSettings.from_preprocessing(subject.preprocessing, size)
        dataset = ImageFolder(self.tree, "val", eval_transform(transform))
        loader = EvalLoader(dataset, batch_size=asked.batch_size, workers=self.runtime.workers, device=device)
        watched = _Watched(loader, f"{subject.name} at {size}", len(dataset))
        try:
            with _one_line(subject.name, size), torch.autocast(device.type, dtype=dtype, enabled=asked.dtype != "fp32"):
                numbers = accuracy(network, watched, ToInput(transform, device))
        finally:
            watched.close()
            loader.close()
        if not math.isfinite(numbers["val_loss"]):
            raise RunError(f"{subject.name} at {size}: logits are not finite in {asked.dtype}; use --dtype fp32 or bf16")

        about = {"model": subject.name, "data": self.kind, "weights": subject.weights, **subject.facts}
        metrics = {**numbers, **about, "image_size": size, "train_image_size": subject.preprocessing["input_size"][-1]}
        if asked.limit is not None:
            metrics |= {"limit": asked.limit, "limit_seed": LIMIT_SEED}
        identity = make_identity(
            self.paths.root,
            ["stages.evaluate", family_module(subject.model)],
            Evaluated(model=subject.name, weights=subject.weights, transform=transform, limit=asked.limit),
            data_manifest=self.manifest_path,
            device=device_label(device),
            dtype=asked.dtype,
            backend=kernel_backend(network, dtype),
        )
        write_record(self._folder(subject, size), metrics, identity, time.monotonic() - started)
        scores = f"top-1 {numbers['top1_percent']:.2f} %, top-5 {numbers['top5_percent']:.2f} %"
        of = f"{numbers['images']} images" + (" (--limit: no full score)" if asked.limit else "")
        tag = f" ({subject.facts['weights_tag']})" if "weights_tag" in subject.facts else ""
        where = f"{subject.name}{tag} on {self.data} at {size}, {asked.dtype}"
        print(f"{where}: {scores} of {of}{self._paper(subject, size)}, {watched.rate():.0f} img/s", flush=True)
        return metrics

    def _paper(self, subject: Subject, size: int) -> str:
        """The number in Table 1 that this one may stand beside, where there is one."""
        from repro.tasks.published import table1_top1

        if self.kind != "imagenet" or self.asked.limit or subject.facts.get("options") != {}:
            return ""
        printed = table1_top1(subject.name, size)
        return "" if printed is None else f" (Table 1: {printed} %)"


def _check(asked: Request) -> None:
    if asked.weights is not None and asked.pretrained:
        raise UserError("evaluate: --weights and --pretrained name two sets of weights; give one")
    if asked.table1 and (asked.weights is not None or asked.models):
        raise UserError("evaluate: --table1 names its models and weights itself; leave --model and --weights out")
    if asked.weights is None and not asked.table1 and not (asked.models and asked.pretrained):
        raise UserError("evaluate: an untrained model has no accuracy; give --weights FILE, or --model NAME --pretrained")
    if asked.weights is not None and len(asked.models) > 1:
        raise UserError(f"evaluate: a weights file holds one model, {len(asked.models)} are named; give one --model or none")
    for option, values in (("--model", asked.models), ("--image-size", asked.image_sizes)):
        twice = [value for index, value in enumerate(values) if value in values[:index]]
        if twice:
            raise UserError(f"evaluate: {option} {twice[0]} is given twice")


def _check_limit(limit: int, images: int) -> None:
    from repro.data.kinds import IMAGENET_1K

    if limit >= images:
        raise UserError(f"evaluate: --limit {limit}: the validation split has {images} images; leave --limit out for all of them")
    if limit == IMAGENET_1K.val:  # a larger set of one's own: the report knows a full score by this number
        raise UserError(f"evaluate: --limit {limit} is the size of ImageNet-1K's own split and would be taken for it; give another")


def some(tree: Any, limit: int, seed: int) -> Any:
    """The tree with `limit` of its validation images, drawn without replacement, in their order."""
    import numpy as np

    files = tree.splits["val"]
    chosen = np.sort(np.random.Generator(np.random.PCG64(seed)).choice(len(files.names), limit, replace=False))
    part = files.take(chosen)
    return dataclasses.replace(tree, splits={**tree.splits, "val": part})


def _subjects(asked: Request, classes: tuple[str, ...], data: str) -> Iterator[Subject]:
    """The models, found to fit the data; nothing is built or fetched yet."""
    from repro.models.weights import is_official
    from repro.tasks.published import find_published, table1_models

    if asked.weights is not None:
        yield _from_official(asked, classes, data) if is_official(asked.weights) else _from_file(asked, classes, data)
        return
    if asked.table1:
        wanted, left_out = table1_models()
        print("\n".join(f"left out: {', '.join(labels)}: {reason}" for reason, labels in left_out.items()), flush=True)
    else:
        wanted = [(published, published.preprocessing["input_size"][-1]) for published in map(find_published, asked.models)]
    for published, size in wanted:
        _check_classes(published.full_name, published.preprocessing["num_classes"], classes, data)
        yield _from_timm(published, asked.image_sizes or (size,))


def _check_classes(where: str, has: int, classes: tuple[str, ...], data: str) -> None:
    if has != len(classes):
        raise UserError(f"{where}: has {has} classes, {data} has {len(classes)}")


def _from_timm(published: Any, sizes: tuple[int, ...]) -> Subject:
    from repro.tasks.published import build_published

    facts = {"options": {}, "weights_tag": published.tag, "weights_license": published.license}
    if published.license is None:
        facts["weights_license_reason"] = "timm's configuration states none"
    return Subject(
        name=published.record_name,
        model=published.model,
        weights="timm",
        facts=facts,
        preprocessing=published.preprocessing,
        sizes=sizes,
        build=lambda size: build_published(published, size),
    )


def _from_file(asked: Request, classes: tuple[str, ...], data: str) -> Subject:
    from repro.models.registry import build_model
    from repro.models.weights import load_weights, read_metadata

    path = asked.weights
    metadata = read_metadata(path)
    if "task" in metadata:
        raise UserError(f"{path}: holds a model that can {metadata['task']['name']}, no classifier; its own stage evaluates it")
    name = asked.models[0] if asked.models else metadata["model"]
    trained = metadata["preprocessing"]["input_size"][-1]

    def build(size: int) -> Any:
        try:
            network = build_model(name, **(metadata["options"] if name == metadata["model"] else {}))
        except (ValueError, RuntimeError, OSError) as error:
            raise UserError(f"evaluate: {error}") from None
        load_weights(path, network, name=name)
        if size != trained and hasattr(network, "set_input_size"):  # timm's models of one size: resamples position embeddings
            with _one_line(name, size):
                network.set_input_size(img_size=(size, size))
        return network

    if name != metadata["model"]:
        build(trained)  # says what does not fit
    if metadata["classes"] != list(classes):
        raise UserError(f"{path}: was trained on other classes ({len(metadata['classes'])}) than {data} has ({len(classes)})")
    options = {k: v for k, v in metadata["options"].items() if k not in ("num_classes", "img_size")}
    return Subject(
        name=name,
        model=name,
        weights=_digest(path),
        facts={"options": options},
        preprocessing=metadata["preprocessing"],
        sizes=asked.image_sizes or (trained,),
        build=build,
    )


def _from_official(asked: Request, classes: tuple[str, ...], data: str) -> Subject:
    from repro.tasks.published import OfficialFile, build_published, find_published, is_timms

    path = asked.weights
    if not asked.models:
        raise UserError(f"{path}: no file of this project, so it does not say which model it belongs to; name that with --model")
    name = asked.models[0]
    if is_timms(name):
        published = find_published(name)
        model, preprocessing, build = published.model, published.preprocessing, lambda size: build_published(published, size, path)
        num_classes = preprocessing["num_classes"]
        # without options: the report does not take a file for the table's model, since other data may have gone into it
        facts = {"weights_file": path.name}
    else:
        official = OfficialFile(path, name)
        model, preprocessing, build, num_classes = name, official.preprocessing, official.build, official.num_classes
        facts = {"options": {}, "weights_file": path.name}
    _check_classes(str(path), num_classes, classes, data)
    return Subject(
        name=name,
        model=model,
        weights=_digest(path),
        facts=facts,
        preprocessing=preprocessing,
        sizes=asked.image_sizes or (preprocessing["input_size"][-1],),
        build=build,
    )


def _digest(path: Path) -> str:
    """Which weights: two files of one model, or two variants of it, are two results."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@contextlib.contextmanager
def _one_line(name: str, size: int) -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise RunError(f"{name} at {size}: the GPU's memory is too small; lower --batch-size") from None
    except (ValueError, AssertionError) as error:  # a size that the model cannot take
        raise UserError(f"{name}: {error}") from None


class _Watched:
    """Batches, with a bar (on a terminal) or a line now and then (elsewhere) on stderr once two seconds have passed.

    Args:
        batches: pairs whose second tensor has an entry per image.
        label: what is evaluated.
        total: images.
    """

    def __init__(self, batches: Iterable, label: str, total: int):
        self.batches, self.label, self.total, self.done = batches, label, total, 0
        self._started = self._now = time.monotonic()
        self._next_line = self._started + 2
        self._bar = None

    def __iter__(self) -> Iterator:
        for batch in self.batches:
            yield batch
            self.done += len(batch[1])  # after the model, since its result was waited for
            self._now = time.monotonic()
            if self._now >= self._next_line and self.done < self.total:
                self._show()

    def rate(self) -> float:
        """Images per second until the last batch, loading included."""
        return self.done / max(self._now - self._started, 1e-9)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def _show(self) -> None:
        if sys.stderr.isatty():
            if self._bar is None:
                from rich.console import Console
                from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

                columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
                self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
                self._bar.add_task(self.label, total=self.total)
                self._bar.start()
            self._bar.update(self._bar.task_ids[0], completed=self.done, description=f"{self.label}, {self.rate():.0f} img/s")
            return
        self._next_line = self._now + 10
        left = (self.total - self.done) / self.rate()
        line = f"{self.label}: {self.done:,} of {self.total:,} images, {self.rate():.0f} img/s, {left:.0f} s left"
        print(line, file=sys.stderr, flush=True)


def _write_curve(folder: Path, rows: list[dict[str, Any]], subject: Subject, data: str) -> None:
    """`curve.csv` (a row per image side in pixels) and `curve.png` (top-1 against it, the training's side marked)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = sorted(rows, key=lambda row: row["image_size"])
    text = io.StringIO()
    writer = csv.DictWriter(text, CURVE, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(folder / "curve.csv", text.getvalue())

    trained, sizes = rows[0]["train_image_size"], [row["image_size"] for row in rows]
    limited = " (--limit: no full score)" if "limit" in rows[0] else ""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(sizes, [row["top1_percent"] for row in rows], marker="o")
    axes.axvline(trained, linestyle="--", color="grey", label=f"trained at {trained} pixels")
    axes.set(xlabel="image side (pixels)", ylabel="top-1 accuracy (%)")
    axes.set_title(f"{subject.name} on {data}, {rows[0]['images']} images{limited}", fontsize="medium")
    axes.set_xticks(sorted({*sizes, trained}))
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic(folder / "curve.png") as temporary:
        FigureCanvasAgg(figure).print_png(temporary, metadata={"Software": None})
