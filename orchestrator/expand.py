"""From a composed configuration with ``sweep.grid`` to cells.

A factor is one axis, or the axes of one ``zip`` entry, with its points; the cells are the product of all factors,
less ``exclude``, times ``repeats``. A top-level axis named like a group chooses options of that group, and the
configuration is composed once per combination of options; every other axis sets a typed value on the result.
"""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from conf.keys import Key, convert, find, get, plain, replaced
from conf.schema import COMMAND_KEYS, Config
from conf.validate import check_ranges, check_sweep_name, check_together, check_value
from orchestrator.identity import Memo, cell_key
from workers.families import family
from workers.overlay import plugin_sha256
from workers.settings import check_axis, check_environment, check_options

# Composes the configuration from override lines, e.g. ["+sweep=smoke", "engine=vllm_0_31"].
Compose = Callable[[list[str]], DictConfig]

# Bytes of the readable part of a folder name; the key behind it makes it unique.
MAX_SLUG = 120

# Paths the user wrote; relative ones are meant from where the command was given.
_PATH_KEYS = ("model.path", "workload.path", "load.trace.path", "runs_dir", "cache_dir")
_NO_AXIS = {
    "repeat": "use sweep.repeats",
    "sentinel": "use sweep.sentinels",
    **dict.fromkeys(COMMAND_KEYS, "it says how a command runs, not what a cell measures"),
}
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of a sweep. Cells share the unchanged sections of ``config``: treat it as read-only."""

    config: Config
    axes: Mapping[str, Any]  # dotted axis → plain typed value; a group axis → its option
    key: str
    folder: str  # readable, safe, unique: <slug>-<key>


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What the command line said that expansion must know."""

    overrides: tuple[str, ...] = ()  # lines for composing again, e.g. "load.num_requests=9"
    keys: frozenset[str] = frozenset()  # the dotted keys those lines set: they replace axes
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # "key=a,b": axes of their own
    groups: frozenset[str] = frozenset()  # names of configuration groups
    cwd: Path = field(default_factory=Path.cwd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """Axes that advance together, with their points (one value per axis each)."""

    axes: tuple[str, ...]
    points: tuple[tuple[Any, ...], ...]


Point = dict[str, Any]


def expand(
    cfg: DictConfig,
    compose: Compose,
    *,
    command: CommandLine | None = None,
) -> list[Cell]:
    """Expand ``cfg.sweep`` into validated cells with distinct identities; without a grid, one cell.

    Raises:
        ValueError: an unknown key, a value of the wrong type or out of range, keys that contradict each other,
            two cells that are one measurement, an axis that nothing can confirm.
    """
    command = command or CommandLine()
    cfg = under_schema(cfg)
    sweep = cast("dict[str, Any]", OmegaConf.to_container(cfg.sweep, resolve=True))
    factors = [_typed(factor, command) for factor in _factors(sweep, command)]
    _check_axes(factors, command.groups)
    points = list(_points(factors))
    configs = _configs(cfg, compose, points, command)
    rules = [_rule(rule, command.groups) for rule in sweep["exclude"]]
    kept = [(p, c) for p, c in zip(points, configs, strict=True) if not _excluded(p, c, rules)]
    if not kept:
        raise ValueError("sweep.exclude leaves no cell")
    for point, config in kept:
        check_together(config, where=_where(point))
        check_environment(config)
    check_options([config for _, config in kept], groups=kept[0][0].keys() & command.groups)
    memo: Memo = {}
    cells = [
        _cell(point, config, key=cell_key(config, plugin_sha256=_plugin_sha256(config), memo=memo))
        for point, config in _repeated(kept, repeats=sweep["repeats"], sentinels=sweep["sentinels"])
    ]
    _check_distinct(cells)
    return cells


def _plugin_sha256(config: Config) -> str | None:
    """The sources that an engine's processes load of ours; None where its family cannot load them."""
    flag = family(config.engine).flag("plugin", engine=config.engine)
    return None if flag is None else plugin_sha256()


def base_config(cfg: DictConfig, *, cwd: Path) -> Config:
    """The composed configuration as typed objects, with absolute paths.

    Raises:
        ValueError: a required key has no value, or a value has the wrong type.
    """
    return _absolute(_objects(under_schema(cfg)), cwd)


def under_schema(cfg: DictConfig, *, where: str = "") -> DictConfig:
    """A configuration under the typed schema, which one read from a file has not met yet.

    Raises:
        ValueError: a key the schema does not have.
        omegaconf.errors.OmegaConfBaseException: a value of the wrong type.
    """
    if OmegaConf.get_type(cfg) is Config:
        return cfg
    for key in flatten(cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=False))):
        find(key, where=where)
    return cast("DictConfig", OmegaConf.merge(OmegaConf.structured(Config), cfg))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested or dotted keys to dotted keys; everything that is not a map is a leaf.

    Raises:
        ValueError: one key is written twice, once nested and once dotted.
    """
    result: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        inner = flatten(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
        twice = result.keys() & inner.keys()
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))} is written twice in one map")
        result |= inner
    return result


def _factors(sweep: Mapping[str, Any], command: CommandLine) -> list[Factor]:
    declared = [_single(axis, values) for axis, values in flatten(sweep["grid"]).items()]
    declared += [_zipped(entry) for entry in sweep["zip"]]
    given = {axis: _single(axis, values) for axis, values in command.axes.items()}
    factors = []
    for factor in declared:
        if factor.axes[0] in given and len(factor.axes) == 1:
            factors.append(given.pop(factor.axes[0]))
        elif (left := _drop(factor, command.keys | command.axes.keys())).axes:
            factors.append(left)
    return [*factors, *given.values()]


def _single(axis: str, values: Any) -> Factor:
    values = values if isinstance(values, list | tuple) else [values]
    if not values:
        raise ValueError(f"sweep axis {axis} has no values")
    return Factor(axes=(axis,), points=tuple((value,) for value in values))


def _zipped(entry: Mapping[str, Any]) -> Factor:
    columns = {axis: _single(axis, values).points for axis, values in flatten(entry).items()}
    lengths = {axis: len(points) for axis, points in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{axis} has {length}" for axis, length in lengths.items())
        raise ValueError(f"axes of one sweep.zip entry must have equally many values: {counts}")
    points = tuple(tuple(value for (value,) in row) for row in zip(*columns.values(), strict=True))
    return Factor(axes=tuple(columns), points=points)


def _drop(factor: Factor, axes: Collection[str]) -> Factor:
    keep = [position for position, axis in enumerate(factor.axes) if axis not in axes]
    return Factor(
        axes=tuple(factor.axes[position] for position in keep),
        points=tuple(tuple(point[position] for position in keep) for point in factor.points),
    )


def _typed(factor: Factor, command: CommandLine) -> Factor:
    columns = [
        [_value(axis, point[position], command) for point in factor.points]
        for position, axis in enumerate(factor.axes)
    ]
    points = tuple(zip(*columns, strict=True))
    _check_points(factor.axes, points)
    return Factor(axes=factor.axes, points=points)


def _check_points(axes: Sequence[str], points: Sequence[tuple[Any, ...]]) -> None:
    seen: dict[str, int] = {}
    for position, point in enumerate(points, start=1):
        first = seen.setdefault(repr(point), position)
        if first != position:
            raise ValueError(
                f"sweep axis {' + '.join(axes)} has the value {', '.join(str(plain(value)) for value in point)} "
                f"twice, as items {first} and {position}"
            )


def _value(axis: str, value: Any, command: CommandLine) -> Any:
    where = f"sweep axis {axis}"
    if axis in command.groups:
        if not isinstance(value, str):
            raise ValueError(f"{where} chooses options of a group by name, got {value!r}; quote it")
        return value
    key = _axis_key(axis, where=where)
    result = convert(key, value, where=where)
    check_value(key, result, where=where)
    return _absolute_path(result, command.cwd) if axis in _PATH_KEYS else result


def _axis_key(axis: str, *, where: str) -> Key:
    reason = _NO_AXIS.get(axis.partition(".")[0])
    if reason is not None:
        raise ValueError(f"{axis} cannot be an axis: {reason}")
    key = find(axis, where=where)
    check_axis(axis)
    return key


def _check_axes(factors: Sequence[Factor], groups: Collection[str]) -> None:
    axes = [axis for factor in factors for axis in factor.axes]
    for position, axis in enumerate(axes):
        if axis in axes[:position]:
            raise ValueError(f"{axis} is an axis twice; keep one of grid and zip")
        below = [other for other in axes if other.startswith(f"{axis}.") and axis not in groups]
        if below:
            raise ValueError(f"the axes {axis} and {below[0]} set the same keys; keep one of them")


def _points(factors: Sequence[Factor]) -> Iterator[Point]:
    axes = [axis for factor in factors for axis in factor.axes]
    for combination in itertools.product(*(factor.points for factor in factors)):
        yield dict(zip(axes, itertools.chain.from_iterable(combination), strict=True))


def _configs(
    cfg: DictConfig, compose: Compose, points: Sequence[Point], command: CommandLine
) -> Iterator[Config]:
    builders: dict[tuple[str, ...], Callable[[Point], Config]] = {}
    for point in points:
        choices = tuple(f"{axis}={value}" for axis, value in point.items() if axis in command.groups)
        if choices not in builders:
            chosen = _compose(compose, choices, command) if choices else cfg
            values = [axis for axis in point if axis not in command.groups]
            builders[choices] = _builder(under_schema(chosen), values, cwd=command.cwd)
        yield builders[choices](point)


def _compose(compose: Compose, choices: Sequence[str], command: CommandLine) -> DictConfig:
    try:
        return compose([*command.overrides, *choices])
    except OmegaConfBaseException as error:
        raise ValueError(f"{' '.join(choices)}: {error}") from error


def _builder(typed: DictConfig, axes: Sequence[str], *, cwd: Path) -> Callable[[Point], Config]:
    """How one combination of group options turns a point into a configuration.

    Typed objects are made once and changed by copying the path to a key, which is a hundred times faster than
    copying an OmegaConf tree; only where an interpolation may look at an axis is the tree resolved per point.
    """
    if _axes_interpolated(typed, axes):
        return lambda point: _absolute(_resolved(typed, {axis: point[axis] for axis in axes}), cwd)
    base = _absolute(_objects(typed), cwd)
    check_ranges(base, skip=axes)
    sections = [
        (name, tuple(group))
        for name, group in itertools.groupby(sorted(axes), lambda axis: axis.split(".")[0])
    ]
    shared: dict[tuple[Any, ...], Any] = {}

    def build(point: Point) -> Config:
        config = base
        for name, group in sections:
            # Values come from one list per axis, so equal ones are the same object, and so are their sections.
            known = (name, *(id(point[axis]) for axis in group))
            if known not in shared:
                shared[known] = get(_applied(base, {axis: point[axis] for axis in group}), name)
            config = replaced(config, name, shared[known])
        return config

    return build


def _applied(base: Config, values: Mapping[str, Any]) -> Config:
    for axis, value in values.items():
        base = replaced(base, axis, value)
    return base


def _resolved(typed: DictConfig, values: Mapping[str, Any]) -> Config:
    copy = typed.copy()
    for axis, value in values.items():
        OmegaConf.update(copy, axis, value)
    config = _objects(copy)
    check_ranges(config)
    return config


def _axes_interpolated(typed: DictConfig, axes: Collection[str]) -> bool:
    parts = {part for axis in axes for part in axis.split(".")}
    texts = _interpolations(OmegaConf.to_container(typed, resolve=False))
    return any(part in text for text in texts for part in parts)


def _interpolations(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict | list):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from _interpolations(child)
    elif isinstance(tree, str) and "${" in tree:
        yield tree


def _objects(typed: DictConfig) -> Config:
    try:
        return cast("Config", OmegaConf.to_object(typed))
    except MissingMandatoryValue as error:
        missing = ", ".join(sorted(OmegaConf.missing_keys(typed)))
        raise ValueError(f"these keys need a value: {missing}") from error


def _absolute(config: Config, cwd: Path) -> Config:
    for key in _PATH_KEYS:
        config = replaced(config, key, _absolute_path(get(config, key), cwd))
    return config


def _absolute_path(path: str | None, cwd: Path) -> str | None:
    return None if path is None else str(cwd / Path(path).expanduser())


def _rule(rule: Mapping[str, Any], groups: Collection[str]) -> dict[str, list[Any]]:
    """An exclude rule: dotted key → the typed values it names."""
    where = "sweep.exclude"
    if not rule:
        raise ValueError("a rule of sweep.exclude must name at least one key")
    result = {}
    for name, value in flatten(rule).items():
        values = value if isinstance(value, list) else [value]
        result[name] = (
            values if name in groups else [convert(find(name, where=where), v, where=where) for v in values]
        )
    return result


def _excluded(point: Point, config: Config, rules: Sequence[Mapping[str, list[Any]]]) -> bool:
    return any(
        all((point[name] if name in point else get(config, name)) in values for name, values in rule.items())
        for rule in rules
    )


def _repeated(
    cells: Sequence[tuple[Point, Config]], *, repeats: int, sentinels: bool
) -> Iterator[tuple[Point, Config]]:
    """Every repeat of every cell; with sentinels, the first cell once more at either end."""
    point, first = cells[0]
    if sentinels:
        yield point, replaced(first, "sentinel", 0)
    for repeat in range(repeats):
        for axes, config in cells:
            yield axes, replaced(config, "repeat", config.repeat + repeat) if repeat else config
    if sentinels:
        yield point, replaced(first, "sentinel", 1)


def _cell(point: Point, config: Config, *, key: str) -> Cell:
    axes = {axis: plain(value) for axis, value in point.items()}
    return Cell(config=config, axes=axes, key=key, folder=folder_name(axes, config, key=key))


def _where(point: Point) -> str:
    return f"cell {_shown(point)}" if point else ""


def folder_name(axes: Mapping[str, Any], config: Config, *, key: str) -> str:
    """A folder name of at most 255 bytes from ``A-Za-z0-9._+-``: the axes' values, shortened, then the key."""
    parts = [_UNSAFE.sub("_", _text(value)) for value in axes.values()]
    parts += [f"r{config.repeat}"] if config.repeat else []
    parts += [f"sentinel{config.sentinel}"] if config.sentinel is not None else []
    slug = "-".join(parts)[:MAX_SLUG].strip(".-_")
    return f"{slug}-{key}" if slug else key


def _text(value: Any) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def _check_distinct(cells: Sequence[Cell]) -> None:
    seen: dict[str, Cell] = {}
    for cell in cells:
        other = seen.setdefault(cell.key, cell)
        if other is not cell:
            raise ValueError(
                f"two cells are the same measurement: {{{_shown(other.axes)}}} and {{{_shown(cell.axes)}}}; "
                "their axes differ in spelling, in paths to equal files, or in keys without effect"
            )


def _shown(axes: Mapping[str, Any]) -> str:
    return ", ".join(f"{axis}={plain(value)}" for axis, value in axes.items())


def named(cells: Sequence[Cell], config: Config, *, default: str) -> tuple[list[Cell], Config]:
    """Give the sweep its name: the one in ``sweep.name``, else ``default``."""
    name = config.sweep.name or default
    check_sweep_name(name)
    sweep = replace(config.sweep, name=name)
    return [replace(cell, config=replace(cell.config, sweep=sweep)) for cell in cells], replace(
        config, sweep=sweep
    )
