"""The staged plugin: whole, alone, unchanged, importable without the project."""

import subprocess
import sys
from pathlib import Path

import pytest

from kernels.engine.source import source_sha256
from workers.overlay import ENTRY_POINTS, METADATA, PACKAGE, SOURCES, is_intact, plugin_sha256, stage


@pytest.fixture
def sources(tmp_path):
    """A package of two files."""
    folder = tmp_path / "sources"
    (folder / "engine").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "engine" / "__init__.py").write_text("A = 1\n")
    return folder


def test_the_folder_holds_the_package_its_metadata_and_nothing_else(tmp_path, sources):
    overlay = stage(tmp_path / "cache", sources=sources)
    assert {path.name for path in overlay.path.iterdir()} == {PACKAGE, METADATA}
    assert (overlay.path / PACKAGE / "engine" / "__init__.py").read_text() == "A = 1\n"
    assert (overlay.path / METADATA / "entry_points.txt").read_text() == ENTRY_POINTS
    assert overlay.sha256.startswith(overlay.path.name)


def test_other_sources_are_another_folder(tmp_path, sources):
    one = stage(tmp_path / "cache", sources=sources)
    (sources / "engine" / "__init__.py").write_text("A = 2\n")
    two = stage(tmp_path / "cache", sources=sources)
    assert one.path != two.path
    assert is_intact(one)


def test_staging_again_changes_nothing(tmp_path, sources):
    overlay = stage(tmp_path / "cache", sources=sources)
    before = (overlay.path / PACKAGE / "__init__.py").stat().st_ino
    assert stage(tmp_path / "cache", sources=sources) == overlay
    assert (overlay.path / PACKAGE / "__init__.py").stat().st_ino == before


@pytest.mark.parametrize(
    "name", [f"{PACKAGE}/engine/__init__.py", f"{METADATA}/entry_points.txt", "torch.py"]
)
def test_a_changed_folder_is_staged_again(tmp_path, sources, name):
    """A changed source, a changed entry point, or a module that would hide one of the engine's."""
    overlay = stage(tmp_path / "cache", sources=sources)
    (overlay.path / name).write_text("A = 3\n")
    assert not is_intact(overlay)
    assert is_intact(stage(tmp_path / "cache", sources=sources))


def test_the_hash_knows_names_and_bytes(tmp_path, sources):
    before = source_sha256(sources)
    (sources / "engine" / "__init__.py").rename(sources / "engine" / "other.py")
    assert source_sha256(sources) != before


def test_compiled_files_are_not_sources(tmp_path, sources):
    before = source_sha256(sources)
    (sources / "__pycache__").mkdir()
    (sources / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert source_sha256(sources) == before


def test_the_staged_package_knows_its_own_hash_and_entry_point(tmp_path):
    """An interpreter that sees nothing but the folder finds the entry point; what it runs has the hash we staged."""
    overlay = stage(tmp_path / "cache")
    assert overlay.sha256 == plugin_sha256() == source_sha256(SOURCES)
    script = (
        f"import sys; sys.path.insert(0, {str(overlay.path)!r})\n"
        "from importlib.metadata import entry_points\n"
        "from importlib.util import find_spec\n"
        f"from {PACKAGE}.engine.source import LOADED_SHA256\n"
        "[point] = entry_points(group='vllm.general_plugins', name='servelab')\n"
        "assert point.load().__name__ == 'register'\n"
        "assert find_spec('kernels') is None\n"
        "print(LOADED_SHA256)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip() == overlay.sha256, ran.stderr


def test_the_plugin_imports_nothing_of_the_project():
    """Inside the engine there is no Ray, no MLflow, no configuration, and vLLM only when it is called."""
    words = ("import ray", "import mlflow", "from conf", "from workers", "from orchestrator", "from kernels")
    for path in Path(SOURCES / "engine").rglob("*.py"):
        text = path.read_text()
        assert not [word for word in words if word in text], path
        assert "\nimport vllm" not in text
        assert "\nfrom vllm" not in text
