import dataclasses
import json
import random
from typing import Literal

import pytest

from repro.core.config import bounded, build, list_values, load_section, load_yaml, params_hash, section_keys
from repro.core.errors import UserError


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
    order: Literal[1, 2] = 1
    sizes: tuple[int, ...] = bounded((1,), ge=1)
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
        ("lr: 1E+2", "lr", 100.0),
        ("lr: 5.e-4", "lr", 0.0005),
        ("lr: 2", "lr", 2.0),
        ("clip: null", "clip", None),
        ("clip: 3", "clip", 3.0),
        ("backend: triton", "backend", "triton"),
        ("order: 2", "order", 2),
        ("sizes: [3, 4]", "sizes", (3, 4)),
        ("flip: true", "flip", True),
        ("inner: {rate: 1}", "inner", Inner(rate=1.0)),
        ("rates: {a: 1, 2: 0.5}", "rates", {"a": 1.0, "2": 0.5}),
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
        ("lr: 1", r"stage\.cell\.epochs: missing; give it a value"),
        ("epochs: 0", r"stage\.cell\.epochs: 0 is out of range, must be >= 1"),
        ("epochs: 1.5", r"stage\.cell\.epochs: expected int, got float 1\.5"),
        ("epochs: true", r"stage\.cell\.epochs: expected int, got bool True"),
        ("epochs: null", r"stage\.cell\.epochs: expected int, got nothing \(null\)"),
        ("epochs: 1, lr: .nan", r"stage\.cell\.lr: nan is not a finite number"),
        ("epochs: 1, lr: 0", r"stage\.cell\.lr: 0\.0 is out of range, must be > 0"),
        ("epochs: 1, lr: true", r"stage\.cell\.lr: expected float, got bool True"),
        ("epochs: 1, flip: 1", r"stage\.cell\.flip: expected bool, got int 1"),
        ("epochs: 1, clip: -1", r"stage\.cell\.clip: -1\.0 is out of range"),
        ("epochs: 1, backend: tritn", r"backend: str 'tritn' is not one of torch, triton; did you mean 'triton'\?"),
        ("epochs: 1, order: true", r"stage\.cell\.order: bool True is not one of 1, 2"),
        ("epochs: 1, sizes: 3", r"stage\.cell\.sizes: expected a list, got int 3"),
        ("epochs: 1, sizes: [2, 0]", r"stage\.cell\.sizes: 0 is out of range"),
        ("epochs: 1, sizes: [2, x]", r"stage\.cell\.sizes\[1\]: expected int, got str 'x'"),
        ("epochs: 1, inner: {rat: 1}", r"stage\.cell\.inner\.rat: unknown key; did you mean 'rate'\?"),
        ("epochs: 1, inner: {rate: 2}", r"stage\.cell\.inner\.rate: 2\.0 is out of range, must be <= 1"),
        ("epochs: 1, inner: 3", r"stage\.cell\.inner: expected a mapping, got int 3"),
        ("epochs: 1, rates: {a: b}", r"stage\.cell\.rates\.a: expected float"),
        ("epochs: 1, parts: {a: {rate: -1}}", r"stage\.cell\.parts\.a\.rate: -1\.0 is out of range"),
        ("epochs: 1, name: forbidden", r"stage\.cell: name: 'forbidden' is taken"),
        ("epochs: 1, epochs: 2", r"params\.yaml:2: not valid YAML: key 'epochs' is there twice"),
        ("{a: 1}: 2", r"params\.yaml:2: not valid YAML: found unhashable key"),
        ("epochs: [", r"params\.yaml:\d+: not valid YAML"),
    ],
)
def test_errors_name_the_key_and_what_is_allowed(path, text, message):
    with pytest.raises(UserError, match=message) as caught:
        load(path, text)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


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
        (b"a: 1\nb: '\x07'", ":2: "),
        (b"a: 1\nb: 2001-99-99", ":2: "),
        (b"a: 1\nb: !!int q", ":2: "),
        (b"a: 1\nb: !!timestamp q", ":2: "),
        (b"a: 1\nb: !!bool q", ":2: "),
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
        (b"[1]", ": expected a mapping"),
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
    with pytest.raises(UserError, match=r"stag: no such section; did you mean 'stage'\?"):
        load_section(Params, path, "stag")
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
