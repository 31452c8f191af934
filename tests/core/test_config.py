import dataclasses
import json
import random
import re
import typing
from typing import Annotated, Literal

import pytest
import yaml

from repro.core.config import Each, bounded, build, list_values, load_section, load_yaml, params_hash, section_keys
from repro.core.errors import UserError
from repro.core.runtime import Runtime
from repro.data.kinds import KINDS
from repro.data.manifest import Manifest
from repro.papers.vision_ttt.readings import Choice
from repro.papers.vision_ttt.readings_page import FixedChoice
from repro.report.ledger import Ledger
from repro.report.paper import About, Suite, VariantTable
from repro.runs.tune import TuneParams
from stages import load_stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = bounded(0.5, ge=0, le=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    epochs: int = bounded(ge=1)
    lr: float = bounded(1e-3, gt=0)
    name: str = "x"
    flip: bool = False
    clip: float | None = bounded(None, gt=0)
    backend: Literal["torch", "triton"] = "torch"
    either: str | int = "x"
    sizes: tuple[Annotated[int, Each(ge=1)], ...] = (1,)
    inner: Inner = dataclasses.field(default_factory=Inner)
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    parts: dict[str, Inner] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == "forbidden":
            raise ValueError("name: 'forbidden' is taken")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "params.yaml"


def load(path, text):
    path.write_text("stage:\n  cell: {" + text + "}\n")
    return load_section(Params, path, "stage", "cell")


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("lr: 1e-3", "lr", 0.001),  # YAML 1.1 would read a string
        ("lr: 5.e-4", "lr", 0.0005),
        ("lr: 2", "lr", 2.0),
        ("clip: 3", "clip", 3.0),
        ("either: 2", "either", 2),
        ("either: '2'", "either", "2"),
        ("sizes: [3, 4]", "sizes", (3, 4)),
        ("inner: {rate: 1}", "inner", Inner(rate=1.0)),
        ("parts: {a: {rate: 0}}", "parts", {"a": Inner(rate=0.0)}),
        ("name: '1e-3'", "name", "1e-3"),
    ],
)
def test_values(path, text, field, value):
    found = getattr(load(path, f"epochs: 3, {text}"), field)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: 1, epoch: 2", r"stage\.cell\.epoch: unknown key; did you mean 'epochs'\?"),
        ("epoch: 2", r"stage\.cell\.epoch: unknown key; did you mean 'epochs'\?"),  # and `epochs` is missing
        ("epochs: 1, colour: 2", r"stage\.cell\.colour: unknown key; known: epochs, lr, .*, parts$"),
        ("lr: 1", r"stage\.cell\.epochs: missing"),
        ("epochs: 0", r"stage\.cell\.epochs: .* 1, got int 0$"),
        ("epochs: '1'", r"stage\.cell\.epochs: .*integer, got str '1'$"),
        ("epochs: 1.5", r"stage\.cell\.epochs: .*integer, got float 1\.5$"),
        ("epochs: true", r"stage\.cell\.epochs: .*integer, got bool True$"),
        ("epochs: 1, lr: .nan", r"stage\.cell\.lr: nan .*finite"),
        ("epochs: 1, lr: 1e999", r"stage\.cell\.lr: inf .*finite"),
        ("epochs: 1, rates: {a: [.nan]}", r"stage\.cell\.rates\.a\[0\]: nan .*finite"),
        ("epochs: 1, lr: 0", r"stage\.cell\.lr: .* 0, got int 0$"),
        ("epochs: 1, name: 2001-01-01", r"stage\.cell\.name: .*text.*, got date .*2001.*quote"),
        ("epochs: 1, name: !!binary aGk=", r"stage\.cell\.name: .*text.*, got bytes b'hi'"),
        ("epochs: 1, 3: 4", r"stage\.cell\.3: .*text, got int 3; quote"),
        ("epochs: 1, clip: -1", r"stage\.cell\.clip: .* 0, got int -1$"),
        ("epochs: 1, backend: tritn", r"backend: .*'torch' or 'triton', got str 'tritn'; did you mean 'triton'\?"),
        ("epochs: 1, either: [1]", r"stage\.cell\.either: .*string or .*integer, got list \[1\]$"),
        ("epochs: 1, sizes: 3", r"stage\.cell\.sizes: .*list, got int 3$"),
        ("epochs: 1, sizes: [2, 0]", r"stage\.cell\.sizes\[1\]: .* 1, got int 0$"),
        ("epochs: 1, parts: {a: {rate: -1}}", r"stage\.cell\.parts\.a\.rate: .* 0, got int -1$"),
        ("epochs: 1, parts: {a: {rat: 1}}", r"stage\.cell\.parts\.a\.rat: unknown key; did you mean 'rate'\?"),
        ("epochs: 1, parts: [1]", r"stage\.cell\.parts: .*mapping, got list \[1\]$"),
        ("epochs: 1, name: forbidden", r"stage\.cell\.name: 'forbidden' is taken"),
        ("epochs: 1, epochs: 2", r"params\.yaml:2: not valid YAML: key 'epochs' is there twice"),
        ("{a: 1}: 2", r"params\.yaml:2: not valid YAML: found unhashable key"),
        ("epochs: [", r"params\.yaml:\d+: not valid YAML"),
        ("epochs: " + "x" * 900, r"stage\.cell\.epochs: .*integer, got str 'xxx"),
    ],
)
def test_errors_name_the_key_and_what_is_allowed(path, text, message):
    with pytest.raises(UserError, match=message) as caught:
        load(path, text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 300 and caught.value.exit_code == 2


def _list_dataclasses(hint):
    """Yield every dataclass that a type holds."""
    if dataclasses.is_dataclass(hint):
        yield hint
    inner = typing.get_type_hints(hint).values() if dataclasses.is_dataclass(hint) else typing.get_args(hint)
    for each in inner:
        yield from _list_dataclasses(each)


READ = {
    *(stage.params for stage in load_stages().values() if stage.params is not None),
    *(kind.settings for kind in KINDS.values() if kind.settings is not None),
    *(About, Choice, FixedChoice, Ledger, Manifest, Runtime, Suite, TuneParams, VariantTable),
}


def test_no_class_that_is_read_has_a_type_that_is_read_loosely():
    for cls in {cls for read in READ for cls in _list_dataclasses(read)}:
        with pytest.raises(UserError, match=r"^x\.unheard_of: unknown key"):
            build(cls, {"unheard_of": 1}, "x")
        hints = typing.get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(cls):
            name, text = f"{cls.__name__}.{field.name}", str(hints[field.name])
            assert not re.search(r"Literal\[[^\]]*\b\d", text), f"{name}: pydantic takes true for 1"
            if field.metadata:
                assert "tuple" not in text, f"{name}: bounds of a tuple are Annotated[..., Each(...)]"


def test_a_mapping_takes_over_another_and_overrides_it(path):
    path.write_text("first: &first {epochs: 1, name: a}\nsecond: {<<: *first, epochs: 2}\n")
    assert load_yaml(path)["second"] == {"epochs": 2, "name": "a"}
    path.write_text("first: &first {epochs: 1}\nsecond: {<<: *first, epochs: 2, epochs: 3}\n")
    with pytest.raises(UserError, match="key 'epochs' is there twice"):
        load_yaml(path)


def _nest(first: bytes, part: bytes) -> bytes:
    """Ten lines, each of which names the one before nine times."""
    rows = [b"%c: &%c " % (98 + row, 98 + row) + part % b",".join([b"*%c" % (97 + row)] * 9) for row in range(10)]
    return b"\n".join([b"a: &a " + first, *rows])


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ("a: 1".encode("utf-16"), ":1: not UTF-8"),
        (b"a: 1\n# caf\xe9\nb: 2", ":2: not UTF-8"),
        (b"a: 1\nb: 2001-99-99", ":2: "),
        (b"a: 1\nb: !!int q", ":2: "),
        (b"a: 1\nb: " + b"1" * 5000, ":2: "),
        (b"a: 1\nb: 0x" + b"f" * 5000, ":2: .*64 bits"),
        (b'a: 1\nb: "\\U99999999"', ":2: "),
        (b'a: 1\nb: "\\ud800"', ":2: "),
        (b"a: 1\nb: " + b"[" * 3000 + b"]" * 3000, ": .*deep"),
        (b"a: 1\nb: " + b"[" * 1_000_000, ": .*deep"),
        (b"a: 1\nb: &b [*b]", ":2: .*itself"),
        (b"a: 1\nb: &b {<<: *b}", ":2: .*itself"),
        (_nest(b"[x]", b"[%s]"), r":\d+: .*aliases"),
        (_nest(b"{x: 1}", b"{<<: [%s]}"), r":\d+: .*aliases"),
        (b"", ": expected a mapping, got nothing"),
        (None, ": no such file"),
    ],
    ids=lambda each: repr(each and each[:24]),
)
def test_any_file_is_read_or_is_one_line(path, content, where):
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"params\.yaml" + where) as caught:
        load_yaml(path)
    assert "\n" not in str(caught.value)


