"""Interpretations of the paper: one switch of Vittt for each choice that the paper leaves open or contradicts.

For each choice, docs/readings.md quotes the paper, gives the reason for the default and states what would refute it.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal, Self

from ..core.errors import did_you_mean

# the interpretation in a weights file of the design `gating` that states none: the file is older than the switches
UNNAMED_READING = "conv1d_arrival=together"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """An interpretation of the paper; the defaults are this project's choice.

    Its text form lists the differences from the defaults: `gate_activation=sigmoid,post_norm=none`. The model's option
    `reading` takes this form in params.yaml, on the command line and in Python: `timm.create_model(...,
    reading="post_norm=none")`.

    Weights files state all switches. A new switch needs the old behaviour as its default, because older files do not
    state it; without a removed switch, older files cannot be read.

    Raises:
        ValueError: a value that its switch does not have.
    """

    gate_activation: Literal["gelu", "sigmoid"] = "gelu"
    gate_input: Literal["x", "conv1d"] = "x"  # the normalised tokens, or the forward keys after their Conv1d
    gate_bias: bool = False
    out_bias: bool = False  # bias of the output projection
    # the Conv1d layers of the design `gating`
    conv1d_arrival: Literal["key_with_gate", "query_with_gate", "together"] = "key_with_gate"
    conv1d_kernel: Literal[4, 3] = 4  # tokens
    conv1d_bias: bool = True
    conv1d_count: Literal[2, 1] = 2  # one for the keys and one for the queries of a direction, or one for both
    dwconv_place: Literal["before_norm", "after_norm"] = "before_norm"
    dwconv_residual: bool = True
    dwconv_bias: bool = False
    # a class token skips the 2-D convolution, or passes it as an image of one pixel
    dwconv_class_tokens: Literal["skip", "one_pixel"] = "skip"
    post_norm: Literal["merged", "per_direction", "none"] = "merged"
    post_norm_place: Literal["before_gate", "after_gate"] = "before_gate"
    residual: Literal["stream", "normalised"] = "stream"  # the tokens that the mixer's output is added to
    learning_rate: Literal["shared", "per_direction"] = "shared"
    eta_base: float = 1.0
    inner_norm: Literal["per_direction", "shared"] = "per_direction"  # γ, μ and the start bias b0
    inner_target: Literal["v_minus_k", "v"] = "v_minus_k"
    inner_residual: bool = True  # whether q is added to the inner model's output
    token_scale: Literal["per_direction", "shared", "fixed"] = "per_direction"  # sharing of δ; `fixed` has none
    token_scale_start: Literal["reciprocal", "one"] = "reciprocal"  # c[j] at the start of training: 1/(j+1), or 1
    w0_std: float = 0.02
    rotary: Literal["none", "chunk"] = "none"  # `chunk` applies RoPE to q and k by the index in the chunk
    positions: Literal["patches", "patches_and_class", "none"] = "patches"  # the rows of the position embedding
    swiglu_bias: bool = True

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value, hint = getattr(self, field.name), hints[field.name]
            known = (False, True) if hint is bool else typing.get_args(hint)
            if known and not any(value == each and type(value) is type(each) for each in known):
                raise ValueError(f"reading: {field.name}={value}: expected one of {', '.join(map(_write, known))}")
            if hint is float and not (type(value) in (int, float) and 0 < value < float("inf")):
                raise ValueError(f"reading: {field.name}={value}: expected a number above 0")

    def __str__(self) -> str:
        changed = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        }
        return ",".join(f"{name}={_write(value)}" for name, value in changed.items())

    @classmethod
    def of(cls, value: Self | str | Mapping[str, Any]) -> Self:
        """Convert text or a mapping of switches to values to a `Reading`; a `Reading` is returned unchanged.

        Raises:
            ValueError: an unknown switch, or a value that the switch does not have.
        """
        if isinstance(value, cls):
            return value
        given = dict(value) if isinstance(value, Mapping) else dict(map(_split, filter(None, value.split(","))))
        hints = typing.get_type_hints(cls)
        if unknown := [name for name in given if name not in hints]:
            raise ValueError(f"reading: {unknown[0]}: no such switch{did_you_mean(unknown[0], hints)}")
        return cls(
            **{name: _read(text, hints[name]) if isinstance(text, str) else text for name, text in given.items()}
        )


def _split(part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not equals:
        raise ValueError(f"reading: {part!r}: expected switch=value, several of them separated by commas")
    return name.strip(), value.strip()


def _read(text: str, hint: Any) -> Any:
    """Parse a value; text that is no value of the switch is returned, and the class then refuses it."""
    if hint is float:
        try:
            return float(text)
        except ValueError:
            return text
    known = (False, True) if hint is bool else typing.get_args(hint)
    return next((each for each in known if _write(each) == text), text)


def _write(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).removesuffix(".0")
