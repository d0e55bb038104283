"""The plugin as the engine's processes see it: one folder on their path, named by the hash of what is in it.

The engine's environment stays as it was built. The folder holds the package ``servelab_kernels`` and its metadata
with the entry point, and nothing else: the name ``kernels`` would collide with a package that transformers probes for.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache as memoised
from pathlib import Path

import kernels
from conf.schema import Engine
from kernels.engine import marks
from kernels.engine.source import source_files, source_sha256
from workers.cache import locked
from workers.families import family

PACKAGE = "servelab_kernels"
PLUGIN_NAME = "servelab"
METADATA = f"{PACKAGE}-0.1.dist-info"
MIDDLEWARE = f"{PACKAGE}.engine.middleware.EvidenceMiddleware"
ENTRY_POINTS = f"[vllm.general_plugins]\n{PLUGIN_NAME} = {PACKAGE}.engine.plugin:register\n"
METADATA_TEXT = "Metadata-Version: 2.1\nName: servelab-kernels\nVersion: 0.1\n"

SOURCES = Path(kernels.__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """A staged plugin: the folder for the engine's path and the hash of the package's sources."""

    path: Path
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A staged plugin and how one launch takes it.

    Attributes:
        marks: a folder of this launch in which every engine process that installed the plugin leaves a file.
    """

    overlay: Overlay
    marks: Path
    flag: str

    @property
    def arguments(self) -> list[str]:
        """What the engine's command line needs."""
        return [self.flag, MIDDLEWARE]

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """``own`` with what the engine's processes need; the user's path and list of plugins are kept."""
        path = [str(self.overlay.path), *filter(None, [own.get("PYTHONPATH")])]
        added = {"PYTHONPATH": os.pathsep.join(path), marks.VARIABLE: str(self.marks)}
        if "VLLM_PLUGINS" in own:
            added["VLLM_PLUGINS"] = ",".join([*filter(None, [own["VLLM_PLUGINS"]]), PLUGIN_NAME])
        return {**own, **added}


def plugin_for(engine: Engine, *, cache: Path, folder: Path) -> Plugin | None:
    """The plugin for a launch with its own ``folder``, staged; None where the engine's family cannot load it."""
    flag = family(engine).flag("plugin", engine=engine)
    return None if flag is None else Plugin(overlay=stage(cache), marks=folder / "marks", flag=flag)


@memoised
def plugin_sha256() -> str:
    """The hash of the plugin's sources as they are now; part of a cell's identity."""
    return source_sha256(SOURCES)


def stage(cache: Path, *, sources: Path = SOURCES) -> Overlay:
    """The plugin in the cache, copied if it is not there yet, and again if it was changed there."""
    sha256 = source_sha256(sources)
    overlay = Overlay(path=cache / "overlays" / sha256[:16], sha256=sha256)
    with locked(overlay.path.with_suffix(".lock"), what="staging the plugin", progress=_silent):
        if not is_intact(overlay):
            _replace(overlay, sources)
    return overlay


def is_intact(overlay: Overlay) -> bool:
    """Whether a staged plugin is whole, unchanged and alone."""
    package, metadata = overlay.path / PACKAGE, overlay.path / METADATA
    if not metadata.is_dir() or {path.name for path in overlay.path.iterdir()} != {PACKAGE, METADATA}:
        return False
    return source_sha256(package) == overlay.sha256 and _text(metadata / "entry_points.txt") == ENTRY_POINTS


def _replace(overlay: Overlay, sources: Path) -> None:
    if overlay.path.exists():
        shutil.rmtree(overlay.path)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=overlay.path.parent))
    partial.chmod(0o755)
    for path in source_files(sources):
        target = partial / PACKAGE / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(sources / path, target)
    metadata = partial / METADATA
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA_TEXT, encoding="utf-8")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    partial.rename(overlay.path)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def _silent(_text: str) -> None:
    """Staging takes milliseconds."""
