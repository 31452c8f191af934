"""Published weights, with errors of one line: timm's, some of which may stand beside Table 1, and official files of families."""

import contextlib
import dataclasses
import difflib
import logging
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import timm
import yaml
from safetensors import SafetensorError
from torch import nn

from ..core.errors import RunError, UserError
from ..models.registry import build_model, family_module
from ..models.weights import load_official, read_official

# of several sets trained on ImageNet-1K alone, the one of the architecture's own authors is the table's model
_AUTHORS = ("fb_in1k", "ms_in1k", "pycls_in1k")
# parts of timm's tags that tell of more than labelled ImageNet-1K: fine-tuned, linear probe, weak or noisy labels, a teacher
_MORE = frozenset(["ft", "lc", "swag", "ssl", "swsl", "wsl", "ns", "dist", "distilled"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """One set of published weights.

    Args:
        model: registered name, without timm's tag.
        tag: which of the model's weights, as timm names them; empty where there is one set without a name.
        license: as the weights' publisher states it on the hub, by timm's configuration; None where it states none.
        comparable: whether these are the ones for the plain name's row of Table 1: ImageNet-1K alone, the authors' if published.
        preprocessing: timm's configuration: input_size, interpolation, crop_pct, mean, std, num_classes and others.
    """

    model: str
    tag: str
    license: str | None
    comparable: bool
    preprocessing: Mapping[str, Any]

    @property
    def full_name(self) -> str:
        """What `timm.create_model` takes for these weights."""
        return f"{self.model}.{self.tag}" if self.tag else self.model

    @property
    def record_name(self) -> str:
        """What a record calls the model: the plain name, by which the report finds it, only where it may stand in the table."""
        return self.model if self.comparable else self.full_name


def only_imagenet_1k(tag: str) -> bool:
    """Whether a tag of timm's says that labelled ImageNet-1K is all that the weights have seen; in doubt, no."""
    *parts, last = tag.split("_")
    return last == "in1k" and not _MORE & set(parts) and not any(part.startswith(("in", "laion", "lvd")) for part in parts)


def find_published(name: str) -> Published:
    """The published weights that a name means.

    `model.tag` means those; `model` alone the ones for Table 1 (ImageNet-1K alone, the authors' own before timm's), or timm's
    default where there are none such.

    Raises:
        UserError: an unknown model or tag, or a model without published weights.
    """
    model, _, tag = name.partition(".")
    _check_known(model, name)
    tags = [full.partition(".")[2] for full in timm.list_pretrained([model, f"{model}.*"])]
    if not tags:
        raise UserError(f"{model}: timm has no published weights; give --weights FILE")
    if tag and tag not in tags:
        raise UserError(f"{name}: timm has no such weights; of {model} it has {', '.join(tags)}")
    default = timm.get_pretrained_cfg(model).tag
    pure = [t for t in (*_AUTHORS, default, *tags) if t in tags and only_imagenet_1k(t)]
    chosen = tag or (pure[0] if pure else default)
    config = timm.get_pretrained_cfg(f"{model}.{chosen}" if chosen else model)
    comparable = bool(pure) and chosen == pure[0]
    return Published(model=model, tag=chosen, license=config.license, comparable=comparable, preprocessing=dataclasses.asdict(config))


def _check_known(model: str, name: str) -> None:
    if not timm.is_model(model):
        close = difflib.get_close_matches(model, timm.list_models(), n=1)
        advice = f"did you mean {close[0]!r}?" if close else "timm.list_models() names all"
        raise UserError(f"{name}: no such model; {advice}")


def is_timms(name: str) -> bool:
    """Whether a model is one of timm's, with or without a tag, and not of this project's families.

    Raises:
        UserError: an unknown model.
    """
    model = name.partition(".")[0]
    _check_known(model, name)
    return family_module(model).startswith("timm.")


def table1_models() -> tuple[list[tuple[Published, int]], dict[str, list[str]]]:
    """The rows of Table 1 that published weights can fill, with the row's image side in pixels; reason -> labels of the others.

    The rows are those of repro/report/paper.yaml.
    """
    found: list[tuple[Published, int]] = []
    left_out: dict[str, list[str]] = {}
    for row in _table1():
        label, size, model = (row[key] for key in ("label", "size", "model"))
        try:
            if not model or not timm.is_model(model):
                raise UserError("not in timm, or not built")
            published = find_published(model)
            if not published.comparable:
                raise UserError(f"timm's weights have seen more than ImageNet-1K ({published.tag})")
            found.append((published, int(size)))
        except UserError as error:
            reason = str(error).removeprefix(f"{model}: ") if model else str(error)
            left_out.setdefault(reason, []).append(label)
    return found, left_out


def table1_top1(model: str, image_size: int) -> str | None:
    """The accuracy in percent that Table 1 prints for a model at an image side in pixels; None where it has no such row."""
    rows = (row for row in _table1() if row["model"] == model and row["size"] == str(image_size))
    return next((row["top1_percent"] for row in rows), None)


def _table1() -> list[dict[str, str]]:
    """Table 1's rows: its keys and columns, as printed."""
    with open(Path(__file__).parents[1] / "report" / "paper.yaml", encoding="utf-8") as stream:
        tables = yaml.load(stream, yaml.BaseLoader)["tables"]  # every scalar is text there, as for the ledger
    table = next(table for table in tables if table["id"] == "table1")
    return [dict(zip([*table["keys"], *table["columns"]], row, strict=True)) for row in table["rows"]]


class OfficialFile:
    """A file that the authors of one of this project's families publish: Vim's, VRWKV's or ViT3's.

    Args:
        path: see `repro.models.weights.read_official`.
        model: registered name.

    Raises:
        UserError: an unreadable file, or one without a classifier.
    """

    def __init__(self, path: Path, model: str):
        self.path, self.model = path, model
        # the published evaluation of all three: the short side to 256 bicubically, the centre 224, ImageNet's statistics
        self.preprocessing = dataclasses.asdict(timm.get_pretrained_cfg(model))
        self.state = read_official(path)
        if "head.weight" not in self.state:
            raise UserError(f"{path}: has no head.weight; a backbone without its classifier has no accuracy")
        self.num_classes = self.state["head.weight"].shape[0]

    def build(self, image_size: int) -> nn.Module:
        """The model with its weights; at another size than the model's own, position embeddings are resampled.

        Raises:
            UserError: weights of another model, or a size that the model cannot take.
        """
        try:
            network = build_model(self.model, img_size=image_size, num_classes=self.num_classes)
            load_official(network, self.state)
        except (ValueError, UserError) as error:
            raise UserError(f"{self.path}: {error}") from None
        return network


def build_published(published: Published, image_size: int, file: Path | None = None) -> nn.Module:
    """The model with its published weights, from the hub or the hub's local cache, or from a file of them, all by timm's loading.

    Args:
        image_size: side in pixels that the model is built for, where it is built for one.
        file: in timm's layout, or in one that timm translates.

    Raises:
        UserError: a model that cannot be built for this size, or a file that does not fit it.
        RunError: the weights cannot be fetched.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    hub = published.preprocessing.get("hf_hub_id") and not (file or published.preprocessing.get("file"))
    local = {"pretrained_cfg_overlay": {"file": str(file), "custom_load": False}} if file else {}
    with _quick_without_network() if hub else contextlib.nullcontext() as problem:
        try:
            return build_model(published.full_name, pretrained=True, img_size=image_size, **local)
        except (LocalEntryNotFoundError, OfflineModeIsEnabled):
            why = problem or "the download failed"
            raise RunError(f"{published.full_name}: weights cannot be fetched and are not in the local cache: {why}") from None
        except ValueError as error:
            raise UserError(" ".join(str(error).split())) from None
        except (OSError, EOFError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:  # damaged, or other keys
            why = f"weights cannot be loaded: {' '.join(str(error).split())[:200] or type(error).__name__}"
            if file:
                raise UserError(f"{file}: {published.full_name}: {why}") from None
            raise RunError(f"{published.full_name}: {why}") from None


_hub_problem: dict[str, str | None] = {}  # endpoint -> why it cannot be reached; asked once in a process


@contextlib.contextmanager
def _quick_without_network() -> Iterator[str | None]:
    """Where the hub cannot be reached, use its cache alone: its client would try for most of a minute, for each model.

    Yields why the hub cannot be reached, or None.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    endpoint, before = constants.ENDPOINT, constants.HF_HUB_OFFLINE
    if before:
        _hub_problem[endpoint] = "HF_HUB_OFFLINE is set"
    elif endpoint not in _hub_problem:
        try:
            get_session().head(endpoint, timeout=10)
            _hub_problem[endpoint] = None
        except Exception as error:  # whichever HTTP client this version of the hub's package uses
            _hub_problem[endpoint] = f"{endpoint}: {error}"
    loggers = [logging.getLogger(name) for name in ("timm.models._builder", "timm.models._hub")]
    levels = [logger.level for logger in loggers]
    try:
        constants.HF_HUB_OFFLINE = _hub_problem[endpoint] is not None
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield _hub_problem[endpoint]
    finally:
        constants.HF_HUB_OFFLINE = before
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
