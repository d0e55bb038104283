"""The cache folder that all runs of a user share, and how processes take turns in it.

``environments/`` engine builds · ``locks/`` their resolved requirements · ``models/`` converted weights.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Progress = Callable[[str], None]

REPORT_EVERY_S = 10.0


def cache_root(cache_dir: str | None, *, environ: Mapping[str, str] = os.environ) -> Path:
    """``cache_dir`` as an absolute path, or ``servelab`` in the user's cache folder. Creates nothing."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    # A relative XDG_CACHE_HOME is to be ignored (XDG Base Directory Specification).
    base = xdg if xdg.is_absolute() else Path.home() / ".cache"
    return base / "servelab"


@contextmanager
def locked(path: Path, *, what: str, progress: Progress, poll_s: float = 0.2) -> Iterator[int]:
    """Hold the lock file ``path`` over the block; yields its descriptor.

    A process that is given the descriptor keeps the lock until it ends too, so that an installer which
    outlives its killed parent is never joined by a second one. ``what`` names the lock while waiting.
    """
    descriptor = _open_lock(path)
    try:
        _acquire(descriptor, what=what, progress=progress, poll_s=poll_s)
        yield descriptor
    finally:
        # Closing, not LOCK_UN: unlocking would take the lock away from children that still run.
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(
            f"the cache folder {path.parent} cannot be written ({error.strerror}); "
            "name another with cache_dir=FOLDER"
        ) from error


def _acquire(descriptor: int, *, what: str, progress: Progress, poll_s: float) -> None:
    start = time.monotonic()
    next_report = 0.0
    while not _try_lock(descriptor):
        waited = time.monotonic() - start
        if waited >= next_report:
            progress(f"waiting for another process: {what}, {waited:.0f} s")
            next_report += REPORT_EVERY_S
        time.sleep(poll_s)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_text(path: Path, text: str) -> None:
    """Write ``path`` whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` as JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in ``path``; ``None`` when there is none or it is torn."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None
