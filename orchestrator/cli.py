"""The command line: Hydra composes, then one of six things happens.

A sweep or a single cell runs, ``dry_run=true`` prints its plan, ``check=true`` looks whether this machine can run it,
``from_file=`` runs a stored cell again, ``relog=`` rebuilds the tracking store from disk. Whatever is wrong with what
was written is one message and exit code 2.
"""

import gc
import string
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

import conf
from conf.keys import convert, find, plain
from conf.schema import COMMAND_KEYS, Config
from orchestrator.expand import Cell, CommandLine, base_config, expand, flatten, named, under_schema
from workers.errors import ServelabError

CONFIG_DIR = Path(conf.__file__).resolve().parent
CONFIG_NAME = "config"
EXIT_USAGE = 2
EXIT_WORLD = 1
EXIT_INTERRUPTED = 130

_MULTIRUN_HINT = (
    "-m (multirun) is not used here: a sweep is one command that shares engines between its cells. "
    "Use +sweep=NAME, or give an axis as key=a,b,c or sweep.grid.key=[a,b,c]"
)

# Lines of Hydra's and OmegaConf's messages that do not help here.
_NOISE = (
    "See https:",
    "Set the environment",
    "Config search path",
    "provider=",
    "reference_type=",
    "object_type=",
)

# What is left to do once everything that was written has been read; returns the exit code.
Todo = Callable[[], int]


class UsageError(ValueError):
    """What the user wrote cannot be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The command line; ``key=a,b`` is taken out of the overrides, as an axis."""

    overrides: tuple[str, ...]
    axes: Mapping[str, Sequence[Any]]
    config_name: str = CONFIG_NAME
    folders: tuple[Path, ...] = (
        CONFIG_DIR,
    )  # Hydra's search path; the first holds the primary configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """What Hydra made of the command line."""

    cfg: DictConfig
    command: CommandLine
    compose: Callable[[list[str]], DictConfig]
    sweep_option: str | None
    folders: tuple[Path, ...]  # where group options are looked up, first match wins


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    2: something on the command line or in a file cannot be run. 1: the world does not let it run (a tracking store
    that does not answer, a damaged result, a sweep in use), or a cell failed. 130: ended by Ctrl-C.
    """
    try:
        return _main(sys.argv[1:] if argv is None else list(argv))
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return EXIT_USAGE
    except ServelabError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_WORLD
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _main(argv: list[str]) -> int:
    args = get_args_parser().parse_args(argv)
    if args.help:
        print(help_text(_folders(args.config_dir, config_name=CONFIG_NAME)))
        return 0
    register_schema()
    if args.hydra_help or args.shell_completion or args.cfg or args.info:
        hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=CONFIG_NAME)(_nothing)()
        return 0
    with _no_collection():
        arguments = parse(argv)
        with search_path(arguments):
            todo = _prepare(compose(arguments))
    return todo()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Composing makes many small objects and leaves little garbage: a sixth of its time would go into looking."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@cache
def register_schema() -> None:
    """Let Hydra know the typed schema, the first entry of the defaults list."""
    ConfigStore.instance().store(name="schema", node=Config)


def help_text(folders: Sequence[Path]) -> str:
    """The help template of ``config.yaml`` with the groups found in ``folders``.

    Hydra's own rendering copies the whole configuration once per option, which takes seconds.
    """
    options: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/*.yaml"):
            options.setdefault(path.parent.name, set()).add(path.stem)
    groups = "\n".join(f"{group}: {', '.join(sorted(options[group]))}" for group in sorted(options))
    template = OmegaConf.load(CONFIG_DIR / f"{CONFIG_NAME}.yaml").hydra.help.template
    return string.Template(template).substitute(APP_CONFIG_GROUPS=f"{groups}\n")


def _folders(config_dir: str | None, *, config_name: str) -> tuple[Path, ...]:
    """Our folder and the user's; the user's is first only if the primary configuration is in it."""
    if config_dir is None:
        return (CONFIG_DIR,)
    folder = Path(config_dir).absolute()
    if not folder.is_dir():
        raise UsageError(f"--config-dir must be an existing folder, got {str(folder)!r}")
    for path in folder.glob("*/*.yaml"):
        if (CONFIG_DIR / path.relative_to(folder)).exists():
            raise UsageError(f"{path} has the name of a built-in option, which would win; rename it")
    ours = (CONFIG_DIR / f"{config_name}.yaml").exists()
    return (CONFIG_DIR, folder) if ours else (folder, CONFIG_DIR)


def _nothing(_: DictConfig) -> None:
    """The task of a command that only prints."""


def parse(argv: Sequence[str]) -> Arguments:
    """Read the command line.

    Raises:
        UsageError: multirun, a flag that has no use here, or an override that cannot be read; named.
    """
    args = get_args_parser().parse_args(argv)
    if args.multirun:
        raise UsageError(_MULTIRUN_HINT)
    if args.config_path or args.package or args.resolve or args.experimental_rerun:
        raise UsageError(
            "of Hydra's flags only --config-dir, --config-name, --cfg, --info and -sc are used here"
        )
    parsed = {text: _parsed(text) for text in args.overrides}
    axes = {text: override for text, override in parsed.items() if override.is_sweep_override()}
    for text, override in parsed.items():
        if text not in axes:
            _check(override)
    return Arguments(
        overrides=tuple(text for text in args.overrides if text not in axes),
        axes={override.key_or_group: _choices(override) for override in axes.values()},
        config_name=args.config_name or CONFIG_NAME,
        folders=_folders(args.config_dir, config_name=args.config_name or CONFIG_NAME),
    )


def _check(override: Override) -> None:
    """Refuse an unknown key or a wrong type in our own words; groups and Hydra's settings are left to Hydra."""
    key, value = override.key_or_group, override.value()
    if override.is_delete():
        raise UsageError(
            f"{override.input_line}: keys cannot be deleted; give a value, or null where it is allowed"
        )
    if key.startswith("hydra") or "/" in key or "@" in key:
        return
    if key.startswith("sweep.grid."):
        find(key.removeprefix("sweep.grid."))
        return
    entries = flatten({key: value}) if isinstance(value, dict) and value else {key: value}
    for name, entry in entries.items():
        if not find(name).is_section and not (isinstance(entry, str) and "${" in entry):
            convert(find(name), entry)


