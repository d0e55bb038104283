"""Every release that installs on a CPU, started for real: what the parsers read must be what the release says.

On demand for all of them: ``pytest -m engines``. The default run starts 0.31.0 here, and 0.32.0 in the other modules.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from workers import prometheus
from workers.families import FAMILIES

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 1200  # building an environment over a slow network is most of it
ALWAYS = ("0.31.0",)
ON_DEMAND = ("0.25.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.32.0")
TEMPLATE = (REPOSITORY / "conf" / "engine" / "vllm_0_31.yaml").read_text(encoding="utf-8")

CELL = (
    "engine.max_model_len=128",
    "engine.max_num_seqs=8",
    "kv.memory_bytes=4194304",
    "workload.input.value=16",
    "workload.output.value=8",
    "load=constant",
    "load.rate_per_s=1",
    "load.num_requests=4",
    "load.duration_s=null",
    "load.warmup.concurrent=2",
)


def engine_name(version):
    return "vllm_" + "_".join(version.split(".")[:2])


def written(version, folder):
    """The folder with an engine file for a release that the project ships none for."""
    (folder / "engine").mkdir(parents=True, exist_ok=True)
    text = TEMPLATE.replace("vllm_0_31", engine_name(version)).replace("0.31.0", version)
    (folder / "engine" / f"{engine_name(version)}.yaml").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(
    scope="module",
    params=[
        *ALWAYS,
        *(pytest.param(version, marks=pytest.mark.engines) for version in ON_DEMAND),
    ],
)
def measured(request, tmp_path_factory):
    """One small cell on one release: its folder and its result."""
    version = request.param
    folder = tmp_path_factory.mktemp(engine_name(version))
    shipped = (REPOSITORY / "conf" / "engine" / f"{engine_name(version)}.yaml").is_file()
    own = [] if shipped else ["--config-dir", str(written(version, folder / "conf"))]
    command = [
        *(sys.executable, "-m", "orchestrator", *own, f"engine={engine_name(version)}", *CELL),
        f"runs_dir={folder / 'runs'}",
    ]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    (path,) = (folder / "runs").glob("*/*/result.json")
    result = json.loads(path.read_text())
    assert done.returncode == 0, (done.stdout + done.stderr, result["error"], result["verdict"])
    return version, path.parent, result


def test_every_rule_is_met(measured):
    """Asked for and reported agree in every setting, from as many sources as each needs."""
    _, _, result = measured
    assert result["verdict"] == {"valid": True, "reasons": []}
    confirmed = result["confirmed_by"]
    assert {"GET /version", "server log", "engine process"} <= set(confirmed["engine.version"])
    assert len(confirmed["kv.dtype"]) >= 2
    for setting in ("engine.max_num_seqs", "model.dtype", "kv.block_size", "scheduler.policy"):
        assert confirmed[setting], setting


def test_facts(measured):
    """4 MiB hold 5 blocks of 32 tokens of 30 x 2 x 3 x 64 x 2 = 23,040 bytes."""
    version, _, result = measured
    server = result["server"]
    expected = {
        "server.version": version,
        "server.generation": "V1",
        "server.model": "smollm2-135m",
        "server.dtype": "bfloat16",
        "server.kv_cache_dtype": "bfloat16",
        "server.kv_cache_memory_bytes": 4194304,
        "server.kv_cache_blocks": 5,
        "server.kv_cache_tokens": 160,
        "server.block_size": 32,
        "server.max_model_len": 128,
        "server.max_num_seqs": 8,
        "server.prefix_caching": False,
        "server.enforce_eager": True,
        "server.scheduling_policy": "fcfs",
        "server.attention_backend": "CPU_ATTN",
        "server.device": "cpu",
        "engine.kv_bytes_per_token": 23040,
    }
    assert {name: server[name] for name in expected} == expected


def test_every_metric_of_the_family_is_there(measured):
    """A name that a release changed would show here, not as a zero in a result."""
    _, folder, result = measured
    scrape = prometheus.parse((folder / "metrics_after.txt").read_text(encoding="utf-8"))
    assert prometheus.missing(scrape, family=FAMILIES["v1"]) == []
    metrics = result["metrics"]
    assert metrics["server/completed"] == 4
    assert (metrics["server/prompt_tokens"], metrics["server/generation_tokens"]) == (64, 32)
    for name in ("server_ttft_ms/mean", "server_itl_ms/mean", "queue_time_ms/mean", "kv_usage/max"):
        assert metrics[name] is not None
