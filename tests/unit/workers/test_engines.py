"""The command and the environment of an engine."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Config, Engine, Hardware, HardwareKind, Kv, Model, ModelSource, Scheduler, Sparsity
from workers import engines

SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_size": 576,
}
PYTHON = Path("/env/bin/python")


@dataclass(frozen=True)
class Weights:
    path: str = "/models/m"
    config: dict[str, Any] = field(default_factory=lambda: dict(SMOLLM2))


def cell(*, engine=None, kv=None, model=None, **groups) -> Config:
    return Config(
        engine=Engine(**({"name": "vllm_0_32", "version": "0.32.0"} | (engine or {}))),
        model=Model(**({"name": "smollm2"} | (model or {}))),
        kv=Kv(**(kv or {})),
        **groups,
    )


def command(config: Config, *, weights: Weights | None = None) -> list[str]:
    return engines.command(config, model=weights or Weights(), port=8123, python=PYTHON)


def test_command_of_a_plain_cell_names_every_setting():
    """Nothing that changes the engine is left to its default."""
    assert command(cell()) == [
        "/env/bin/python", "-m", "vllm.entrypoints.openai.api_server",
        "--model", "/models/m", "--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", "8123",
        "--dtype", "bfloat16", "--kv-cache-dtype", "bfloat16", "--block-size", "32",
        "--max-model-len", "1024", "--max-num-seqs", "256", "--kv-cache-memory-bytes", "67108864",
        "--enforce-eager", "--no-enable-prefix-caching", "--scheduling-policy", "fcfs",
    ]  # fmt: skip


def test_command_of_a_full_cell():
    config = cell(
        engine={
            "enforce_eager": False,
            "max_num_batched_tokens": 512,
            "attention_backend": "TRITON_ATTN",
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 3,
            "extra_args": ["--seed", "1"],
        },
        kv={"dtype": "fp8", "prefix_caching": True},
        model={"source": ModelSource.hub, "id": "o/m", "revision": "abc"},
        scheduler=Scheduler(policy="priority"),
    )
    argv = command(config)
    pairs = dict(itertools.pairwise(argv))
    assert pairs["--max-num-batched-tokens"] == "512"
    assert pairs["--attention-backend"] == "TRITON_ATTN"
    assert pairs["--tensor-parallel-size"] == "2"
    assert pairs["--pipeline-parallel-size"] == "3"
    assert pairs["--kv-cache-dtype"] == "fp8"
    assert pairs["--revision"] == "abc"
    assert pairs["--scheduling-policy"] == "priority"
    assert "--enable-prefix-caching" in argv
    assert "--enforce-eager" not in argv
    assert argv[-2:] == ["--seed", "1"]


def test_executable_replaces_the_build():
    argv = command(cell(engine={"executable": ["python", "stub.py"]}))
    assert argv[:4] == ["python", "stub.py", "--model", "/models/m"]


@pytest.mark.parametrize(("name", "version"), [("v0", "0.8.5"), ("v1_early", "0.10.1")])
def test_engines_without_a_byte_budget_get_the_blocks_that_fit(name, version):
    """64 MiB / (30 layers * 3 heads * 64 * 2 * 2 bytes * 32 tokens) = 91 blocks, what a newer engine reports."""
    argv = command(cell(engine={"family": name, "version": version}))
    assert argv[argv.index("--num-gpu-blocks-override") + 1] == "91"
    assert argv[argv.index("--kv-cache-dtype") + 1] == "auto"
    assert "--kv-cache-memory-bytes" not in argv
    assert "--disable-log-requests" in argv


def test_v0_has_no_switch_to_turn_prefix_caching_off():
    """V0's default is off and its early releases have no negative flag."""
    argv = command(cell(engine={"family": "v0", "version": "0.4.1"}))
    assert "--no-enable-prefix-caching" not in argv
    assert "--scheduling-policy" not in argv


