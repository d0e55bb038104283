"""The runs folder survives crashes and holds strict JSON only."""

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes.cells import FakeCell, fake_config
from omegaconf import OmegaConf

from conf.schema import Config, HardwareKind, Load, Sweep
from orchestrator import store
from orchestrator.paths import CellPaths, SweepPaths


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"bare {constant}")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def cell(tmp_path) -> CellPaths:
    return SweepPaths(tmp_path, "s").cell("c")


def test_non_finite_floats_are_strict_json_and_come_back(tmp_path):
    """Infinity is the text "inf", NaN is null; a reader that refuses NaN and Infinity reads the file."""
    path = tmp_path / "x.json"
    value = {
        "rate": math.inf,
        "low": -math.inf,
        "tpot": math.nan,
        "list": [np.float32("inf"), (np.int64(3), 0.5)],
    }
    store.write_json(path, value)
    assert strict(path.read_text()) == {"rate": "inf", "low": "-inf", "tpot": None, "list": ["inf", [3, 0.5]]}
    assert store.read_json(path) == {
        "rate": math.inf,
        "low": -math.inf,
        "tpot": None,
        "list": [math.inf, [3, 0.5]],
    }


def test_enum_and_path_are_stored_as_text(tmp_path):
    store.write_json(tmp_path / "x.json", {"kind": HardwareKind.cpu, "path": tmp_path})
    assert store.read_json(tmp_path / "x.json") == {"kind": "cpu", "path": str(tmp_path)}


def test_bare_infinity_in_a_file_is_refused_by_name(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"a": Infinity}')
    with pytest.raises(store.DamagedFileError, match=r"x\.json is not strict JSON: Infinity"):
        store.read_json(path)


def test_a_failed_write_leaves_the_old_content(tmp_path, monkeypatch):
    """The new content appears by rename alone."""
    path = tmp_path / "x.json"
    store.write_json(path, {"a": 1})

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.write_json(path, {"a": 2})
    assert store.read_json(path) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


WHOLE = json.dumps(
    {"cell_key": "k", "text": 'é "}"', "metrics": {"ttft_ms/p99": 1.5e3}}, ensure_ascii=False
).encode()


@pytest.mark.parametrize("length", range(len(WHOLE)))
def test_result_cut_anywhere_is_not_done(cell, length):
    """Also inside a multi-byte character, a number, an escape, and at zero bytes."""
    cell.root.mkdir(parents=True)
    cell.result.write_bytes(WHOLE[:length])
    assert store.read_result(cell.result) is None


def test_missing_or_zero_filled_result_is_not_done(cell):
    """Some file systems leave a file of zero bytes after a power loss."""
    assert store.read_result(cell.result) is None
    cell.root.mkdir(parents=True)
    cell.result.write_bytes(b"\0" * 512)
    assert store.read_result(cell.result) is None


@pytest.mark.parametrize(
    "content", [b'{"a": 1 "b": 2}', b'{"a": "\xff\xfe"}', b'{"a": NaN}', b"[1, 2]", b"hello"]
)
def test_result_damaged_otherwise_is_reported_with_its_name(cell, content):
    cell.root.mkdir(parents=True)
    cell.result.write_bytes(content)
    with pytest.raises(store.DamagedFileError, match=r"/s/c/result\.json .*(delete|mend)"):
        store.read_result(cell.result)


def test_result_of_another_key_does_not_count(tmp_path):
    paths = SweepPaths(tmp_path, "s")
    cells = [FakeCell("a"), FakeCell("b"), FakeCell("c")]
    store.write_result(paths.cell(cells[0]), {"cell_key": "a", "outcome": "done", "verdict": {"valid": True}})
    store.write_result(paths.cell(cells[1]), {"cell_key": "old", "outcome": "done"})
    assert list(store.read_results(paths, cells)) == ["a"]


def test_counts_tell_valid_invalid_failed_and_not_started(tmp_path):
    paths = SweepPaths(tmp_path, "s")
    cells = [FakeCell(key) for key in "abcd"]
    store.write_result(paths.cell(cells[0]), {"cell_key": "a", "outcome": "done", "verdict": {"valid": True}})
    store.write_result(
        paths.cell(cells[1]), {"cell_key": "b", "outcome": "done", "verdict": {"valid": False}}
    )
    store.write_result(paths.cell(cells[2]), {"cell_key": "c", "outcome": "failed"})
    expected = {"valid": 1, "invalid": 1, "failed": 1, "not_started": 1, "done": 2, "total": 4}
    assert store.count(paths, cells) == expected


def test_cell_file_gives_the_same_typed_configuration_back(cell):
    """Enum members by name, infinity as a float, versions as text, nothing about how the command ran."""
    original = fake_config(load=Load(rate_per_s=math.inf), runs_dir="/elsewhere", retries=7)
    store.write_cell(cell, FakeCell("a", config=original))
    plain = store.read_cell(cell.cell_yaml)
    assert plain["hardware"]["kind"] == "cpu"
    assert plain["engine"]["version"] == "0.32.0"
    assert not {"sweep", "tracking", "runs_dir", "retries", "from_file"} & set(plain)
    again = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(cell.cell_yaml)))
    assert again == fake_config(load=Load(rate_per_s=math.inf), sweep=Sweep())


