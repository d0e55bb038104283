"""Cells and configurations from a command line, without running anything."""

from orchestrator import cli
from orchestrator.expand import base_config, expand


def cells_of(*argv):
    """The cells a command line expands to."""
    cli.register_schema()
    arguments = cli.parse(argv)
    with cli.search_path(arguments):
        composed = cli.compose(arguments)
        return expand(composed.cfg, composed.compose, command=composed.command)


def config_of(*argv):
    """The configuration a command line composes, axes not applied."""
    cli.register_schema()
    arguments = cli.parse(argv)
    with cli.search_path(arguments):
        composed = cli.compose(arguments)
        return base_config(composed.cfg, cwd=composed.command.cwd)
