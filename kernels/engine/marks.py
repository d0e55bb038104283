"""A file per engine process, in a folder whose name travels in the environment: evidence that needs no server."""

import json
import os
from pathlib import Path

from .source import LOADED_SHA256

VARIABLE = "SERVELAB_MARKS"


def mark() -> None:
    """Say that this process has installed the plugin; nothing without the folder's name."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / f"{os.getpid()}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"pid": os.getpid(), "plugin_sha256": LOADED_SHA256}))
    partial.replace(path)


def read_marks(folder: Path) -> list[dict[str, object]]:
    """Every whole mark, by pid."""
    found = []
    for path in folder.glob("*.json"):
        try:
            mark = json.loads(path.read_text())
        except (OSError, ValueError):
            continue  # not ours
        if isinstance(mark, dict):
            found.append(mark)
    return sorted(found, key=lambda mark: str(mark.get("pid")))
