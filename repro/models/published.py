"""The weights that timm publishes: finding the set that a name means, and its model. Errors are one line."""

import contextlib
import dataclasses
import functools
import logging
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import timm
from safetensors import SafetensorError
from torch import Tensor, nn

from ..core.errors import RunError, UserError
from .registry import build_model, family_module, require_known
from .weights import require_sound

# tags of the architecture's own authors, for weights that were trained on ImageNet-1K alone; they are preferred to
# timm's
_AUTHORS = ("fb_in1k", "ms_in1k", "pycls_in1k")
# where a file of timm's may hold its state dict, in timm's order: the moving average counts
PLACES = ("state_dict_ema", "model_ema", "state_dict", "model")
# parts of timm's tags that mean more than labelled ImageNet-1K: fine-tuned, linear probe, weak or noisy labels, a
# teacher
_MORE = frozenset(["ft", "lc", "swag", "ssl", "swsl", "wsl", "ns", "dist", "distilled"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """One set of published weights."""

    model: str  # registered name, without timm's tag
    tag: str  # timm's name for this set of weights; empty for a model with one unnamed set
    license: str | None  # stated by the publisher on the hub, according to timm's configuration
    # whether a paper's row for the plain model may be set against them: trained on ImageNet-1K alone, and the authors'
    # own set if they published one
    comparable: bool
    # timm's configuration: input_size, interpolation, crop_pct, mean, std, num_classes and others
    preprocessing: Mapping[str, Any]

    @property
    def full_name(self) -> str:
        """The name with which `timm.create_model` builds the model with these weights."""
        return f"{self.model}.{self.tag}" if self.tag else self.model

    @property
    def record_name(self) -> str:
        """The name in records: the plain one, by which reports find it, only if a paper's row may be set against it."""
        return self.model if self.comparable else self.full_name


def is_only_imagenet_1k(tag: str) -> bool:
    """Whether a tag of timm's says that the weights have seen labelled ImageNet-1K and nothing else; False in doubt."""
    *parts, last = tag.split("_")
    return (
        last == "in1k" and not _MORE & set(parts) and not any(part.startswith(("in", "laion", "lvd")) for part in parts)
    )


def is_from_timm(name: str) -> bool:
    """Whether a model, tagged or not, is one of timm's and not of this project; UserError for an unknown one."""
    try:
        require_known(name)
    except ValueError as error:
        raise UserError(str(error)) from None
    return family_module(name).startswith("timm.")


def find_published(name: str, *, required: bool = True) -> Published:
    """The published weights that a name means.

    `model.tag` means that set. `model` alone means the set for a paper's table (ImageNet-1K alone, the authors' before
    timm's), or timm's default if there is none. If not `required`, a model without published weights gives timm's
    configuration, with an empty tag.

    Raises:
        UserError: an unknown model or tag, or a model without published weights.
    """
    model, _, tag = name.partition(".")
    is_from_timm(name)
    tags = [full.partition(".")[2] for full in timm.list_pretrained([model, f"{model}.*"])]
    if not tags and required:
        raise UserError(f"{model}: timm has no published weights; give a file of weights")
    if tag and tag not in tags:
        raise UserError(f"{name}: timm has no such weights; for {model} it has {', '.join(tags) or 'none'}")
    default = timm.get_pretrained_cfg(model).tag if tags else ""
    pure = [t for t in (*_AUTHORS, default, *tags) if t in tags and is_only_imagenet_1k(t)]
    chosen = tag or (pure[0] if pure else default)
    config = timm.get_pretrained_cfg(f"{model}.{chosen}" if chosen else model)
    comparable = bool(pure) and chosen == pure[0]
    return Published(
        model=model, tag=chosen, license=config.license, comparable=comparable, preprocessing=dataclasses.asdict(config)
    )


def build_published(
    published: Published, *, file: Path | None = None, state: Mapping[str, Tensor] | None = None, **options: Any
) -> nn.Module:
    """A model with published weights, from the hub, its local cache or a file's state; timm loads them, strictly.

    The state has timm's names, or names that timm translates; errors name its file. `options` are further arguments of
    the model, such as `img_size` and, for a file, its own `num_classes`.

    Raises:
        UserError: a model that cannot be built with these options, a state that does not fit it, or weights that are not
            finite.
        RunError: the weights cannot be fetched.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    overlay: dict[str, Any] = {"num_classes": options["num_classes"]} if "num_classes" in options else {}
    if file:
        overlay |= {"state_dict": dict(state), "custom_load": False}
    hub = published.preprocessing.get("hf_hub_id") and not (file or published.preprocessing.get("file"))
    with _only_cache_if_offline() if hub else contextlib.nullcontext() as problem:
        try:
            model = build_model(published.full_name, pretrained=True, pretrained_cfg_overlay=overlay, **options)
        except (LocalEntryNotFoundError, OfflineModeIsEnabled):
            why = problem or "the download failed"
            raise RunError(
                f"{published.full_name}: weights cannot be fetched and are not in the local cache: {why}"
            ) from None
        except ValueError as error:
            raise UserError(" ".join(str(error).split())) from None
        # damaged, or with other keys
        except (OSError, EOFError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
            why = f"{published.full_name}: weights cannot be loaded: {' '.join(str(error).split())[:200] or type(error).__name__}"
            raise (UserError(f"{file}: {why}") if file else RunError(why)) from None
    model.pretrained_cfg.pop("state_dict", None)
    # timm may have renamed them, but not their last part, e.g. num_batches_tracked
    known = {name.rpartition(".")[2] for name, buffer in model.named_buffers() if not buffer.is_floating_point()}
    integers = (key for key, value in (state or {}).items() if not value.is_floating_point())
    if wrong := next((key for key in integers if key.rpartition(".")[2] not in known), None):
        raise UserError(f"{file}: {wrong} has integers, expected a floating dtype")
    require_sound(model.state_dict(), file or published.full_name)
    model.built_from = published.model, options
    return model


@functools.cache
def _find_hub_problem(endpoint: str) -> str | None:
    """Why the hub cannot be reached, or None; found out once per process."""
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=10)
    except Exception as error:  # of whichever HTTP client this version of the hub's package uses
        return f"{endpoint}: {error}"
    return None


@contextlib.contextmanager
def _only_cache_if_offline() -> Iterator[str | None]:
    """Use only the hub's cache while the hub cannot be reached: its client would retry for most of a minute per model.

    Yields why the hub cannot be reached, or None.
    """
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    loggers = [logging.getLogger(f"timm.models.{name}") for name in ("_builder", "_hub")]
    problem = "HF_HUB_OFFLINE is set" if offline else _find_hub_problem(constants.ENDPOINT)
    levels = [logger.level for logger in loggers]
    try:
        constants.HF_HUB_OFFLINE = problem is not None
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield problem
    finally:
        constants.HF_HUB_OFFLINE = offline
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
