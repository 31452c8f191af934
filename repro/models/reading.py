"""Interpretations of the paper: one switch of Vittt for each choice that the paper leaves open or contradicts.

For each choice, docs/readings.md quotes the paper, gives the reason for the default and states what would refute it.
"""

import contextlib
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
        for field in dataclasses.fields(self):
            value, known = getattr(self, field.name), _list_values(field)
            # of the same type, too: True == 1 and 4.0 == 4
            if known and not any(value == each and type(value) is type(each) for each in known):
                raise ValueError(f"reading: {field.name}={value}: expected one of {', '.join(map(_write, known))}")
            if field.type is float and not (type(value) in (int, float) and 0 < value < float("inf")):
                raise ValueError(f"reading: {field.name}={value}: expected a number above 0")

    def __str__(self) -> str:
        """Return the text form, which `of` reads; it is empty for the default interpretation."""
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        return ",".join(f"{field.name}={_write(value)}" for field, value in values.items() if value != field.default)

    @classmethod
    def of(cls, value: Self | str | Mapping[str, Any]) -> Self:
        """Convert text or a mapping of switches to values to a `Reading`; a `Reading` is returned unchanged.

        Raises:
            ValueError: an unknown switch, or a value that the switch does not have.
        """
        if isinstance(value, cls):
            return value
        given = dict(value) if isinstance(value, Mapping) else dict(map(_split, filter(None, value.split(","))))
        switches = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := [name for name in given if name not in switches]:
            raise ValueError(f"reading: {unknown[0]}: no such switch{did_you_mean(unknown[0], switches)}")
        return cls(
            **{name: _read(text, switches[name]) if isinstance(text, str) else text for name, text in given.items()}
        )


def _list_values(field: dataclasses.Field) -> tuple[Any, ...]:
    """Return the values that a switch can have; none for a number, which has a range instead."""
    return (False, True) if field.type is bool else typing.get_args(field.type)


def _split(part: str) -> tuple[str, str]:
    """Split `switch=value` of a reading's text into switch and value."""
    name, equals, value = part.partition("=")
    if not equals:
        raise ValueError(f"reading: {part!r}: expected switch=value, several of them separated by commas")
    return name.strip(), value.strip()


def _read(text: str, field: dataclasses.Field) -> Any:
    """Parse a switch's value; text that is no value of it is returned, and the class then refuses it."""
    if field.type is float:
        with contextlib.suppress(ValueError):
            return float(text)
    return next((each for each in _list_values(field) if _write(each) == text), text)


def _write(value: Any) -> str:
    """Return a value as the text form has it: `true` for True, and `1` for 1.0, which params.yaml may have as 1."""
    return str(value).lower() if isinstance(value, bool) else str(value).removesuffix(".0")
