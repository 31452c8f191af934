"""Weights that timm publishes: resolution of names, and building of models. Error messages are one line."""

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

# tags of weights by the authors of an architecture, trained on ImageNet-1K alone; they take precedence over timm's
_AUTHORS = ("fb_in1k", "ms_in1k", "pycls_in1k")
# keys under which a file of timm's may hold its state dict, in timm's order: moving averages come first
PLACES = ("state_dict_ema", "model_ema", "state_dict", "model")
# parts of timm's tags for training beyond labelled ImageNet-1K: fine-tuning, linear probe, weak or noisy labels, a
# teacher
_MORE = frozenset(["ft", "lc", "swag", "ssl", "swsl", "wsl", "ns", "dist", "distilled"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """One set of published weights."""

    model: str  # registered name, without timm's tag
    tag: str  # timm's tag of this set of weights; empty for a model with a single unnamed set
    license: str | None  # the publisher's license on the hub, according to timm's configuration
    # whether the weights may be compared with a paper's row for the plain model: they were trained on ImageNet-1K
    # alone, and are the authors' own if the authors published any
    comparable: bool
    # timm's configuration: input_size, interpolation, crop_pct, mean, std, num_classes and others
    preprocessing: Mapping[str, Any]

    @property
    def full_name(self) -> str:
        """The name for `timm.create_model` that selects these weights."""
        return f"{self.model}.{self.tag}" if self.tag else self.model

    @property
    def record_name(self) -> str:
        """The name in records: plain, so that reports find it, only if it may be compared with a paper's row."""
        return self.model if self.comparable else self.full_name


def is_only_imagenet_1k(tag: str) -> bool:
    """Return whether timm's tag means training on labelled ImageNet-1K and nothing else; False in doubt.

    `find_published` prefers such weights, since only they may stand beside a paper's row.
    """
    *parts, last = tag.split("_")
    return (
        last == "in1k" and not _MORE & set(parts) and not any(part.startswith(("in", "laion", "lvd")) for part in parts)
    )


def is_from_timm(name: str) -> bool:
    """Return whether a model, tagged or not, is timm's and not this project's; UserError for an unknown name."""
    try:
        require_known(name)
    except ValueError as error:
        raise UserError(str(error)) from None
    return family_module(name).startswith("timm.")


def find_published(name: str, *, required: bool = True) -> Published:
    """Resolve a name to published weights.

    `model.tag` selects that set. `model` alone selects the set for comparison with a paper: ImageNet-1K alone, the
    authors' before timm's. If there is none, it selects timm's default. If not `required`, a model without published
    weights returns timm's configuration with an empty tag.

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
    """Build a model with published weights from the hub, its local cache, or a file; timm loads them strictly.

    Args:
        published: the weights' description.
        file, state: a file, for error messages, and its tensors under timm's names or names that timm translates; None
            for weights from the hub.
        options: further arguments of the model, such as `img_size` and, for a file, its own `num_classes`.

    Raises:
        UserError: a model that cannot be built with these options, a state that does not fit, or non-finite weights.
        RunError: the weights cannot be downloaded.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    # timm drops a head whose number of classes is not that of its configuration
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
        # a damaged file, or one with other keys; the last three come from timm's filters, which expect their model's keys
        except (
            OSError,
            EOFError,
            RuntimeError,
            SafetensorError,
            pickle.UnpicklingError,
            AttributeError,
            LookupError,
        ) as error:
            why = f"{published.full_name}: weights cannot be loaded: {' '.join(str(error).split())[:200] or type(error).__name__}"
            raise (UserError(f"{file}: {why}") if file else RunError(why)) from None
    model.pretrained_cfg.pop("state_dict", None)  # the file's tensors, which the overlay left there
    # timm may rename a key, but keeps its last part, e.g. num_batches_tracked
    known = {name.rpartition(".")[2] for name, buffer in model.named_buffers() if not buffer.is_floating_point()}
    integers = (key for key, value in (state or {}).items() if not value.is_floating_point())
    if wrong := next((key for key in integers if key.rpartition(".")[2] not in known), None):
        raise UserError(f"{file}: {wrong} has integers, expected a floating dtype")
    require_sound(model.state_dict(), file or published.full_name)
    # `build_model` has set the name with its tag and the overlay; `require_same_architecture` compares the plain name
    model.built_from = published.model, options
    return model


@functools.cache
def _find_hub_problem(endpoint: str) -> str | None:
    """Return why the hub cannot be reached, or None; cached for the process."""
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=10)
    except Exception as error:  # the HTTP client, and so its errors, depends on the version of the hub's package
        return f"{endpoint}: {error}"
    return None


@contextlib.contextmanager
def _only_cache_if_offline() -> Iterator[str | None]:
    """Restrict the hub's client to its cache if the hub cannot be reached, and yield the reason or None.

    Otherwise the client would retry for most of a minute per model.
    """
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    loggers = [logging.getLogger(f"timm.models.{name}") for name in ("_builder", "_hub")]
    problem = "HF_HUB_OFFLINE is set" if offline else _find_hub_problem(constants.ENDPOINT)
    levels = [logger.level for logger in loggers]  # silent below, since the caller reports a failure in one line
    try:
        constants.HF_HUB_OFFLINE = problem is not None
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield problem
    finally:
        constants.HF_HUB_OFFLINE = offline
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
