"""The command line: Hydra composes, then one of five things happens.

A sweep or a single cell runs, ``dry_run=true`` prints its plan, ``from_file=`` runs a stored cell again, ``relog=``
rebuilds the tracking store from disk. Whatever is wrong with what was written is one message and exit code 2.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

import conf
from conf.schema import COMMAND_KEYS, Config
from orchestrator.expand import CommandLine, base_config, expand, flatten, named

CONFIG_DIR = Path(conf.__file__).resolve().parent
CONFIG_NAME = "config"
EXIT_USAGE = 2

# A configuration given by --config-name lacks our own hydra settings: leave no outputs folder, log nothing.
_QUIET = (
    "hydra.output_subdir=null",
    "hydra.run.dir=.",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
_MULTIRUN_HINT = (
    "-m (multirun) is not used here: a sweep is one command that shares engines between its cells. "
    "Use +sweep=NAME, or give an axis as key=a,b,c or sweep.grid.key=[a,b,c]"
)


class UsageError(ValueError):
    """What the user wrote cannot be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The command line, with ``key=a,b`` taken out as axes."""

    argv: tuple[str, ...]  # what Hydra gets
    axes: Mapping[str, Sequence[Any]]
    config_name: str | None
    runs: bool  # False: help, completion and the like, which Hydra answers by itself


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
    arguments = parse(argv)
    todo = _hydra(arguments, _prepare)
    return todo() if todo is not None else 0


def parse(argv: Sequence[str]) -> Arguments:
    """Read the command line before Hydra does.

    Raises:
        UsageError: multirun, or an override that cannot be read; the message names it.
    """
    args = get_args_parser().parse_args(list(argv))
    if args.multirun:
        raise UsageError(_MULTIRUN_HINT)
    runs = not (args.help or args.hydra_help or args.shell_completion or args.cfg or args.info)
    axes = _axes(args.overrides) if runs else {}
    quiet = _QUIET if args.config_name not in {None, CONFIG_NAME} else ()
    left = [word for word in argv if word not in axes]
    return Arguments(
        argv=(*left, *quiet),
        axes={override.key_or_group: _choices(override) for override in axes.values()},
        config_name=args.config_name,
        runs=runs,
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


def _hydra(
    arguments: Arguments, prepare: Callable[[Composed], Callable[[], int]]
) -> Callable[[], int] | None:
    """Let Hydra compose (or answer --help and the like); what is to be done then runs outside of Hydra."""
    todo: list[Callable[[], int]] = []

    def task(cfg: DictConfig) -> None:
        try:
            todo.append(prepare(_composed(cfg, arguments)))
        except (ValueError, HydraException, OmegaConfBaseException) as error:
            todo.append(_raiser(error))

    run = hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=CONFIG_NAME)(task)
    with _exceptions_raised(), _argv(arguments.argv):
        run()
    return todo[0] if todo else None


def _raiser(error: Exception) -> Callable[[], int]:
    def fail() -> int:
        raise error

    return fail


@contextmanager
def _exceptions_raised() -> Iterator[None]:
    """Make Hydra raise instead of printing its own report and leaving the process."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


@contextmanager
def _argv(words: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = [before[0], *words]
    try:
        yield
    finally:
        sys.argv = before


def _composed(cfg: DictConfig, arguments: Arguments) -> Composed:
    settings = HydraConfig.get()
    overrides = tuple(settings.overrides.task)
    choices = settings.runtime.choices
    groups = frozenset(group for group in choices if not group.startswith("hydra") and group != "sweep")
    parsed = [_parsed(text) for text in overrides]
    config_name = arguments.config_name or CONFIG_NAME
    return Composed(
        cfg=cfg,
        command=CommandLine(
            overrides=overrides,
            keys=frozenset(key for override in parsed for key in _keys(override)),
            axes=arguments.axes,
            groups=groups,
            cwd=Path(settings.runtime.cwd),
        ),
        compose=lambda lines: hydra.compose(config_name, overrides=lines),
        sweep_option=choices.get("sweep"),
    )


def _keys(override: Override) -> list[str]:
    """The dotted keys an override sets; a map sets the keys in it."""
    value = override.value()
    if isinstance(value, dict) and value:
        return list(flatten({override.key_or_group: value}))
    return [override.key_or_group]


def _prepare(composed: Composed) -> Callable[[], int]:
    """Everything that can be wrong with what the user wrote, and then what to do."""
    config = base_config(composed.cfg, cwd=composed.command.cwd)
    if config.from_file is not None and config.relog is not None:
        raise UsageError("from_file and relog are two commands; give one of them")
    if config.relog is not None:
        return _relog(config, composed.command.cwd)
    if config.from_file is not None:
        return _rerun(composed, config)
    return _sweep(composed, config)


def _sweep(composed: Composed, config: Config) -> Callable[[], int]:
    cells = expand(composed.cfg, composed.compose, command=composed.command)
    default = composed.sweep_option or ("adhoc" if len(cells) > 1 else "single")
    cells, config = named(cells, config, default=default)
    if config.dry_run:
        return lambda: _dry_run(cells, config)

    def run() -> int:
        from orchestrator.run import run_sweep

        return run_sweep(cells, config)

    return run


def _dry_run(cells: Sequence[Any], config: Config) -> int:
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


def _relog(config: Config, cwd: Path) -> Callable[[], int]:
    folder = cwd / Path(str(config.relog)).expanduser()
    if not folder.is_dir():
        raise UsageError(f"relog must be an existing folder of runs, got {str(folder)!r}")

    def run() -> int:
        from orchestrator.relog import relog

        return relog(folder, config.tracking)

    return run


def _rerun(composed: Composed, config: Config) -> Callable[[], int]:
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
