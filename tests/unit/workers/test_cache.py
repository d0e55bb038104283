import fcntl
import os
import threading

import pytest

from workers.cache import cache_root, locked, read_json, write_json


def test_the_default_is_the_users_cache_folder(monkeypatch, tmp_path):
    """Without a setting the cache lies in XDG_CACHE_HOME, else in ~/.cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root(None, environ={"XDG_CACHE_HOME": "/x"}).as_posix() == "/x/servelab"
    assert cache_root(None, environ={}) == tmp_path / ".cache" / "servelab"


def test_a_relative_xdg_folder_is_ignored(monkeypatch, tmp_path):
    """The XDG specification says that relative paths are invalid."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root(None, environ={"XDG_CACHE_HOME": "x"}) == tmp_path / ".cache" / "servelab"


def test_a_given_folder_is_taken_as_it_is(monkeypatch, tmp_path):
    """``cache_dir`` is made absolute, so that a worker with another working directory finds it."""
    monkeypatch.chdir(tmp_path)
    assert cache_root("c") == tmp_path / "c"
    assert not (tmp_path / "c").exists()


def test_the_second_holder_waits_and_says_so(tmp_path):
    """A lock is held by one at a time; the waiting one reports what it waits for."""
    path, lines, order = tmp_path / "a.lock", [], []
    reported = threading.Event()

    def second():
        with locked(
            path, what="building x", progress=lambda s: (lines.append(s), reported.set()), poll_s=0.001
        ):
            order.append("second")

    with locked(path, what="building x", progress=lines.append):
        thread = threading.Thread(target=second)
        thread.start()
        assert reported.wait(5)
        order.append("first")
    thread.join(5)
    assert order == ["first", "second"]
    assert lines == ["waiting for another process: building x, 0 s"]


def test_a_child_that_shares_the_descriptor_keeps_the_lock(tmp_path):
    """An installer that outlives its parent still excludes the next one."""
    path = tmp_path / "a.lock"
    with locked(path, what="x", progress=print) as descriptor:
        childs = os.dup(descriptor)
    other = os.open(path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(childs)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    """The message names the folder and the setting that changes it."""
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match=r"file/locks cannot be written .*cache_dir=FOLDER"),
        locked(tmp_path / "file" / "locks" / "a.lock", what="x", progress=print),
    ):
        pass


def test_json_is_written_whole(tmp_path):
    """No partial file stays behind; folders are made."""
    write_json(tmp_path / "a" / "b.json", {"x": 1})
    assert read_json(tmp_path / "a" / "b.json") == {"x": 1}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.json"]


@pytest.mark.parametrize("text", ["", '{"x": ', "[1]"])
def test_a_torn_file_counts_as_absent(tmp_path, text):
    """Empty, cut and foreign contents are all 'not there'."""
    (tmp_path / "ready.json").write_text(text)
    assert read_json(tmp_path / "ready.json") is None


def test_a_missing_file_is_absent(tmp_path):
    assert read_json(tmp_path / "no" / "ready.json") is None
