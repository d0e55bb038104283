"""A real server that is told to do what it cannot: it starts, answers 200, and the verdict says what is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from workers import host

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 900
QUANTISED_KV_RUNS = bool({"avx512f", "amx_tile"} & host.cpu_flags())


@pytest.fixture(scope="module")
def lies(tmp_path_factory):
    """Results of ``+sweep=lies`` by what was asked for."""
    runs = tmp_path_factory.mktemp("lies") / "runs"
    command = [sys.executable, "-m", "orchestrator", "+sweep=lies", f"runs_dir={runs}"]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    results = [json.loads(path.read_text()) for path in (runs / "lies").glob("*/result.json")]
    assert len(results) == 3, done.stdout + done.stderr
    return {result["axes"]["kv.dtype"]: result for result in results}


def reasons(result):
    return {reason["name"] for reason in result["verdict"]["reasons"]}


def test_a_backend_that_the_server_replaced_is_a_mismatch(lies):
    """FLASH_ATTN on CPU: the server logs that it cannot and serves with CPU_ATTN; the text is right, the label not."""
    result = lies["bfloat16"]
    assert result["outcome"] == "done"
    assert "evidence_mismatch" in reasons(result)
    assert "output_corrupt" not in reasons(result)
    assert result["server"]["server.attention_backend"] == "CPU_ATTN"
    details = [reason["detail"] for reason in result["verdict"]["reasons"]]
    assert any("FLASH_ATTN" in detail and "CPU_ATTN" in detail for detail in details)


@pytest.mark.parametrize("dtype", ["int8_per_token_head", "turboquant_4bit_nc"])
def test_a_kv_dtype_that_is_only_a_label_never_becomes_a_result(lies, dtype):
    """With AVX-512 the server starts and serves garbage; without it the cell is refused before a start."""
    result = lies[dtype]
    assert result["verdict"]["valid"] is False
    if QUANTISED_KV_RUNS:
        assert {"evidence_mismatch", "output_corrupt"} & reasons(result)
    else:
        assert result["error"]["class"] == "refused_by_host"
        assert dtype in result["error"]["message"]
