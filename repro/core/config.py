"""Parameters of params.yaml, loaded strictly into one frozen dataclass per section, and the profiles (sets of them).

A stage owns its dataclass and receives only its own section, so the `params:` list in dvc.yaml is true by construction.
Unknown keys, wrong types and values out of range raise a `UserError` that names the key path, the value and the allowed
values.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
import typing
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from .errors import UserError, did_you_mean
from .hashing import short_hash
from .paths import Paths

_MOST_OPENED = 50_000  # the most brackets of a file: libyaml recurses on the C stack for each
_MOST_NODES = 1_000_000  # the most nodes of a file with expanded aliases; the largest file here has 12,000


class _TextLoader(yaml.CSafeLoader):
    """A loader that reads every scalar as text, so that printed digits survive.

    Duplicate keys and scalars that give no Python value are errors. A mapping may merge another one (`<<: *anchor`) and
    override its keys.
    """

    yaml_implicit_resolvers: ClassVar = {"<": [("tag:yaml.org,2002:merge", re.compile(r"^<<$"))]}

    def get_single_node(self):
        """Return the file's tree, and refuse aliases whose expansion is endless or too large."""
        root = super().get_single_node()
        if root is not None:
            self._count_nodes(root, {})
        return root

    def construct_object(self, node, deep=False):
        """Return a node's value; any exception on an odd scalar becomes an error with its line."""
        try:
            value = super().construct_object(node, deep=deep)
            if isinstance(value, str):
                value.encode("utf-8")  # refuses half a surrogate pair, which no file could hold
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            raise _refuse(node, f"{node.value!r:.40} is not a valid {node.tag.rpartition(':')[2]}") from None
        if type(value) is int and abs(value) >= 2**63:
            raise _refuse(node, "an integer of more than 64 bits; quote it if it is text")
        return value

    def construct_mapping(self, node, deep=False):
        """Return a mapping; a repeated key is an error."""
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, Hashable):
                continue  # refused by the base class
            if key in seen:
                raise _refuse(key_node, f"key {key!r} is there twice; remove one")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def _count_nodes(self, node, counts: dict[int, int]) -> int:
        """Count the nodes of this subtree with expanded aliases.

        `counts` has the count of each finished node by its id, and 0 for nodes on the way down, which shows a cycle.
        """
        if id(node) not in counts:
            counts[id(node)] = 0
            parts = () if isinstance(node, yaml.ScalarNode) else node.value
            inner = itertools.chain.from_iterable(parts) if isinstance(node, yaml.MappingNode) else parts
            counts[id(node)] = 1 + sum(self._count_nodes(part, counts) for part in inner)
        if not counts[id(node)]:
            raise _refuse(node, "an anchor that holds itself")
        if counts[id(node)] > _MOST_NODES:
            raise _refuse(node, f"aliases make more than {_MOST_NODES:,} values")
        return counts[id(node)]


class _Loader(_TextLoader):
    """A loader with the numbers of YAML 1.2, like DVC's: `1e-3` is a float, which YAML 1.1 reads as a string."""

    # copies, since PyYAML's own lists are those of all its loaders and dumpers
    yaml_implicit_resolvers: ClassVar = {
        first: [*each] for first, each in yaml.CSafeLoader.yaml_implicit_resolvers.items()
    }


def _refuse(node: yaml.Node, problem: str) -> yaml.YAMLError:
    """Return the error for a node, which the caller raises; `load_yaml` puts file and line before the problem."""
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def bounded(
    default: Any = dataclasses.MISSING, *, ge: float | None = None, gt: float | None = None, le: float | None = None
) -> Any:
    """Make a dataclass field whose number must be >= `ge`, > `gt` and <= `le`; None is exempt.

    A field without a default is required. The metadata's keys are pydantic's names; it ignores any other, and then
    nothing checks the bound.
    """
    return dataclasses.field(default=default, metadata={"ge": ge, "gt": gt, "le": le})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Each:
    """The bounds of the numbers in a tuple: `tuple[Annotated[int, Each(ge=1)], ...]`; see `bounded`."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Add the bounds to pydantic's schema of the number, whose keys are the names of these fields."""
        return handler(source) | {name: bound for name, bound in vars(self).items() if bound is not None}