def _parsed(text: str) -> Override:
    if "=" not in text and not text.startswith("~"):
        raise UsageError(f"cannot read {text!r}: an override is key=value or group=option")
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except HydraException as error:
        detail = str(error.__cause__ or error).splitlines()[0]
        raise UsageError(
            f"cannot read the override {text}: {detail}. Put a value with special characters in quotes for "
            f"Hydra too: 'key=\"value\"'"
        ) from error
    return override


def _choices(override: Override) -> list[Any]:
    sweep = override.value()
    if not isinstance(sweep, ChoiceSweep):
        raise UsageError(
            f"{override.input_line}: give the values of an axis one by one, as {override.key_or_group}=a,b,c"
        )
    values = cast("list[Any]", sweep.list)
    return [Override._convert_value(value) for value in values]  # noqa: SLF001 - the parser's own unquoting


@contextmanager
def search_path(arguments: Arguments) -> Iterator[None]:
    """Hydra's search path while configurations are composed."""
    with hydra.initialize_config_dir(str(arguments.folders[0]), version_base="1.3", job_name="servelab"):
        yield


def compose(arguments: Arguments) -> Composed:
    """Compose the configuration of a command; within :func:`search_path`."""
    compose_lines = _composer(arguments)
    cfg = compose_lines(arguments.overrides)
    choices = cfg.hydra.runtime.choices
    parsed = [_parsed(text) for text in arguments.overrides]
    command = CommandLine(
        overrides=arguments.overrides,
        keys=frozenset(key for override in parsed for key in _keys(override)),
        axes=arguments.axes,
        groups=frozenset(group for group in choices if not group.startswith("hydra") and group != "sweep"),
        cwd=Path.cwd(),
    )
    return Composed(
        cfg=_ours(cfg),
        command=command,
        compose=lambda lines: _ours(compose_lines(lines)),
        sweep_option=choices.get("sweep"),
        folders=arguments.folders,
    )


