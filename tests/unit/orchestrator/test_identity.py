"""Which changes of a configuration make it another measurement."""

import sys

import pytest

from conf.keys import replaced
from conf.schema import ArrivalKind, Config, Engine, Load, Model, ModelSource, Workload
from orchestrator import identity
from orchestrator.identity import cell_key, launch_key, workload_hash


@pytest.fixture
def config():
    return Config(
        engine=Engine(name="e", version="0.32.0"),
        model=Model(name="m", package="some-model==1.0"),
        workload=Workload(name="w"),
        load=Load(rate_per_s=8.0, duration_s=5.0),
    )


def test_a_key_is_twelve_hexadecimal_digits(config):
    """Short enough for a folder name and a table."""
    assert len(cell_key(config)) == 12
    assert int(cell_key(config), 16) >= 0


@pytest.mark.parametrize("value", [8, 8.0])
def test_spellings_of_a_number_are_one_identity(config, value):
    """8 and 8.0 are one cell (field case F1)."""
    assert cell_key(replaced(config, "load.rate_per_s", value)) == cell_key(config)


def test_zero_has_one_identity(config):
    """-0.0 and 0.0 are one temperature."""
    keys = {cell_key(replaced(config, "workload.temperature", value)) for value in (0.0, -0.0, 0)}
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("load.rate_per_s", 9.0),
        ("load.slo.ttft_ms", 5.0),
        ("load.limits.failed_share", 0.5),
        ("kv.dtype", "fp8"),
        ("engine.env", {"A": "1"}),
        ("engine.commit", "abcdef0"),
        ("model.revision", "v2"),
        ("seed", 1),
        ("repeat", 1),
        ("sentinel", 0),
    ],
)
def test_what_affects_the_measurement_changes_the_key(config, key, value):
    """Another load, engine, model, seed or repeat is another cell."""
    assert cell_key(replaced(config, key, value)) != cell_key(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("runs_dir", "elsewhere"),
        ("cache_dir", "/cache"),
        ("tracking.uri", "sqlite:///x.db"),
        ("retries", 5),
        ("ray.address", "auto"),
        ("hardware.start_timeout_s", 5.0),
        ("hardware.engine_slots", 4),
        ("load.request_timeout_s", 5.0),
        ("load.drain_timeout_s", 5.0),
        ("load.processes", 3),
        ("sweep.name", "other"),
    ],
)
def test_how_a_command_runs_does_not_change_the_key(config, key, value):
    """Paths, addresses, time-outs and slots are not the measurement."""
    assert cell_key(replaced(config, key, value)) == cell_key(config)


def test_a_files_bytes_count_and_its_path_does_not(config, tmp_path):
    """A moved trace is the same trace; an edited one is another."""
    one, moved = tmp_path / "one.csv", tmp_path / "moved.csv"
    one.write_text("a")
    moved.write_text("a")
    first = cell_key(replaced(config, "load.trace.path", str(one)))
    assert cell_key(replaced(config, "load.trace.path", str(moved))) == first
    moved.write_text("bb")
    assert cell_key(replaced(config, "load.trace.path", str(moved))) != first
    assert cell_key(replaced(config, "workload.path", str(one))) != cell_key(config)


def test_a_model_folders_bytes_count(config, tmp_path):
    """A folder of weights is known by its files, wherever it lies."""
    config = replaced(config, "model.source", ModelSource.path)
    keys = []
    for name, weights in (("a", "1"), ("b", "1"), ("c", "22")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(weights)
        keys.append(cell_key(replaced(config, "model.path", str(tmp_path / name))))
    assert keys[0] == keys[1] != keys[2]


def test_a_large_model_is_known_by_sizes_and_ends(config, tmp_path, monkeypatch):
    """Models over the limit are not read whole; a change at an end of a file still counts."""
    monkeypatch.setattr(identity, "WHOLE_MODEL_BYTES", 0)
    config = replaced(config, "model.source", ModelSource.path)
    keys = []
    for name, weights in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(weights)
        keys.append(cell_key(replaced(config, "model.path", str(tmp_path / name))))
    assert keys[0] == keys[1] != keys[2]


def test_the_plugins_sources_count(config):
    """Another plugin is another engine."""
    assert cell_key(config, plugin_sha256="a") != cell_key(config, plugin_sha256="b")


def test_the_metrics_version_counts(config, monkeypatch):
    """Numbers of two definitions are two measurements."""
    before = cell_key(config)
    monkeypatch.setattr(identity, "metrics_version", lambda: "other")
    assert cell_key(config) != before


def test_missing_metric_definitions_are_named(monkeypatch):
    """An incomplete installation says what it lacks."""
    monkeypatch.setitem(sys.modules, "analysis.metrics", None)
    with pytest.raises(RuntimeError, match="METRICS_VERSION is part of every cell's identity"):
        identity.metrics_version.__wrapped__()


@pytest.mark.parametrize(
    ("arrival", "key", "value"),
    [
        (ArrivalKind.poisson, "load.burstiness", 0.5),
        (ArrivalKind.constant, "load.burstiness", 0.5),
        (ArrivalKind.trace, "load.rate_per_s", 3.0),
    ],
)
def test_keys_without_effect_do_not_count(config, arrival, key, value):
    """What the arrival process does not use is not part of the cell."""
    config = replaced(config, "load.arrival", arrival)
    assert cell_key(replaced(config, key, value)) == cell_key(config)


def test_burstiness_counts_for_gamma(config):
    """It is the gamma process's shape."""
    config = replaced(config, "load.arrival", ArrivalKind.gamma)
    assert cell_key(replaced(config, "load.burstiness", 0.5)) != cell_key(config)


@pytest.mark.parametrize(
    ("key", "value"), [("load.rate_per_s", 1.0), ("workload.temperature", 1.0), ("seed", 3)]
)
def test_cells_of_one_engine_share_a_launch(config, key, value):
    """What is asked of a running engine does not need another one."""
    assert launch_key(replaced(config, key, value)) == launch_key(config)


@pytest.mark.parametrize(("key", "value"), [("kv.dtype", "fp8"), ("repeat", 1), ("sentinel", 0)])
def test_other_engines_repeats_and_sentinels_are_launches_of_their_own(config, key, value):
    """A repeat that reused the engine would not repeat its start."""
    assert launch_key(replaced(config, key, value)) != launch_key(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine.version", "0.31.0"),
        ("kv.dtype", "fp8"),
        ("load.slo.ttft_ms", 5.0),
        ("workload.name", "other"),
    ],
)
def test_compared_arms_share_the_workload(config, key, value):
    """Engines, KV types, judgements and names leave what is asked alone."""
    assert workload_hash(replaced(config, key, value)) == workload_hash(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("load.rate_per_s", 9.0),
        ("seed", 1),
        ("repeat", 1),
        ("model.revision", "v2"),
        ("workload.temperature", 1.0),
    ],
)
def test_another_workload_has_another_hash(config, key, value):
    """Prompts, arrivals and the model that is asked must be equal to be compared."""
    assert workload_hash(replaced(config, key, value)) != workload_hash(config)


def test_a_memo_gives_the_same_keys(config):
    """Texts of shared sections are reused, not changed."""
    memo = {}
    other = replaced(config, "kv.dtype", "fp8")
    assert [cell_key(c, memo=memo) for c in (config, other, config)] == [
        cell_key(c) for c in (config, other, config)
    ]
