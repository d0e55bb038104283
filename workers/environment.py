"""Engine environments: one venv per engine build, made once on the node that needs it, shared by all runs.

requirements ─► lock (exact versions, kept) ─► venv at its final path ─► import check ─► ``ready.json``

A folder without ``ready.json`` is half built: it is wiped, never used. A venv holds absolute paths and therefore
grows where it stays, under a file lock, instead of being moved there.
"""

import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.schema import Engine, HardwareKind
from workers import installer
from workers.cache import Progress, locked, read_json, write_json, write_text
from workers.errors import EnvironmentBrokenError
from workers.installer import Run, last_lines, run_process

# Raised when the way of building changes what an environment holds.
BUILD_FORMAT = 1

# Loads the compiled extensions too: engines swallow their load error and limp on without kernels.
IMPORT_CHECK = "import vllm, vllm._custom_ops; print(vllm.__version__)"

# What the dynamic loader says when a compiled part of the engine does not fit this host.
LOADER_ERRORS = re.compile(
    r"[^\s'\"()]+: version `[^']+' not found(?: \(required by [^)]+\))?"
    r"|[^\s'\"()]+: cannot open shared object file: [A-Za-z ]+"
    r"|[^\s'\"()]+: undefined symbol: \w+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBuild:
    """A ready engine environment. ``freeze`` lists every distribution as ``name==version``."""

    key: str
    python: Path
    root: Path
    freeze: str
    freeze_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInputs:
    """All that decides what an environment will hold, before versions are resolved."""

    requirements: tuple[str, ...]
    overrides: tuple[str, ...]
    python: str
    kind: str
    platform: str
    # Size and mtime of wheels named by path: a rebuilt wheel is another build.
    local_files: tuple[tuple[str, int, int], ...]
    format: int = BUILD_FORMAT

    @property
    def key(self) -> str:
        """16 hex digits."""
        return _digest(json.dumps(asdict(self), sort_keys=True))[:16]


def build_inputs(engine: Engine, *, kind: HardwareKind) -> BuildInputs:
    """What ``engine`` needs on ``kind``. Raises ValueError when the engine names no requirement for it."""
    requirements = engine.requirements.get(kind.value, [])
    if not requirements:
        raise ValueError(
            f"engine.requirements.{kind.value} of engine {engine.name} is empty, expected lines such as "
            f"'vllm==0.32.0'; this engine has builds for: {', '.join(sorted(engine.requirements)) or 'nothing'}"
        )
    return BuildInputs(
        requirements=tuple(requirements),
        overrides=tuple(engine.overrides.get(kind.value, [])),
        python=engine.python,
        kind=kind.value,
        platform="-".join((sys.platform, platform.machine(), *platform.libc_ver())),
        local_files=tuple(_local_file(line) for line in requirements if _is_local_file(line)),
    )


def _is_local_file(requirement: str) -> bool:
    return "://" not in requirement.replace("file://", "") and requirement.endswith((".whl", ".tar.gz"))


def _local_file(requirement: str) -> tuple[str, int, int]:
    path = Path(requirement.rpartition("file://")[2].rpartition(" @ ")[2].strip())
    if not path.is_absolute():
        raise ValueError(f"engine.requirements names the file {path}; give its absolute path")
    try:
        stat = path.stat()
    except OSError as error:
        raise ValueError(
            f"engine.requirements names {path}, which cannot be read: {error.strerror}"
        ) from error
    return (str(path), stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Builder:
    """One engine on one host: where its files lie and how processes are run for it."""

    engine: Engine
    inputs: BuildInputs
    cache: Path
    progress: Progress
    check: str
    run: Run

    @property
    def lock(self) -> Path:
        return self.cache / "locks" / f"{self.inputs.key}.txt"

    def environment_key(self, lock_text: str) -> str:
        inputs = self.inputs
        return _digest(
            json.dumps(
                [lock_text, inputs.python, inputs.kind, inputs.platform, inputs.local_files, inputs.format]
            )
        )[:16]

    def say(self, text: str) -> None:
        self.progress(f"{self.engine.name}: {text}")

    def uv(self, arguments: Sequence[str], *, doing: str, env: Mapping[str, str], keep: int) -> str:
        """Standard output of uv. Raises EnvironmentBrokenError with what it said."""
        result = self.run(
            [installer.uv_binary(), *arguments], env=env, keep=keep, tick=self.ticker(doing)
        )  # fmt: skip
        if result.returncode != 0:
            raise EnvironmentBrokenError(
                f"engine {self.engine.name}: {doing} failed (uv exit code {result.returncode}):\n"
                f"{last_lines(result.stderr)}\n{self._remedy(result.stderr)}"
            )
        return result.stdout

    def ticker(self, doing: str) -> Callable[[float], None]:
        return lambda seconds: self.say(f"{doing}, {seconds:.0f} s")

    def _remedy(self, stderr: str) -> str:
        if "No space left" in stderr:
            return f"Free disk space, or put the cache on another disk: cache_dir=FOLDER (now {self.cache})."
        return (
            "Check the requirement lines of the engine and where packages come from (PIP_INDEX_URL, "
            "PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS; '+cpu' builds of torch need PyTorch's CPU index). "
            f"The resolved versions are kept in {self.lock}; delete it to resolve them again."
        )


def build_environment(
    engine: Engine,
    *,
    kind: HardwareKind,
    cache: Path,
    progress: Progress,
    check: str = IMPORT_CHECK,
    run: Run = run_process,
) -> EngineBuild:
    """The environment of ``engine``, built if it is not there yet.

    ``check`` is Python source that imports the engine and prints its version. Blocks while another process
    builds the same environment. Raises EnvironmentBrokenError, or ValueError for what the user wrote.
    """
    if engine.executable is not None:
        return _executable_build(engine.executable)
    builder = _Builder(
        engine=engine,
        inputs=build_inputs(engine, kind=kind),
        cache=cache,
        progress=progress,
        check=check,
        run=run,
    )
    ready = _find_ready(builder)
    return ready if ready is not None else _make_ready(builder)


def is_ready(engine: Engine, *, kind: HardwareKind, cache: Path) -> bool:
    """Whether :func:`build_environment` would find its environment; starts no process."""
    if engine.executable is not None:
        return True
    builder = _Builder(
        engine=engine,
        inputs=build_inputs(engine, kind=kind),
        cache=cache,
        progress=print,
        check="",
        run=run_process,
    )
    root = _existing_root(builder)
    return root is not None and _read_ready(root) is not None


def _executable_build(executable: Sequence[str]) -> EngineBuild:
    """An engine installed by hand: nothing to build and nothing known about what it holds."""
    digest = _digest("\0".join(executable))
    return EngineBuild(
        key=f"executable:{digest}",
        python=Path(sys.executable),
        root=Path(sys.prefix),
        freeze="",
        freeze_sha256=_digest(""),
    )


def _existing_root(builder: _Builder) -> Path | None:
    try:
        lock_text = builder.lock.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return _root(builder, lock_text)


def _root(builder: _Builder, lock_text: str) -> Path:
    return builder.cache / "environments" / builder.environment_key(lock_text)


def _read_ready(root: Path) -> dict[str, Any] | None:
    """``ready.json`` of a whole environment whose interpreter still exists."""
    return read_json(root / "ready.json") if _python(root).exists() else None


def _python(root: Path) -> Path:
    return root / "bin" / "python"


def _find_ready(builder: _Builder) -> EngineBuild | None:
    root = _existing_root(builder)
    ready = None if root is None else _read_ready(root)
    if root is None or ready is None:
        return None
    installed = _distributions(root)
    if installed != ready["distributions"]:
        changed = sorted(set(installed) ^ set(ready["distributions"]))
        raise EnvironmentBrokenError(
            f"engine {builder.engine.name}: the environment {root} was changed after it was built "
            f"({', '.join(changed)}); delete that folder to build it again"
        )
    freeze = (root / "freeze.txt").read_text(encoding="utf-8")
    return _build(root, freeze=freeze)


def _build(root: Path, *, freeze: str) -> EngineBuild:
    return EngineBuild(
        key=root.name, python=_python(root), root=root, freeze=freeze, freeze_sha256=_digest(freeze)
    )  # fmt: skip


def _distributions(root: Path) -> list[str]:
    return sorted(
        path.name.removesuffix(".dist-info") for path in root.glob("lib/python*/site-packages/*.dist-info")
    )


def _make_ready(builder: _Builder) -> EngineBuild:
    env = installer.installer_environment(progress=builder.progress)
    lock_text = _resolve(builder, env=env)
    root = _root(builder, lock_text)
    name = builder.engine.name
    with locked(root.with_suffix(".lock"), what=f"building {name}", progress=builder.progress) as keep:
        ready = _find_ready(builder)
        if ready is not None:
            return ready
        return _install(builder, root=root, lock_text=lock_text, env=env, keep=keep)


def _resolve(builder: _Builder, *, env: Mapping[str, str]) -> str:
    """The exact versions, one ``name==version`` a line; resolved once per cache, so that they never drift."""
    lock = builder.lock
    name = builder.engine.name
    with locked(lock.with_suffix(".lock"), what=f"resolving {name}", progress=builder.progress) as keep:
        if not lock.exists():
            builder.say(f"resolving {', '.join(builder.inputs.requirements)}")
            write_text(lock, _compile(builder, env=env, keep=keep))
    return lock.read_text(encoding="utf-8")


def _compile(builder: _Builder, *, env: Mapping[str, str], keep: int) -> str:
    inputs = builder.inputs
    requirements, overrides = builder.lock.with_suffix(".in"), builder.lock.with_suffix(".overrides")
    write_text(requirements, "".join(f"{line}\n" for line in inputs.requirements))
    write_text(overrides, "".join(f"{line}\n" for line in inputs.overrides))
    return builder.uv(
        [
            "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-emit-index-url",
            "--python", _interpreter(inputs.python), "--override", str(overrides), str(requirements),
        ],
        doing="resolving", env=env, keep=keep,
    )  # fmt: skip


def _interpreter(version: str) -> str:
    """What uv is asked for: this interpreter if it has the version, else whatever uv finds or fetches."""
    return sys.executable if version == f"{sys.version_info.major}.{sys.version_info.minor}" else version


def _install(
    builder: _Builder, *, root: Path, lock_text: str, env: Mapping[str, str], keep: int
) -> EngineBuild:  # fmt: skip
    start = time.monotonic()
    if root.exists():
        builder.say("removing a half-built environment")
        shutil.rmtree(root)
    (count, lines) = (len(lock_text.splitlines()), root.with_suffix(".txt"))
    write_text(lines, lock_text)
    builder.say(f"installing {count} packages")
    python = _interpreter(builder.inputs.python)
    builder.uv(
        ["venv", "--quiet", "--python", python, str(root)], doing="creating the venv", env=env, keep=keep
    )
    builder.uv(
        # The lock is complete; dependencies are not looked at again, because overrides drop some of them.
        ["pip", "sync", "--quiet", "--python", str(_python(root)), str(lines)],
        doing=f"installing {count} packages", env=env, keep=keep,
    )  # fmt: skip
    builder.say("checking")
    version = _check(builder, root=root, env=env, keep=keep)
    freeze = builder.uv(
        ["pip", "freeze", "--quiet", "--python", str(_python(root))], doing="listing", env=env, keep=keep
    )  # fmt: skip
    _write_ready(builder, root=root, version=version, freeze=freeze, seconds=time.monotonic() - start)
    return _build(root, freeze=freeze)


def _check(builder: _Builder, *, root: Path, env: Mapping[str, str], keep: int) -> str:
    """The engine's version as it prints it. Raises EnvironmentBrokenError when it does not import here."""
    # A user's VLLM_LOGGING_LEVEL must not hide the warning that is looked for.
    env = {name: value for name, value in env.items() if not name.startswith("VLLM_")}
    result = builder.run(
        [str(_python(root)), "-I", "-c", builder.check],
        env=env, keep=keep, tick=builder.ticker("checking"),
    )  # fmt: skip
    problem = import_problem(result)
    if problem is not None:
        raise EnvironmentBrokenError(
            f"engine {builder.engine.name} does not work on this host: {problem}\n"
            "Choose an engine version whose build fits this host, or a host with newer system libraries."
        )
    return result.stdout.strip().splitlines()[-1]


def import_problem(result: subprocess.CompletedProcess[str]) -> str | None:
    """One sentence on why the engine does not import; ``None`` when it does.

    A loader error of the engine's own kernels counts even when the process ended well: engines log it and go on
    without them. Optional parts that do not load are the engine's business.
    """
    lines = (result.stderr + "\n" + result.stdout).splitlines()
    loader = [LOADER_ERRORS.search(line) for line in lines if result.returncode != 0 or "vllm._C" in line]
    sentence = next((match[0] for match in loader if match is not None), None)
    if sentence is not None:
        return f"a system library is missing or too old: {sentence}"
    if result.returncode < 0:
        return f"the import ended by signal {-result.returncode} (a build for another kind of processor?)"
    if result.returncode != 0:
        return f"the import failed:\n{last_lines(result.stderr)}"
    return None if result.stdout.strip() else "the import check printed no version"


def _write_ready(builder: _Builder, *, root: Path, version: str, freeze: str, seconds: float) -> None:
    write_text(root / "freeze.txt", freeze)
    write_json(
        root / "ready.json",
        {
            "engine": builder.engine.name,
            "version": version,
            "inputs": asdict(builder.inputs),
            "distributions": _distributions(root),
            "freeze_sha256": _digest(freeze),
            "build_s": round(seconds, 1),
        },
    )
    builder.say(f"environment ready after {seconds:.0f} s (version {version})")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