@pytest.mark.parametrize(
    ("config", "weights", "named"),
    [
        (cell(engine={"family": "v0", "version": "0.4.1"}), Weights(config={}), "kv.memory_bytes"),
        (cell(engine={"family": "v0", "version": "0.4.1"}, scheduler=Scheduler(policy="priority")), None, "scheduler.policy"),
        (cell(engine={"family": "v1_early", "version": "0.9.2"}, model={"dtype": "float16"}), None, "kv.dtype"),
        (cell(sparsity=Sparsity(method="blasst")), None, "sparsity.method"),
        (cell(engine={"extra_args": ["--kv-cache-dtype=fp8"]}), None, "--kv-cache-dtype"),
        (cell(engine={"extra_args": ["--enable-prefix-caching"]}), None, "--enable-prefix-caching"),
        (cell(engine={"family": "v9"}), None, "engine.family"),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_do_is_refused_by_name(config, weights, named):
    with pytest.raises(ValueError, match=named):
        command(config, weights=weights)


def test_environment_drops_what_would_change_the_engine_unseen():
    """The KV budget of VLLM_CPU_KVCACHE_SPACE overrides the flag, Ray's OMP_NUM_THREADS=1 throttles."""
    base = {
        "PATH": "/bin", "HOME": "/home/u", "RAY_ADDRESS": "x", "OMP_NUM_THREADS": "1", "PYTHONPATH": "/repo",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PORT": "7", "MLFLOW_RUN_ID": "p", "CUDA_VISIBLE_DEVICES": "0,1",
    }  # fmt: skip
    env = engines.environment(cell(), base=base, device_ids=None)
    assert set(env) - {"PATH", "HOME"} == {
        "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY", "TOKENIZERS_PARALLELISM",
        "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
    }  # fmt: skip
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert base["OMP_NUM_THREADS"] == "1"


def test_engine_env_has_the_last_word():
    env = engines.environment(
        cell(engine={"env": {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "0"}}), base={}, device_ids=""
    )
    assert (env["OMP_NUM_THREADS"], env["HF_HUB_OFFLINE"]) == ("2", "0")


def test_hub_models_may_go_online():
    config = cell(model={"source": ModelSource.hub, "id": "o/m"})
    assert "HF_HUB_OFFLINE" not in engines.environment(config, base={}, device_ids=None)


@pytest.mark.parametrize(
    ("version", "name", "by_variable"),
    [("0.8.5", "v0", True), ("0.9.2", "v1_early", True), ("0.11.2", "v1", True), ("0.13.0", "v1", False)],
)
def test_backend_is_asked_for_where_the_release_reads_it(version, name, by_variable):
    """Releases before 0.13 read a variable, later ones ignore it and have a flag (C1)."""
    config = cell(engine={"family": name, "version": version, "attention_backend": "TRITON_ATTN"})
    env = engines.environment(config, base={"VLLM_ATTENTION_BACKEND": "FLASHINFER"}, device_ids=None)
    assert env.get("VLLM_ATTENTION_BACKEND") == ("TRITON_ATTN" if by_variable else None)
    assert ("--attention-backend" in command(config)) is not by_variable


def test_a_checkout_is_not_judged_by_its_version_number():
    """A fork that calls itself 0.1.dev7557 has the flags of its family (C4)."""
    config = cell(
        engine={"version": "0.1.dev7557", "commit": "977180c", "attention_backend": "TRITON_ATTN"},
    )
    assert "--attention-backend" in command(config)


def gpu(**engine) -> Config:
    return cell(engine=engine, hardware=Hardware(kind=HardwareKind.cuda))


@pytest.mark.parametrize("ids", ["3", "GPU-1111", "MIG-2222"])
def test_device_ids_pass_through_unchanged(ids):
    assert engines.environment(gpu(), base={}, device_ids=ids)["CUDA_VISIBLE_DEVICES"] == ids


@pytest.mark.parametrize(
    ("ids", "message"), [("", "no GPU assigned"), (None, "no GPU assigned"), ("0,1", "2 GPUs")]
)
def test_wrong_number_of_devices_is_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        engines.environment(gpu(), base={}, device_ids=ids)


def test_two_devices_for_tensor_parallel_size_two():
    env = engines.environment(gpu(tensor_parallel_size=2), base={}, device_ids="2,3")
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"  # the order in which Ray and NVML count


AVX2 = frozenset({"sse2", "avx2"})


@pytest.mark.parametrize(
    ("dtype", "flags", "refused"),
    [
        ("fp8", AVX2, True),
        ("int8_per_token_head", AVX2, True),
        ("bfloat16", AVX2, False),
        ("auto", AVX2, False),
        ("fp8", AVX2 | {"avx512f"}, False),
        ("fp8", AVX2 | {"amx_tile"}, False),
        ("fp8", frozenset({"asimd"}), False),
        ("fp8", frozenset(), False),
    ],
)
def test_quantised_kv_needs_a_wide_processor(dtype, flags, refused):
    """vLLM 0.31 and 0.32 end at start with "FP8 KV cache on CPU requires x86 with AVX-512 or AMX."."""
    said = engines.refused_by_host(cell(kv={"dtype": dtype}), cpu_flags=flags)
    assert (said is not None) is refused


def test_a_gpu_cell_does_not_care_about_the_processor():
    config = cell(kv={"dtype": "fp8"}, hardware=Hardware(kind=HardwareKind.cuda))
    assert engines.refused_by_host(config, cpu_flags=AVX2) is None