def test_earlier_attempts_are_kept_whole(cell):
    """A new attempt moves result and records of the one before into attempts/<n>."""
    for number in (1, 2):
        store.write_cell(cell, FakeCell("a"))
        store.write_files(cell, {"records.parquet": b"r%d" % number, "logs/server.log": b"l"})
        store.write_result(cell, {"cell_key": "a", "number": number})
    store.write_cell(cell, FakeCell("a"))
    assert store.read_result(cell.result) is None
    assert sorted(path.name for path in cell.root.iterdir()) == ["attempts", "cell.yaml"]
    for number in (1, 2):
        folder = cell.attempts / str(number)
        assert store.read_json(folder / "result.json")["number"] == number
        assert (folder / "records.parquet").read_bytes() == b"r%d" % number
        assert (folder / "logs/server.log").read_bytes() == b"l"


def test_nothing_to_archive_makes_no_folder(cell):
    store.write_cell(cell, FakeCell("a"))
    assert store.archive(cell) is None
    assert not cell.attempts.exists()


@pytest.mark.parametrize("name", ["../x", "/etc/x"])
def test_a_slot_cannot_write_outside_the_cells_folder(cell, name):
    with pytest.raises(ValueError, match="must lie inside its folder"):
        store.write_files(cell, {name: b""})


def test_sweep_files_keep_the_launches_of_every_command(tmp_path):
    """A command with nothing to run adds nothing."""
    paths = SweepPaths(tmp_path, "s")
    cells = [FakeCell("a", axes={"load.rate_per_s": math.inf}), FakeCell("b")]
    launch = SimpleNamespace(key="l", cells=cells)
    for launches in ([launch], [], [launch]):
        store.write_sweep(paths, cells=cells, config=fake_config(), plan=SimpleNamespace(launches=launches))
    plan = store.read_json(paths.plan_json)
    assert plan["cells"][0] == {"key": "a", "folder": "cell-a", "axes": {"load.rate_per_s": math.inf}}
    assert [command["launches"] for command in plan["commands"]] == [[{"key": "l", "cells": ["a", "b"]}]] * 2
    saved = OmegaConf.load(paths.sweep_yaml)
    assert saved.sweep.grid.kv.dtype == ["auto", "fp8"]
    assert saved.engine.version == "0.32.0"


def test_torn_last_line_is_dropped_and_its_cell_runs_again(tmp_path):
    """2 valid lines and half of a third, cut inside a character: 2 cells stay, after the rerun 3 lines are valid."""
    path = tmp_path / "events.jsonl"
    lines = [json.dumps({"cell": n, "text": "größe"}, ensure_ascii=False).encode() for n in (1, 2, 3)]
    cut = lines[2].index("ö".encode()) + 1
    path.write_bytes(lines[0] + b"\n" + lines[1] + b"\n" + lines[2][:cut])
    read = store.read_lines(path)
    assert [row["cell"] for row in read.rows] == [1, 2]
    assert read.torn == lines[2][:cut]
    store.append_line(path, {"cell": 3})
    assert [strict(line)["cell"] for line in path.read_text().split("\n")[:-1]] == [1, 2, 3]
    assert store.read_lines(path).torn == b""


def test_whole_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"cell": 1}\n{"cell": 2}')
    assert [row["cell"] for row in store.read_lines(path).rows] == [1, 2]
    store.append_line(path, {"cell": 3})
    assert [row["cell"] for row in store.read_lines(path).rows] == [1, 2, 3]


def test_exotic_line_separators_do_not_split_a_record(tmp_path):
    path = tmp_path / "events.jsonl"
    text = "a\u2028b\u2029c\u0085d\u000be"
    path.write_text(
        json.dumps({"text": text.replace("\u000b", "")}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    store.append_line(path, {"text": text})
    assert [row["text"] for row in store.read_lines(path).rows] == [text.replace("\u000b", ""), text]


@pytest.mark.parametrize("damage", [b'{"cell": 2', b"", b"7", b'{"x": NaN}', b"\xff"])
def test_damage_in_the_middle_is_reported_with_its_line(tmp_path, damage):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"cell": 1}\n' + damage + b'\n{"cell": 3}\n')
    before = path.read_bytes()
    with pytest.raises(store.DamagedFileError, match=r"events\.jsonl, line 2 is not a JSON object"):
        store.read_lines(path)
    assert path.read_bytes() == before


def test_first_line_torn_leaves_an_empty_file_to_append_to(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"ce')
    store.append_line(path, {"rate": math.inf})
    assert path.read_bytes() == b'{"rate": "inf"}\n'
    assert store.read_lines(path).rows == ({"rate": math.inf},)


def test_missing_file_has_no_lines(tmp_path):
    assert store.read_lines(tmp_path / "none.jsonl") == store.JsonLines(rows=())


def test_a_sweep_folder_has_one_owner_at_a_time(tmp_path):
    paths = SweepPaths(tmp_path, "s")
    with (
        store.sole_owner(paths),
        pytest.raises(store.SweepBusyError, match=rf"in use by process {store.os.getpid()};"),
        store.sole_owner(paths),
    ):
        pass
    with store.sole_owner(paths):
        pass