# words in pydantic's messages -> words of arithmetic and YAML
_WORDS = {"greater than or equal to": ">=", "less than or equal to": "<=", "greater than": ">"}
_WORDS |= {"a valid array": "a list", "an object": "a mapping"}
# fields that were added after records existed; left out while None, so that old hashes stay valid. A new field that is
# not here changes the hash of each old record and saved state. Both tuples hold in every dataclass, at any depth
_NEWER = ("crop_padding", "crop_mode")
_UNHASHED = ("family",)  # names the golden losses that DVC watches; it does not affect the training
# section of older files -> advice for its cells
_MOVED = {
    "baselines": "move its cells to `pretrain`, and write artifacts/pretrain/ for results/baselines/",
    "by_hand": "move its cells to `ablate`, or to `ablate_detect`, `ablate_segment` or `ablate_generate`",
}


def load_yaml(path: Path, top: type[dict] | type[list] = dict, *, as_text: bool = False) -> Any:
    """Parse a YAML file that holds a mapping or, with `top`, a list; `as_text` leaves every scalar a string.

    Raises:
        UserError: the file is missing, empty, not UTF-8, or not valid YAML; the message names the file and the line.
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8; save the file in that encoding") from None
    if text.count("[") + text.count("{") > _MOST_OPENED:
        raise UserError(f"{path}: not valid YAML: nested too deeply")
    try:
        found = (_TextLoader if as_text else _Loader)(text).get_single_data()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(
            f"{path}:{line}: not valid YAML: {chr(error.character)!r} is a character that it cannot hold"
        ) from None
    except yaml.MarkedYAMLError as error:
        raise UserError(f"{path}:{error.problem_mark.line + 1}: not valid YAML: {error.problem}") from None
    except (RecursionError, ValueError, OverflowError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{path}: not valid YAML: {problem}") from None
    if not isinstance(found, top):
        raise UserError(
            f"{path}: expected a {'mapping' if top is dict else 'list'}, got {'nothing' if found is None else _show(found)}"
        )
    return found


def build(cls: type, data: Any, where: str) -> Any:
    """Build a dataclass and its nested ones strictly from parsed YAML or JSON; `where` is its key path for messages.

    Fields may have the types that pydantic reads from JSON, except a Literal of numbers: pydantic would also accept
    `true` and `1.0` for it.

    Raises:
        UserError: an unknown or missing key, a wrong type, a value out of range, a value that JSON does not have (a
            date, NaN, a number as a key), or a ValueError of a class's own `__post_init__`. If its message begins with
            `<field>:`, that field is added to the key path; any other exception loses the path.
    """
    from pydantic import ValidationError

    _require_json(data, where)
    try:
        # through JSON, because pydantic's strict mode refuses a Python list for a tuple
        return _make_adapter(cls).validate_json(json.dumps({where: data}))[where]
    except ValidationError as failure:
        raise UserError(_explain(failure.errors(include_url=False), {where: data}, cls)) from None


def load_sections(params_path: Path) -> dict[str, Any]:
    """Load the sections of a params file.

    Raises:
        UserError: as `load_yaml`; or the file has a section that another one replaced.
    """
    data = load_yaml(params_path)
    for old, new in _MOVED.items():
        if old in data:
            raise UserError(f"{params_path}: {old}: is no section any more; {new}")
    return data


def load_section(cls: type, params_path: Path, *keys: str) -> Any:
    """Load the section at the key path `keys` of a params file as an instance of `cls`; see `build`."""
    data = load_sections(params_path)
    for depth, key in enumerate(keys, 1):
        present = data if isinstance(data, Mapping) else {}
        if key not in present:
            raise UserError(f"{params_path}: {'.'.join(keys[:depth])}: no such section{did_you_mean(key, present)}")
        data = present[key]
    return build(cls, data, ".".join(keys))


def section_keys(params_path: Path, section: str) -> list[str]:
    """Return the names of a section's cells in the file's order; none if the section is `{}`."""
    cells = load_sections(params_path).get(section)
    if not isinstance(cells, Mapping):
        raise UserError(f"{params_path}: {section}: expected a mapping of cells, or {{}} without one")
    return [str(name) for name in cells]


DEFAULT_PROFILE = "mini"  # the profile of params.yaml in a fresh checkout


def list_profiles(paths: Paths) -> list[str]:
    """Return the names of the profiles in alphabetical order."""
    return sorted(path.stem for path in paths.profiles.glob("*.yaml"))


def find_profile(paths: Paths, name: str) -> Path:
    """Return the file of a profile; raise a UserError for an unknown name."""
    known = list_profiles(paths)
    if name not in known:
        raise UserError(f"profile {name}: no such profile{did_you_mean(name, known)}")
    return paths.profiles / f"{name}.yaml"


def load_profiles(paths: Paths) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the content of each profile in alphabetical order; raises as `load_yaml`."""
    for name in list_profiles(paths):
        yield name, load_yaml(find_profile(paths, name))


