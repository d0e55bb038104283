"""The default path for real: builds the engine, converts the model, serves, measures, logs to MLflow."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 900  # building the environment over a slow network is most of it


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """One run of the README's first command; environments and model are shared with the user's cache."""
    folder = tmp_path_factory.mktemp("smoke")
    command = [sys.executable, "-m", "orchestrator", "+sweep=smoke", f"runs_dir={folder / 'runs'}"]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(path.read_text()) for path in (folder / "runs" / "smoke").glob("*/result.json")]
    return folder, done.stdout, sorted(results, key=lambda result: result["axes"]["load.rate_per_s"])


def test_the_first_sweep_measures_two_valid_cells(smoke):
    """Both cells are valid and their latencies are positive and ordered: TTFT < E2EL."""
    _, _, results = smoke
    assert [result["verdict"] for result in results] == [{"valid": True, "reasons": []}] * 2
    for result in results:
        metrics = result["metrics"]
        assert 0 < metrics["ttft_ms/p50"] < metrics["e2el_ms/p50"]
        assert metrics["requests/failed"] == 0


def test_the_server_itself_reports_what_was_asked(smoke):
    """Version from /version, KV bytes, dtype and blocks from the server's own cache configuration."""
    _, _, results = smoke
    for result in results:
        server = result["server"]
        assert server["server.version"] == "0.32.0"
        assert server["server.kv_cache_dtype"] == "bfloat16"
        assert server["server.kv_cache_memory_bytes"] == 4 * 2**20
        # 30 layers x 2 x 3 KV heads x 64 x 2 bytes = 23,040 bytes a token; 4 MiB hold 5 blocks of 32 tokens.
        assert (server["server.kv_cache_blocks"], server["server.kv_cache_tokens"]) == (5, 160)
        assert server["process.port_owned"] is True


def test_the_engines_own_processes_report_what_they_hold(smoke):
    """CPU vLLM's log names no backend; its layers do. 30 layers x 768 bytes; 5 blocks x 32 tokens x 23,040 bytes."""
    folder, _, results = smoke
    for result in results:
        server = result["server"]
        assert server["server.attention_backend"] == "CPU_ATTN"
        assert server["engine.kv_tensor_dtype"] == "bfloat16"
        assert (server["engine.num_layers"], server["engine.kv_bytes_per_token"]) == (30, 23040)
        assert server["engine.kv_bytes_held"] == 5 * 32 * 23040
        assert server["engine.scheduler_class"].endswith(".Scheduler")
        assert server["engine.queue_class"].endswith(".FCFSRequestQueue")
        assert len(set(server["engine.pids"])) == 3  # API server, core, worker
        assert server["engine.pids_in_tree"] is True
        assert server["engine.pids_marked"] is True
        path = next((folder / "runs" / "smoke").glob(f"*{result['cell_key']}")) / "evidence.json"
        facts = [one for one in json.loads(path.read_text())["facts"] if one["value"] is not None]
        hashes = [one["value"] for one in facts if one["name"] == "engine.plugin_sha256"]
        assert hashes == [server["launch.plugin_sha256"]] * 3
        versions = {
            one["source"].split(" (")[0]: one["value"] for one in facts if one["name"] == "server.version"
        }
        assert versions["engine process worker 0"] == versions["GET /version"] == "0.32.0"


def test_the_launch_answered_its_output_probes(smoke):
    """Real text, as likely as in the reference that ships with the package, in less time than a start takes."""
    folder, _, results = smoke
    for result in results:
        path = next((folder / "runs" / "smoke").glob(f"*{result['cell_key']}")) / "probes.json"
        stored = json.loads(path.read_text())
        assert [len(reply["tokens"]) for reply in stored["replies"]] == [16, 16, 16]
        assert stored["replies"][1]["text"].startswith(" the quiet lake")
        assert stored["reference"] is not None
        assert abs(result["metrics"]["probe/lost_nats"]) < 0.2
        assert 0 < result["timing"]["probe_s"] < result["timing"]["start_s"] + 60


def test_client_and_server_count_the_same(smoke):
    """Completed requests, prompt and output tokens agree between the records and the server's counters."""
    folder, _, results = smoke
    for result in results:
        path = next((folder / "runs" / "smoke").glob(f"*{result['cell_key']}")) / "records.parquet"
        rows = [row for row in pq.read_table(path).to_pylist() if row["phase"] == "measured"]
        assert len(rows) == result["metrics"]["server/completed"]
        assert sum(row["num_output_tokens"] for row in rows) == result["metrics"]["server/generation_tokens"]
        assert {row["num_prompt_tokens"] for row in rows} == {16}
        assert {row["num_output_tokens"] for row in rows} == {8}


def test_the_busy_rate_waits_longer(smoke):
    """Eight requests a second exceed what 160 tokens of KV cache serve on any laptop: TTFT grows."""
    _, _, (idle, busy) = smoke
    assert busy["metrics"]["ttft_ms/mean"] > idle["metrics"]["ttft_ms/mean"]


def test_the_terminal_shows_table_time_and_links(smoke):
    """The result table, where the time went, and the links into the MLflow UI."""
    _, stdout, _ = smoke
    assert "TTFT p50 ms" in stdout
    assert "time:" in stdout
    assert "#/compare-runs" in stdout
