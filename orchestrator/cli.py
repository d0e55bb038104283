"""The command line: Hydra composes, then one of five things happens.

A sweep or a single cell runs, ``dry_run=true`` prints its plan, ``from_file=`` runs a stored cell again, ``relog=``
rebuilds the tracking store from disk. Whatever is wrong with what was written is one message and exit code 2.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from conf.schema import COMMAND_KEYS, Config
from orchestrator.expand import Cell, CommandLine, base_config, expand, flatten, named

CONFIG_DIR = Path(conf.__file__).resolve().parent
CONFIG_NAME = "config"
EXIT_USAGE = 2

_MULTIRUN_HINT = (
    "-m (multirun) is not used here: a sweep is one command that shares engines between its cells. "
    "Use +sweep=NAME, or give an axis as key=a,b,c or sweep.grid.key=[a,b,c]"
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
    config_dir: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """What Hydra made of the command line."""

    cfg: DictConfig
    command: CommandLine
    compose: Callable[[list[str]], DictConfig]
    sweep_option: str | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2: something on the command line or in a file cannot be run)."""
    try:
        return _main(sys.argv[1:] if argv is None else list(argv))
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return EXIT_USAGE


def _main(argv: list[str]) -> int:
    ConfigStore.instance().store(name="schema", node=Config)
    if _answered_by_hydra(argv):
        hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=CONFIG_NAME)(_nothing)()
        return 0
    arguments = parse(argv)
    with _hydra(arguments):
        todo = _prepare(_composed(arguments))
    return todo()


def _answered_by_hydra(argv: Sequence[str]) -> bool:
    """Help, tab completion and printed configurations are Hydra's own."""
    args = get_args_parser().parse_args(argv)
    return bool(args.help or args.hydra_help or args.shell_completion or args.cfg or args.info)


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
    config_dir = None if args.config_dir is None else Path(args.config_dir).absolute()
    if config_dir is not None and not config_dir.is_dir():
        raise UsageError(f"--config-dir must be an existing folder, got {str(config_dir)!r}")
    axes = _axes(args.overrides)
    return Arguments(
        overrides=tuple(text for text in args.overrides if text not in axes),
        axes={override.key_or_group: _choices(override) for override in axes.values()},
        config_name=args.config_name or CONFIG_NAME,
        config_dir=config_dir,
    )


def _axes(overrides: Sequence[str]) -> dict[str, Override]:
    """The overrides that list several values, by their text."""
    parsed = {text: _parsed(text) for text in overrides}
    return {text: override for text, override in parsed.items() if override.is_sweep_override()}


def _parsed(text: str) -> Override:
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
def _hydra(arguments: Arguments) -> Iterator[None]:
    """Hydra's search path: the user's folder before ours."""
    folder = arguments.config_dir or CONFIG_DIR
    with hydra.initialize_config_dir(str(folder), version_base="1.3", job_name="servelab"):
        yield


def _composed(arguments: Arguments) -> Composed:
    ours = [] if arguments.config_dir is None else [f"hydra.searchpath=['file://{CONFIG_DIR}']"]

    def compose(lines: Sequence[str]) -> DictConfig:
        return hydra.compose(arguments.config_name, [*lines, *ours], return_hydra_config=True)

    cfg = compose(arguments.overrides)
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
        compose=lambda lines: _ours(compose(lines)),
        sweep_option=choices.get("sweep"),
    )


def _ours(cfg: DictConfig) -> DictConfig:
    with open_dict(cfg):
        cfg.pop("hydra")
    return cfg


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
    cells = expand(composed.cfg, composed.compose, command=composed.command)
    default = composed.sweep_option or ("adhoc" if len(cells) > 1 else "single")
    cells, config = named(cells, config, default=default)
    if config.dry_run:
        return lambda: _dry_run(cells, config)

    def run() -> int:
        from orchestrator.run import run_sweep

        return run_sweep(cells, config)

    return run


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
    if config.dry_run:
        return lambda: _dry_run(cells, config)

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
    cell = cast("DictConfig", OmegaConf.merge(OmegaConf.structured(Config), loaded))
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
    if override.is_delete():
        raise UsageError(f"from_file takes values, not deletions, got {override.input_line}")
    if key in composed.command.groups:
        cell[key] = OmegaConf.select(composed.cfg, key)
        return
    with open_dict(cell):
        OmegaConf.update(cell, key, override.value(), merge=True)


def explain(error: Exception) -> str:
    """One message, on one screen, without Hydra's own advice."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
    lines = [line.rstrip() for part in (error, cause) if part for line in str(part).splitlines()]
    noise = (
        "See https://hydra.cc",
        "Set the environment variable",
        "To append to your config",
        "Config search path",
    )
    return "\n".join(line for line in lines if line and not line.strip().startswith(noise))