def test_flipped_bytes_are_read_or_are_one_line(path):
    rng = random.Random(0)
    for _ in range(150):
        content = b'a: &a {b: 2001-01-01, c: !!int 3}\nd: [*a, 1e-3, !!float 2, 0x1f]\ne: {<<: *a, f: "\\u00e9"}\n'
        content = bytearray(content)
        for _ in range(3):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content)
        try:
            load_yaml(path)
        except UserError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)


def test_a_file_may_be_a_list_or_hold_text_alone(path):
    path.write_text("[1.50, yes]")
    assert load_yaml(path, list) == [1.5, True] and load_yaml(path, list, as_text=True) == ["1.50", "yes"]


def test_sections(path):
    path.write_text("stage:\n  second: {epochs: 1}\n  first: {epochs: 2}\nempty:\nscalar: 3\n")
    assert section_keys(path, "stage") == ["second", "first"]
    assert load_section(Params, path, "stage", "first").epochs == 2
    with pytest.raises(UserError, match=r"stage\.fist: no such section; did you mean 'first'\?"):
        load_section(Params, path, "stage", "fist")
    with pytest.raises(UserError, match=r"scalar\.x: no such section"):
        load_section(Params, path, "scalar", "x")
    for section in ("empty", "scalar", "absent"):
        with pytest.raises(UserError, match=f"{section}: expected a mapping of cells"):
            section_keys(path, section)


