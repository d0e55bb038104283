"""No rule, no axis."""

import dataclasses

import pytest

from conf.schema import Config, Engine, Kv, Model, Scheduler, Sparsity
from workers.settings import (
    SERVER_SECTIONS,
    Proof,
    check_axis,
    check_environment,
    check_options,
    settings,
)

BY_KEY = {setting.key: setting for setting in settings()}


def cell(*, engine=None, **groups) -> Config:
    named = {"name": "e", "version": "0.32.0"} | (engine or {})
    return Config(engine=Engine(**named), model=Model(name="m"), **groups)


def test_every_key_of_the_schema_has_its_line():
    """A key that is added to the schema appears here without being added anywhere else."""
    for section in SERVER_SECTIONS:
        names = {field.name for field in dataclasses.fields(getattr(Config(), section))}
        assert {key.split(".")[1] for key in BY_KEY if key.split(".")[0] == section} == names
    assert {"seed", "load.limits.failed_share", "workload.input.sigma"} <= BY_KEY.keys()
    assert not {"dry_run", "tracking.uri", "sweep.repeats"} & BY_KEY.keys()


def test_what_is_not_proven_says_why_and_what_the_client_proves_says_where():
    for setting in BY_KEY.values():
        assert bool(setting.rules) == (setting.proof is Proof.rule)
        assert setting.rules or setting.text


@pytest.mark.parametrize(
    "axis",
    [
        "engine.version", "engine.commit", "engine.attention_backend", "engine.max_num_seqs", "model.dtype",
        "model.revision", "kv.dtype", "kv.memory_bytes", "kv.block_size", "kv.prefix_caching", "scheduler.policy",
        "sparsity.method", "hardware.kind", "load.rate_per_s", "workload.input", "seed",
    ],
)  # fmt: skip
def test_settings_that_something_confirms_are_axes(axis):
    check_axis(axis)


@pytest.mark.parametrize(
    ("axis", "why"),
    [
        ("engine.env.OMP_NUM_THREADS", "a variable that was given was not necessarily read"),
        ("engine.extra_args", "a flag that was given was not necessarily honoured"),
        ("engine.requirements", "choose engines by name"),
        ("engine.name", "it is a label"),
        ("hardware.engine_slots", "how this host is used"),
        ("sparsity.scale_factor", "no engine build reports it"),
        ("model.package", "choose models by name"),
    ],
)
def test_settings_that_nothing_confirms_are_refused_with_the_remedy(axis, why):
    with pytest.raises(ValueError, match="cannot be an axis: no rule says which reported fact") as caught:
        check_axis(axis)
    assert str(caught.value).startswith(axis)
    assert why in str(caught.value)
    assert str(caught.value).endswith("add a rule to workers/rules.py")


def test_a_setting_that_is_added_without_a_rule_is_refused(monkeypatch):
    """Take a rule away and its setting stops being an axis: the table has no second list."""
    monkeypatch.setattr("workers.settings.RULES", ())
    with pytest.raises(ValueError, match=r"kv\.block_size cannot be an axis: .*no rule has been written"):
        check_axis("kv.block_size")


def test_options_of_one_name_may_differ_only_by_what_is_confirmed():
    """Two engines called e that differ in a variable would be told apart by nothing."""
    same = [cell(), cell(engine={"env": {"A": "1"}})]
    with pytest.raises(ValueError, match=r"options of the axis engine differ in engine\.env, .*engine\.name"):
        check_options(same, groups=["engine"])
    check_options([same[0], cell(engine={"name": "f", "env": {"A": "1"}})], groups=["engine"])
    check_options([cell(), cell(engine={"max_num_seqs": 7})], groups=["engine"])
    check_options(same, groups=[])


def test_options_of_sparsity_are_told_apart_by_method_alone():
    one, other = (cell(sparsity=Sparsity(method="blasst", scale_factor=factor)) for factor in (1.0, 2.0))
    with pytest.raises(ValueError, match=r"sparsity\.scale_factor, which no rule confirms"):
        check_options([one, other], groups=["sparsity"])
    check_options([cell(), one], groups=["sparsity"])


def test_options_that_rules_confirm_may_differ():
    cells = [cell(), cell(kv=Kv(dtype="fp8"), scheduler=Scheduler(policy="priority"))]
    check_options(cells, groups=["kv", "scheduler"])


@pytest.mark.parametrize(
    ("family", "name", "setting"),
    [
        ("v1", "VLLM_ATTENTION_BACKEND", "engine.attention_backend"),
        ("v0", "VLLM_ATTENTION_BACKEND", "engine.attention_backend"),
        ("v1_early", "VLLM_USE_V1", "engine.family"),
    ],
)
def test_a_variable_cannot_do_what_a_setting_does(family, name, setting):
    """Newer engines ignore the variable, and the label would say what was asked for (C1)."""
    with pytest.raises(ValueError, match=f"engine.env.{name} cannot be set: {setting} says it"):
        check_environment(cell(engine={"family": family, "env": {name: "x"}}))
    check_environment(cell(engine={"family": family, "env": {"OMP_NUM_THREADS": "1"}}))