def _composer(arguments: Arguments) -> Callable[[Sequence[str]], DictConfig]:
    paths = ",".join(f"'file://{folder}'" for folder in arguments.folders[1:])
    more = [f"hydra.searchpath=[{paths}]"] if paths else []
    stored = arguments.config_name != CONFIG_NAME

    def compose_lines(lines: Sequence[str]) -> DictConfig:
        lines = [_added(line) for line in lines] if stored else lines
        return hydra.compose(arguments.config_name, [*lines, *more], return_hydra_config=True)

    return compose_lines


def _added(line: str) -> str:
    """An override that may also add its key: a stored cell has no schema yet, and need not hold every key."""
    override = _parsed(line)
    key = override.key_or_group
    if override.is_add() or override.is_force_add() or "/" in key or key.startswith("hydra"):
        return line
    return line if find(key).is_section else f"++{line}"


def _ours(cfg: DictConfig) -> DictConfig:
    with open_dict(cfg):
        cfg.pop("hydra")
    return under_schema(cfg)


def _check_overruled(composed: Composed) -> None:
    """Refuse a group option from the command line of which the sweep, whose values win, would leave little."""
    chosen = [_parsed(text) for text in composed.command.overrides]
    sweep = OmegaConf.to_container(composed.cfg.sweep, resolve=True)
    axes = set(flatten(cast("dict[str, Any]", sweep)["grid"])) - composed.command.axes.keys()
    for override in chosen:
        group, option = override.key_or_group, str(override.value())
        if group not in composed.command.groups:
            continue
        for key, value in _option_values(group, option, composed.folders).items():
            if key in composed.command.keys or "${" in str(value):
                continue
            if key in axes or OmegaConf.select(composed.cfg, key) != convert(find(key), value):
                raise UsageError(
                    f"{group}={option} sets {key}, but so does sweep={composed.sweep_option}, which wins; "
                    f"set keys instead, for instance {key}={plain(value)}"
                )


def _option_values(group: str, option: str, folders: Sequence[Path]) -> dict[str, Any]:
    paths = [path for folder in folders if (path := folder / group / f"{option}.yaml").is_file()]
    if not paths:
        return {}
    values = OmegaConf.to_container(OmegaConf.load(paths[0]), resolve=False)
    return flatten(
        {group: {key: value for key, value in cast("dict[str, Any]", values).items() if key != "defaults"}}
    )


def _keys(override: Override) -> list[str]:
    """The dotted keys an override sets; a map sets the keys in it."""
    value = override.value()
    if isinstance(value, dict) and value:
        return list(flatten({override.key_or_group: value}))
    return [override.key_or_group]


def _prepare(composed: Composed) -> Todo:
    """Everything that can be wrong with what the user wrote, and then what to do."""
    config = base_config(composed.cfg, cwd=composed.command.cwd)
    if config.from_file is not None and config.relog is not None:
        raise UsageError("from_file and relog are two commands; give one of them")
    if config.relog is not None:
        return _relog(config, composed.command.cwd)
    if config.from_file is not None:
        return _rerun(composed, config)
    return _sweep(composed, config)


def _sweep(composed: Composed, config: Config) -> Todo:
    if composed.sweep_option is not None:
        _check_overruled(composed)
    cells = expand(composed.cfg, composed.compose, command=composed.command)
    default = composed.sweep_option or ("adhoc" if len(cells) > 1 else "single")
    cells, config = named(cells, config, default=default)
    if (look := _look(cells, config)) is not None:
        return look

    def run() -> int:
        from orchestrator.run import run_sweep

        return run_sweep(cells, config)

    return run