@pytest.mark.parametrize(("old", "new"), [("baselines", "pretrain"), ("by_hand", "ablate")])
def test_a_section_of_an_older_file_is_refused_with_its_successor(path, old, new):
    path.write_text(json.dumps({"pretrain": {}, old: {"cell": {}}}))
    with pytest.raises(UserError, match=f"{old}: .*`{new}`"):
        section_keys(path, "pretrain")


def test_hash_follows_values_and_not_their_order():
    base = build(Params, {"epochs": 3, "lr": 0.1}, "x")
    assert params_hash(base) == params_hash(build(Params, {"lr": 0.1, "epochs": 3, "flip": False}, "x"))
    assert params_hash(base) != params_hash(build(Params, {"lr": 0.2, "epochs": 3}, "x"))
    assert params_hash(base) != params_hash(build(Params, {"lr": 0.1, "epochs": 3, "inner": {"rate": 0.1}}, "x"))


def test_a_newer_field_without_a_value_changes_neither_hash_nor_record():
    newer = dataclasses.make_dataclass("Newer", [("rate", float), ("crop_padding", int | None)])
    older, unused, used = ({"inner": inner} for inner in (Inner(rate=0.5), newer(0.5, None), newer(0.5, 0)))
    holders = [dataclasses.make_dataclass("Holder", each)(**each) for each in (older, unused, used)]
    assert list_values(holders[0]) == list_values(holders[1]) == {"inner": {"rate": 0.5}}
    assert list_values(holders[2]) == {"inner": {"rate": 0.5, "crop_padding": 0}}
    assert params_hash(holders[0]) == params_hash(holders[1]) != params_hash(holders[2])


def test_other_readers_of_yaml_keep_their_numbers(tmp_path):
    file = tmp_path / "params.yaml"
    file.write_text("lr: 1e-3")
    assert load_yaml(file) == {"lr": 1e-3} and yaml.safe_load("lr: 1e-3") == {"lr": "1e-3"}  # YAML 1.2, and 1.1
