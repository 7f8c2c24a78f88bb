"""Strict reading of TOML tables into dataclasses, and of overrides from the command line."""

import difflib
import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

T = TypeVar("T")

Override = tuple[str, str, str | None]
"""(section, key, value as text; None for a bare flag)"""


class ConfigError(ValueError):
    """The run file or an override is wrong; the text is one sentence that names the key and the mend."""


def number(default: Any, least: float, above: bool = False) -> Any:
    """A dataclass field with a lower bound (itself excluded if ``above``), which ``load_table`` enforces."""
    return field(default=default, metadata={"least": least, "above": above})


def load_table(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """Make the dataclass ``cls`` from a TOML table.

    Args:
        cls: a dataclass whose fields are plain values, Literals, tuples or dicts of strings, or unions.
        table: the table as tomllib gives it.
        where: name of the table, for the sentences.

    Raises:
        ConfigError: unknown key (the nearest known one is named), wrong type, or a number out of range.
    """
    if not isinstance(cast(object, table), Mapping):
        raise ConfigError(f"{where} is {_shown(table)}, expected a table: write [{where}].")
    known = {f.name: f for f in fields(cast(Any, cls))}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{where}.{key} is not a known key{_nearest(key, known, where)}.")
        spec = known[key]
        converted = _convert(value, spec.type, f"{where}.{key}")
        _check_range(converted, spec.metadata, f"{where}.{key}")
        values[key] = converted
    return cls(**values)


def _nearest(key: str, known: Mapping[str, Any], where: str) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {where}.{near[0]}?" if where else f"; did you mean [{near[0]}]?"
    return f"; known are {', '.join(sorted(known))}"


def _shown(value: object) -> str:
    kinds: dict[Any, str] = {bool: "a boolean", int: "a whole number", float: "a number", str: "a string"}
    kinds |= {list: "a list", dict: "a table"}
    kind = kinds.get(type(value), "a date or time")
    text = repr(value).lower() if isinstance(value, bool) else repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind})"


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return "a list of strings" if get_args(kind)[0] is str else "a list of lists of strings"
    if get_origin(kind) is dict:
        return "a table of strings"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[kind]


def _convert(value: object, kind: Any, name: str) -> Any:
    kinds = [k for k in _alternatives(kind) if k is not types.NoneType]
    for candidate in kinds:
        accepted, converted = _accept(value, candidate)
        if accepted:
            return converted
    raise ConfigError(f"{name} is {_shown(value)}, expected {' or '.join(_expected(k) for k in kinds)}.")


def _accept(value: object, kind: Any) -> tuple[bool, Any]:
    origin = get_origin(kind)
    if origin is Literal:
        return value in get_args(kind), value
    if origin is tuple:
        if not isinstance(value, list):
            return False, value
        parts = [_accept(item, get_args(kind)[0]) for item in cast(list[object], value)]
        return all(accepted for accepted, _ in parts), tuple(converted for _, converted in parts)
    if origin is dict:
        table = cast(dict[str, object], value) if isinstance(value, dict) else {}
        return isinstance(value, dict) and all(isinstance(v, str) for v in table.values()), dict(table)
    if kind is float and type(value) is int:
        try:
            exact = float(value) == value
        except OverflowError:
            exact = False
        return exact, float(value) if exact else value
    return type(value) is kind, value  # exact: true is not a whole number


def _check_range(value: object, metadata: Mapping[str, Any], name: str) -> None:
    if "least" not in metadata or not isinstance(value, int | float):
        return
    least, above = metadata["least"], metadata["above"]
    if value < least or (above and value == least):
        raise ConfigError(
            f"{name} is {value}, but it must be {'more than' if above else 'at least'} {least}."
        )


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Split ``--section.key value``, ``--section.key=value`` and bare ``--section.key`` (a flag).

    Returns:
        (section, key, value) in order; value is None for a bare flag. Dashes in names become underscores.

    Raises:
        ConfigError: something that is none of these.
    """
    found: list[Override] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        match = re.fullmatch(r"--([A-Za-z][\w-]*)\.([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL)
        if match is None:
            raise ConfigError(f"{word!r} is not understood: write overrides as --section.key value.")
        section, key, value = match.groups()
        if value is None and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        found.append((section.replace("-", "_"), key.replace("-", "_"), value))
    return found


def override_value(text: str | None, kind: Any, name: str) -> Any:
    """Read ``text`` as the field's type would be written in TOML; strings need no quotes."""
    if text is None:
        if bool not in _alternatives(kind):
            raise ConfigError(f"--{name} needs a value.")
        return True
    try:
        value = tomllib.loads(f"value = {text.lower() if text in ('True', 'False') else text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    wants_text = str in _alternatives(kind) and int not in _alternatives(kind)
    return text if wants_text and not isinstance(value, str) else value
