"""Ray's settings that must stand in the environment before Ray is imported: its core reads them once."""

import os
import sys
from collections.abc import MutableMapping

DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",  # as Ray ships; named, so that it does not warn
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set; nothing where Ray has been imported already, since half of it would notice."""
    if "ray" in sys.modules:
        return
    for name, value in DEFAULTS.items():
        environ.setdefault(name, value)
