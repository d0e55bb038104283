"""Dotted keys of the configuration: look-up, conversion, replacement."""

import pytest
from omegaconf import OmegaConf

from conf import keys
from conf.schema import ArrivalKind, Config, Length, LengthKind


def converted(name, value):
    return keys.convert(keys.find(name), value)


@pytest.mark.parametrize("value", [1, 1.0, "1", "1.0", "1e0"])
def test_spellings_of_one_number_are_one_float(value):
    """A rate of 1 is the float 1.0 however it is written."""
    result = converted("load.rate_per_s", value)
    assert (result, type(result)) == (1.0, float)


@pytest.mark.parametrize("value", [1e-5, "1e-5", "0.00001", "1.0e-6"])
def test_small_floats_stay_floats(value):
    """Small numbers never come back as text (field case F1)."""
    assert type(converted("load.slo.ttft_ms", value)) is float


def test_infinity_is_a_number():
    """``inf`` is a rate."""
    assert converted("load.rate_per_s", "inf") == float("inf")


def test_enum_values_are_named():
    """A choice becomes the member of the schema's enum."""
    assert converted("load.arrival", "burst") is ArrivalKind.burst


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("load.rate_per_s", "fast", "load.rate_per_s must be a number, got 'fast'"),
        ("load.rate_per_s", True, "load.rate_per_s must be a number, got True"),
        ("load.rate_per_s", None, "load.rate_per_s must be a number, got None"),
        ("kv.memory_bytes", 1.5, "kv.memory_bytes must be an integer, got 1.5"),
        ("load.arrival", "bust", "must be one of constant, poisson, gamma, burst, trace, got 'bust'"),
        ("engine.version", 0.30, "engine.version must be text, got 0.3: quote it"),
        ("engine.commit", 1234567, "engine.commit must be text, got 1234567: quote it"),
        ("workload.input", {"length": 3}, "workload.input must be a section with the keys kind, value"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(name, value, message):
    """The message holds the key, what is wanted, and what came."""
    with pytest.raises(ValueError, match=message):
        converted(name, value)


def test_environment_variables_take_integers():
    """An entry of a free map is text; an integer there cannot change its digits."""
    assert converted("engine.env.OMP_NUM_THREADS", 3) == "3"


def test_a_section_is_built_on_the_schemas_defaults():
    """A length given as a map says everything that is not a default."""
    assert converted("workload.input", {"kind": "uniform", "min": 1, "max": 9}) == Length(
        kind=LengthKind.uniform, min=1, max=9
    )


def test_an_unknown_key_lists_the_allowed_ones():
    """A typo is answered with what exists there."""
    with pytest.raises(
        ValueError, match=r"unknown key 'kv.dtyp': kv has no 'dtyp', allowed: dtype, memory_bytes"
    ):
        keys.find("kv.dtyp")


def test_nothing_goes_on_below_a_value():
    """A key cannot be longer than the schema."""
    with pytest.raises(ValueError, match="below a plain value"):
        keys.find("kv.dtype.x")


def test_replaced_copies_the_path_and_shares_the_rest():
    """The original keeps its value; sections off the path are the same objects."""
    config = Config()
    result = keys.replaced(config, "load.slo.ttft_ms", 5.0)
    assert (config.load.slo.ttft_ms, result.load.slo.ttft_ms) == (None, 5.0)
    assert result.kv is config.kv
    assert result.load.warmup is config.load.warmup


def test_an_integer_key_is_refused_rather_than_added_beside():
    """A map with text keys takes no integer key (field case F2)."""
    cfg = OmegaConf.structured(Config)
    with pytest.raises(Exception, match="incompatible with"):
        cfg.engine.env[1] = "3"
