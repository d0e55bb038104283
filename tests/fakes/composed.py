"""Cells and configurations from a command line, without running anything."""

from hydra.core.config_store import ConfigStore

from conf.schema import Config
from orchestrator import cli
from orchestrator.expand import base_config, expand


def cells_of(*argv):
    """The cells a command line expands to."""
    ConfigStore.instance().store(name="schema", node=Config)
    arguments = cli.parse(argv)
    with cli.search_path(arguments):
        composed = cli.compose(arguments)
        return expand(composed.cfg, composed.compose, command=composed.command)


def config_of(*argv):
    """The configuration a command line composes, axes not applied."""
    ConfigStore.instance().store(name="schema", node=Config)
    arguments = cli.parse(argv)
    with cli.search_path(arguments):
        composed = cli.compose(arguments)
        return base_config(composed.cfg, cwd=composed.command.cwd)
