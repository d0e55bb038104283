"""A tiny environment built by the real uv, from a wheel made here: no network."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conf.schema import Engine, HardwareKind
from workers.environment import build_environment, is_ready
from workers.errors import EnvironmentBrokenError
from workers.installer import run_process

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
REPOSITORY = Path(__file__).parents[2]

BUILDER = """
import json, sys
from pathlib import Path
from conf.schema import Engine, HardwareKind
from workers.environment import build_environment

engine = Engine(**json.loads(sys.argv[1]))
lines = []
build = build_environment(
    engine, kind=HardwareKind.cpu, cache=Path(sys.argv[2]), progress=lines.append,
    check="import tiny_engine; print(tiny_engine.__version__)",
)
print(json.dumps({"lines": lines, "key": build.key, "freeze": build.freeze, "python": str(build.python)}))
"""


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder with one wheel, as pip's find-links; nothing else may be asked."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny_engine-1.5-py3-none-any.whl", "w") as wheel:
        info = "tiny_engine-1.5.dist-info"
        wheel.writestr("tiny_engine.py", "__version__ = '1.5'\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-engine\nVersion: 1.5\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(
            f"{info}/RECORD", f"tiny_engine.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return folder


def settings(requirement="tiny-engine"):
    return {"name": "tiny", "version": "1.5", "python": PYTHON, "requirements": {"cpu": [requirement]}}


def test_two_builders_at_once_make_one_environment(tmp_path, wheels):
    """The second waits for the first and then finds its work done."""
    argv = [sys.executable, "-c", BUILDER, json.dumps(settings()), str(tmp_path / "cache")]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    builders = [subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [json.loads(builder.communicate(timeout=120)[0]) for builder in builders]
    lines = [line for output in outputs for line in output["lines"]]
    assert sum("installing 1 packages" in line for line in lines) == 1
    assert sum("resolving tiny-engine" in line for line in lines) == 1
    assert outputs[0]["key"] == outputs[1]["key"]
    assert outputs[0]["freeze"] == outputs[1]["freeze"] == "tiny-engine==1.5\n"
    engine = Engine(**settings())
    assert is_ready(engine, kind=HardwareKind.cpu, cache=tmp_path / "cache")
    program = [outputs[0]["python"], "-c", "import tiny_engine; print(tiny_engine.__version__)"]
    assert subprocess.run(program, capture_output=True, text=True, check=True).stdout == "1.5\n"


def test_a_broken_import_leaves_no_environment(tmp_path, wheels):
    """The check runs in the new venv; its error ends the build."""
    engine = Engine(**settings())
    with pytest.raises(EnvironmentBrokenError, match="No module named 'vllm'"):
        build_environment(engine, kind=HardwareKind.cpu, cache=tmp_path / "cache", progress=print)
    assert not is_ready(engine, kind=HardwareKind.cpu, cache=tmp_path / "cache")


def test_an_unknown_requirement_is_named(tmp_path, wheels):
    """uv's own explanation reaches the user."""
    engine = Engine(**settings("tiny-engine==9"))
    with pytest.raises(EnvironmentBrokenError, match=r"(?s)engine tiny: resolving failed.*tiny-engine==9"):
        build_environment(engine, kind=HardwareKind.cpu, cache=tmp_path / "cache", progress=print)


def test_a_process_does_not_outlive_an_interruption(tmp_path):
    """Ctrl-C during a build ends the installer too."""
    seen = []

    def interrupt(_seconds):
        seen.append("tick")
        raise KeyboardInterrupt

    code = "import os, time, pathlib; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"
    with pytest.MonkeyPatch.context() as patch, (tmp_path / "lock").open("w") as file:
        patch.chdir(tmp_path)
        patch.setattr("workers.installer.REPORT_EVERY_S", 0.5)
        with pytest.raises(KeyboardInterrupt):
            run_process([sys.executable, "-c", code], env={}, keep=file.fileno(), tick=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
