"""Dotted keys of the configuration: what they name, what type and range they have, how to set one.

``load.rate_per_s`` names a field, ``workload.input`` a section, ``engine.env.NAME`` an entry of a free map.
"""

import dataclasses
import types
import typing
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, cast

from omegaconf import MISSING, Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.schema import Config

_SCALARS = (str, int, float, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One dotted key: its declared type and the bounds written in the schema."""

    name: str
    annotation: Any
    bounds: Mapping[str, Any]
    in_map: bool = False  # an entry of a free map, whose name is the user's own

    @property
    def is_section(self) -> bool:
        """True if the key names a dataclass rather than a value."""
        return dataclasses.is_dataclass(self.annotation)

    @property
    def wants(self) -> str:
        """The type in words, for messages."""
        return _in_words(self.annotation)


@cache
def fields_of(section: Any) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Name → (type, bounds) of every field of a configuration dataclass, in declared order."""
    hints = typing.get_type_hints(section)
    return {field.name: (hints[field.name], field.metadata) for field in dataclasses.fields(section)}


def find(name: str, *, where: str = "") -> Key:
    """Look a dotted key up in the schema.

    Raises:
        ValueError: no such key; the message lists the allowed ones.
    """
    annotation: Any = Config
    bounds: Mapping[str, Any] = {}
    in_map = False
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if not dataclasses.is_dataclass(annotation):
            annotation, bounds, in_map = _entry(annotation, name=name, where=where), {}, True
            continue
        known = fields_of(cast("Hashable", annotation))
        if part not in known:
            inside = ".".join(parts[:depth]) or "the configuration"
            raise ValueError(
                f"unknown key {name!r}: {inside} has no {part!r}, allowed: {', '.join(known)}{_suffix(where)}"
            )
        annotation, bounds = known[part]
    return Key(name=name, annotation=annotation, bounds=bounds, in_map=in_map)


def convert(key: Key, value: Any, *, where: str = "") -> Any:
    """``value`` as the type the schema declares: enum members, floats, sections built on the schema's defaults.

    Raises:
        ValueError: the value is not of that type. Text fields take text only (``0.30`` would become ``"0.3"``), but
            entries of a free map, such as environment variables, also take integers.
    """
    if key.in_map and type(value) is int and _is_text(key.annotation):
        value = str(value)
    if _is_text(key.annotation) and not isinstance(value, str | None):
        raise ValueError(f"{key.name} must be text, got {value!r}: quote it{_suffix(where)}")
    try:
        if key.is_section:
            return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(key.annotation), value))
        node = _holder(key.annotation)
        node.value = value
        result = node.value
        return OmegaConf.to_object(result) if isinstance(result, Container) else result
    except OmegaConfBaseException as error:
        detail = f" ({str(error).splitlines()[0]})" if key.is_section else ""
        raise ValueError(f"{key.name} must be {key.wants}, got {value!r}{detail}{_suffix(where)}") from error


def get(config: Any, name: str) -> Any:
    """The value a dotted key has in a configuration; ``None`` for an absent entry of a free map."""
    for part in name.split("."):
        config = config.get(part) if isinstance(config, dict) else getattr(config, part)
    return config


def replaced(config: Any, name: str, value: Any) -> Any:
    """A copy of ``config`` in which one key has another value; everything off its path is shared."""
    head, _, rest = name.partition(".")
    if isinstance(config, dict):
        return {**config, head: value}
    # What copy.copy does, at a sixth of its time: it is called for every axis of every cell.
    result = object.__new__(type(config))
    result.__dict__.update(config.__dict__)
    setattr(result, head, replaced(getattr(config, head), rest, value) if rest else value)
    return result


def plain(value: Any) -> Any:
    """A typed value as JSON-like data: enum members by name, sections as maps."""
    if value is None or type(value) in _SCALARS:
        return value
    if isinstance(value, Enum):
        return value.name
    if dataclasses.is_dataclass(value):
        return {name: plain(getattr(value, name)) for name in fields_of(type(value))}  # type: ignore[arg-type]
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return value


@cache
def _holder(annotation: Any) -> Any:
    """A typed node to assign to; kept, because making one costs ten times an assignment."""
    holder = dataclasses.make_dataclass("Holder", [("value", annotation, dataclasses.field(default=MISSING))])
    return OmegaConf.structured(holder)


def _entry(annotation: Any, *, name: str, where: str) -> Any:
    if annotation is Any:
        return Any
    if typing.get_origin(annotation) is not dict:
        raise ValueError(f"unknown key {name!r}: it goes on below a plain value{_suffix(where)}")
    return typing.get_args(annotation)[1]


def _options(annotation: Any) -> tuple[Any, ...]:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return typing.get_args(annotation)
    return (annotation,)


def _is_text(annotation: Any) -> bool:
    return str in _options(annotation)


def _in_words(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"one of {', '.join(annotation.__members__)}"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if dataclasses.is_dataclass(annotation):
        return f"a section with the keys {', '.join(fields_of(cast('Hashable', annotation)))}"
    return " or ".join(words.get(option, str(option)) for option in _options(annotation))


def _suffix(where: str) -> str:
    return f" ({where})" if where else ""
