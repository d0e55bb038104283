"""The package installer, uv, told what pip has been told.

uv reads none of pip's settings. Those that say where packages come from are handed on as uv's own environment
variables (not as arguments, which other users of the host can see).
"""

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import uv

from workers.cache import REPORT_EVERY_S, Progress
from workers.errors import EnvironmentBrokenError

# pip setting → (uv variable, separator between several values)
UV_VARIABLES = {
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "no-index": ("UV_NO_INDEX", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
# pip's name of a setting where it differs from the one above.
ALIASES = {"default-timeout": "timeout", "pypi-url": "index-url"}
# Lowest rank first, as pip ranks them: every command, this command, the environment.
SECTIONS = ("global", "install", ":env:")


class Run(Protocol):
    """Runs one process to its end."""

    def __call__(
        self, argv: Sequence[str], *, env: Mapping[str, str], keep: int, tick: Callable[[float], None]
    ) -> subprocess.CompletedProcess[str]: ...


def run_process(
    argv: Sequence[str], *, env: Mapping[str, str], keep: int, tick: Callable[[float], None]
) -> subprocess.CompletedProcess[str]:
    """Run ``argv`` to its end, calling ``tick`` with the seconds so far every ten seconds.

    ``keep`` is the descriptor of a held lock, which the process shares. The process does not outlive an
    exception in this one.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        list(argv), env=dict(env), pass_fds=(keep,), text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        try:
            stdout, stderr = _communicate(process, start=start, tick=tick)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _communicate(
    process: subprocess.Popen[str], *, start: float, tick: Callable[[float], None]
) -> tuple[str, str]:
    while True:
        try:
            return process.communicate(timeout=REPORT_EVERY_S)
        except subprocess.TimeoutExpired:
            tick(time.monotonic() - start)


def uv_binary() -> str:
    """The path of uv. Raises EnvironmentBrokenError if the package ``uv`` has none."""
    try:
        return os.fspath(uv.find_uv_bin())
    except FileNotFoundError as error:
        raise EnvironmentBrokenError(
            f"uv, which builds the engine environments, is not there ({error}); "
            f"install it: {sys.executable} -m pip install uv"
        ) from error


def pip_settings(listing: str, *, environ: Mapping[str, str]) -> dict[str, str]:
    """Settings of pip by name, e.g. ``{"find-links": "/wheels /more"}``.

    ``listing`` is the text of ``pip config list`` (empty when there is no pip); the ``PIP_*`` variables of
    ``environ`` outrank it, as they do for pip.
    """
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listing.splitlines():
        match = re.fullmatch(r"(:?[\w-]+:?)\.([\w-]+)=(.+)", line.strip())
        if match and match[1] in found:
            found[match[1]][_setting(match[2])] = _unquote(match[3])
    found[":env:"].update(
        {_setting(name[4:]): value for name, value in environ.items() if name.startswith("PIP_") and value}
    )
    return {name: value for section in SECTIONS for name, value in found[section].items()}


def _setting(name: str) -> str:
    name = name.lower().replace("_", "-")
    return ALIASES.get(name, name)


def _unquote(text: str) -> str:
    try:
        return str(ast.literal_eval(text))
    except (SyntaxError, ValueError):
        return text


def uv_variables(settings: Mapping[str, str], *, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for uv: ``environ`` with pip's settings in uv's words.

    A variable of uv that is already set wins. All indexes count equally, as for pip: a project's own wheel in
    an extra index is found even when the first index knows another version.
    """
    result = {
        name: value
        for name, value in environ.items()
        if name not in {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"}
    }
    result["UV_NO_PROGRESS"] = "1"
    for setting, (variable, separator) in UV_VARIABLES.items():
        if setting in settings:
            result.setdefault(variable, separator.join(settings[setting].split()))
    result.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    return result


def installer_environment(*, progress: Progress, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for uv on this host, from ``PIP_*`` and pip's own configuration."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        progress(
            "pip is not installed beside this program: its configuration files are not read, "
            "only PIP_* and UV_* variables say where packages come from"
        )
    text = listing.stdout if listing.returncode == 0 else ""
    return uv_variables(pip_settings(text, environ=environ), environ=environ)


def last_lines(text: str, *, count: int = 15) -> str:
    """The last ``count`` lines of a program's output that hold anything."""
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])