def _look(cells: Sequence[Cell], config: Config) -> Todo | None:
    """What a command that only looks does; None if it runs the cells."""
    if config.check:
        return lambda: _check_machine(cells, config)
    return (lambda: _dry_run(cells, config)) if config.dry_run else None


def _check_machine(cells: Sequence[Cell], config: Config) -> int:
    from orchestrator.check import check_machine

    return check_machine(cells, config)


def _dry_run(cells: Sequence[Cell], config: Config) -> int:
    from rich.console import Console

    from orchestrator.plan import plan, render
    from workers.cache import cache_root
    from workers.environment import is_ready

    cache = cache_root(config.cache_dir)
    todo = plan(
        cells,
        seed=config.seed,
        shuffle=config.sweep.shuffle,
        is_ready=lambda engine, kind: is_ready(engine, kind=kind, cache=cache),
    )
    console = Console()
    console.print(f"sweep {config.sweep.name} → {Path(config.runs_dir) / str(config.sweep.name)}")
    console.print(render(todo))
    return 0


def _relog(config: Config, cwd: Path) -> Todo:
    folder = cwd / Path(str(config.relog)).expanduser()
    if not folder.is_dir():
        raise UsageError(f"relog must be an existing folder of runs, got {str(folder)!r}")

    def run() -> int:
        from orchestrator.relog import relog

        return relog(folder, config.tracking)

    return run


def _rerun(composed: Composed, config: Config) -> Todo:
    path = composed.command.cwd / Path(str(config.from_file)).expanduser()
    cfg = stored_cell(path, composed)
    command = replace(composed.command, axes={}, overrides=(), keys=frozenset(), groups=frozenset())
    if composed.command.axes:
        raise UsageError(f"from_file runs one cell, got the axes {', '.join(composed.command.axes)}")
    cells = expand(cfg, composed.compose, command=command)
    cells, config = named(cells, base_config(cfg, cwd=command.cwd), default="rerun")
    if (look := _look(cells, config)) is not None:
        return look

    def run() -> int:
        from orchestrator.rerun import rerun

        return rerun(cells[0], config, original=path)

    return run


def stored_cell(path: Path, composed: Composed) -> DictConfig:
    """A stored cell with this command's overrides on top; how it runs is said by the command, not by the file.

    Raises:
        ValueError: no such file, not a cell, an unknown key, a value of the wrong type.
    """
    if not path.is_file():
        raise UsageError(f"from_file must be an existing cell.yaml, got {str(path)!r}")
    loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig):
        raise UsageError(f"from_file must be a cell.yaml, got a list in {str(path)!r}")
    for key in (*COMMAND_KEYS, "hydra"):
        loaded.pop(key, None)
    cell = under_schema(loaded, where=str(path))
    command = OmegaConf.masked_copy(composed.cfg, [key for key in COMMAND_KEYS if key != "sweep"])
    cell = cast("DictConfig", OmegaConf.merge(cell, command))
    cell.sweep.name = composed.cfg.sweep.name
    for text in composed.command.overrides:
        _put(cell, _parsed(text), composed)
    return cell


def _put(cell: DictConfig, override: Override, composed: Composed) -> None:
    key = override.key_or_group
    if key == "sweep" or (key.startswith("sweep.") and key != "sweep.name"):
        raise UsageError(f"from_file runs one cell, got {override.input_line}")
    if key in composed.command.groups:
        cell[key] = OmegaConf.select(composed.cfg, key)
        return
    with open_dict(cell):
        OmegaConf.update(cell, key, override.value(), merge=True)


def explain(error: Exception) -> str:
    """One message, on one screen, without Hydra's own advice."""
    parts = [error]
    if isinstance(error, HydraException) and isinstance(error.__cause__, OmegaConfBaseException):
        parts.append(error.__cause__)
    lines = [line.rstrip() for part in parts for line in str(part).splitlines()]
    return "\n".join(line for line in lines if line and not line.strip().startswith(_NOISE))
