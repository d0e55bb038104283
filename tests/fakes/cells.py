"""Cells and results as the tracking code sees them, without expansion or a run."""

from dataclasses import dataclass, field
from typing import Any

from conf.schema import Config, Engine, Model, Sweep, Workload


def fake_config(**values: Any) -> Config:
    """A complete configuration of sweep ``s``; sections can be replaced."""
    base = {
        "engine": Engine(name="vllm_0_32", version="0.32.0"),
        "model": Model(name="m"),
        "workload": Workload(name="w"),
        "sweep": Sweep(name="s", grid={"kv": {"dtype": ["auto", "fp8"]}}),
    }
    return Config(**(base | values))


@dataclass(frozen=True)
class FakeCell:
    """A cell with the given key."""

    key: str
    config: Config = field(default_factory=fake_config)
    axes: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return f"cell-{self.key}"


def fake_result(key: str, **values: Any) -> dict[str, Any]:
    """The result of a valid cell; fields can be replaced."""
    base = {
        "cell_key": key,
        "sweep": "s",
        "axes": {},
        "outcome": "done",
        "verdict": {"valid": True, "reasons": []},
        "metrics": {"ttft_ms/p50": 12.5, "ttft_ms/p99": 40.0, "tpot_ms/p50": None},
        "server": {"version": "0.32.0", "kv_cache_tokens": 4096, "attention_backend": "CPU_ATTN"},
        "timing": {"start_s": 3.5, "measured_s": 10.0, "environment_s": None},
        "attempts": [],
        "error": None,
        "workload_hash": "abc",
        "metrics_version": "1",
        "started_at": "2026-01-02T03:04:05+00:00",
        "launch_key": "l",
    }
    return base | values


FAILED = {
    "outcome": "failed",
    "metrics": {},
    "server": {},
    "verdict": {"valid": False, "reasons": [{"name": "failed", "detail": "died"}]},
    "error": {"class": "died", "message": "the server ended", "log_tail": "..."},
}
INVALID = {"verdict": {"valid": False, "reasons": [{"name": "send_lag", "detail": "30 ms > 20 ms"}]}}