def list_cells(paths: Paths, section: str) -> list[str]:
    """Return the names of a section's cells; raise a UserError that names a profile which has some where it has none."""
    if names := section_keys(paths.params, section):
        return names
    filled = next((profile for profile, content in load_profiles(paths) if content.get(section)), None)
    hint = f", or `repro profile use {filled}`, which has some" if filled else ""
    raise UserError(f"{paths.params}: {section}: has no cell; add one{hint}")


def active_profile(paths: Paths) -> str | None:
    """Return the profile with the values of params.yaml; None after an edit."""
    current = load_yaml(paths.params)
    return next((name for name, content in load_profiles(paths) if content == current), None)


def list_values(config: Any) -> dict[str, Any]:
    """Return the values of a dataclass as nested dicts, for hashes and records.

    A `_NEWER` field is included only if it has a value, a field of `_UNHASHED` never.
    """

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        known = {name: value for name, value in pairs if name not in _UNHASHED}
        return {name: value for name, value in known.items() if value is not None or name not in _NEWER}

    return dataclasses.asdict(config, dict_factory=keep)


def params_hash(config: Any) -> str:
    """Return the first 16 hex digits of the SHA-256 of a dataclass's values as sorted JSON; see `list_values`."""
    return short_hash(json.dumps(list_values(config), sort_keys=True, default=str))


@functools.cache
def _make_adapter(cls: type) -> Any:
    """Make the reader of {key path: value of `cls`}; pydantic applies the mapping's config to every dataclass in it."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(dict[str, cls], config=ConfigDict(strict=True, extra="forbid"))


def _require_json(value: Any, where: str) -> None:
    """Raise a UserError with the key path for a value that `json.dumps` refuses or changes, such as a date or a key 1."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str):
                raise UserError(f"{where}.{key}: expected a key that is text, got {_show(key)}; quote it")
            _require_json(part, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            _require_json(part, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: {value} is not a finite number")
    elif not isinstance(value, str | int | float | None):
        raise UserError(f"{where}: expected text or a number, got {_show(value)}; quote it if it is text")


def _explain(errors: list[Any], data: Any, cls: type) -> str:
    """Describe the first of pydantic's errors; an unknown key comes first, as it may be a misspelt missing one."""
    error = min(errors, key=lambda each: each["type"] != "unexpected_keyword_argument")
    top, *keys = _find_keys(error, data)
    where = top + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    if error["type"] == "unexpected_keyword_argument":
        return f"{where}: unknown key{did_you_mean(keys[-1], _list_fields(cls, keys[:-1]))}"
    if error["type"] == "missing":
        return f"{where}: missing; give it a value"
    if error["type"] == "value_error":  # raised by a `__post_init__`
        said = str(error["ctx"]["error"])
        return f"{where}{'.' if said.partition(':')[0] in error['input'] else ': '}{said}"
    # each member of a union reports its own error: join what they allow
    allowed = [
        each["msg"].removeprefix("Input should be ") for each in errors if _find_keys(each, data) == [top, *keys]
    ]
    expected = " or ".join(allowed)
    for theirs, ours in _WORDS.items():
        expected = expected.replace(theirs, ours)
    close = did_you_mean(error["input"], re.findall("'(.*?)'", expected))
    return f"{where}: expected {expected}, got {_show(error['input'])}{close if 'did you mean' in close else ''}"


def _find_keys(error: Any, data: Any) -> list[Any]:
    """Return the keys that lead to an error, without the members of unions that pydantic's `loc` has among them."""
    keys = []
    for key in error["loc"]:
        try:
            data = data[key]
        except (LookupError, TypeError):
            if error["type"] != "missing":
                continue
        keys.append(key)
    return keys


def _list_fields(cls: type, keys: list[Any]) -> list[str]:
    """Return the fields of the dataclass at a key path within `cls`."""
    for key in keys:
        cls = _find_dataclass(typing.get_type_hints(cls).get(key)) or cls
    return [field.name for field in dataclasses.fields(cls)]


def _find_dataclass(hint: Any) -> Any:
    """Return the first dataclass in a type, such as that of `dict[str, Digits] | None`; None without one."""
    inner = map(_find_dataclass, typing.get_args(hint))
    return hint if dataclasses.is_dataclass(hint) else next(filter(None, inner), None)


def _show(value: Any) -> str:
    """Return the type and the value, cut to 60 characters, for a message."""
    return f"{type(value).__name__} {value!r:.60}" if value is not None else "nothing (null)"
