"""Twenty-two things that went wrong in an earlier project, each shown to be impossible here by its smallest real check.

Where the part that would do the thing is not built yet, the test shows that asking for it is refused.
"""

import asyncio
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.cells import FakeCell, fake_config, fake_result
from fakes.composed import cells_of, config_of
from fakes.launching import stub_spec
from fakes.stub import Script
from hydra.errors import MissingConfigException

from analysis.metrics import summarise
from analysis.noise import Run, noise_floor
from analysis.records import Record
from conf.schema import (
    Config,
    Engine,
    HardwareKind,
    Kv,
    Load,
    Model,
    Rerun,
    Slo,
    Sparsity,
    Tracking,
    Workload,
)
from orchestrator import store
from orchestrator.identity import cell_key, launch_key, workload_hash
from orchestrator.paths import RunPaths, SweepPaths
from orchestrator.plan import plan
from orchestrator.rerun import drifts
from orchestrator.resume import decide
from orchestrator.tracking import Tracker
from workers import engines, prometheus
from workers.capacity import bytes_per_token
from workers.engine_log import parse_log
from workers.environment import build_inputs
from workers.errors import EngineStartError
from workers.evidence import Evidence, Fact, log_facts
from workers.families import FAMILIES
from workers.load.warmup import warmup_requests
from workers.load.workload import build_requests
from workers.overlay import plugin_for
from workers.prometheus import HistogramDelta, ServerWindow
from workers.rules import findings
from workers.server import Server, start_with_retries
from workers.supervise import descendants
from workers.verdict import judge

REPOSITORY = Path(__file__).parents[2]
MS, S = 10**6, 10**9
MODEL = {
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
    "server.kv_cache_blocks": 91,
    "server.block_size": 32,
    "server.prefix_caching": False,
    "server.max_model_len": 1024,
}
TWICE = ("server.version", "server.kv_cache_dtype")


def cell(*, engine=None, **groups) -> Config:
    named = {"name": "e", "version": "0.32.0"} | (engine or {})
    return Config(
        **({"engine": Engine(**named), "model": Model(name="m"), "workload": Workload(name="w")} | groups)
    )


def reported(extra=(), **changes) -> Evidence:
    """What an honest server and its log say, with changes (``__`` is the dot of a name) and facts of other sources."""
    values = HONEST | {name.replace("__", "."): value for name, value in changes.items()}
    told = [("GET x", values), ("server log", {name: values[name] for name in TWICE}), *extra]
    return Evidence(
        facts=tuple(
            Fact(name=name, value=value, source=source, time_s=0.0)
            for source, named in told
            for name, value in named.items()
        )
    )


def row(index=0, **changes) -> Record:
    plain = {
        "index": index, "phase": "measured", "due_ns": 0, "sent_ns": 0, "first_token_ns": 100 * MS,
        "last_token_ns": 200 * MS, "done_ns": 200 * MS, "token_ns": (100 * MS, 200 * MS), "num_output_tokens": 2,
        "num_output_tokens_requested": 2, "finish_reason": "length",
    }  # fmt: skip
    return Record(**(plain | changes))


def window(**changes) -> ServerWindow:
    plain = {
        "counters": {"preemptions": 0.0, "prefix_queries": 0.0, "prefix_hits": 0.0, "completed": 2.0},
        "histograms": {"ttft": HistogramDelta(sum=0.2, count=2)},
        "gauges_before": {"running": 0.0, "waiting": 0.0},
    }
    return ServerWindow(**(plain | changes))


def reasons(config=None, *, evidence=None, records=None, **options) -> list[str]:
    """The names of a verdict's reasons on a run that is otherwise honest."""
    found = judge(
        config or cell(),
        evidence or reported(),
        model_config=MODEL,
        metrics={"send_lag_ms/p99": 1.0} | options.pop("metrics", {}),
        window=options.pop("window", window()),
        client=SimpleNamespace(cpu_share=0.1, loop_delay_ms={"p99": 1.0}),
        records=[row(0), row(1)] if records is None else records,
        **options,
    )
    return [reason.name for reason in found.reasons]


def settings_of(config, evidence) -> set[str]:
    return {finding.setting for finding in findings(config, evidence, model_config=MODEL)}


def test_the_base_of_these_tests_is_a_run_that_counts():
    assert reasons() == []


def test_01_version_of_the_client_labelled_as_the_servers():
    """18 files said 0.24.0 since the client's environment did; here the label is what /version answers."""
    client = [("environment freeze", {"environment.vllm": "0.24.0"})]
    found = reported(client, server__version="0.25.0")
    assert found.value("server.version") == "0.25.0"
    assert settings_of(cell(engine={"version": "0.24.0"}), found) == {"engine.version"}
    silent = reported(client, server__version=None)
    assert silent.value("server.version") is None
    assert reasons(cell(engine={"version": "0.24.0"}), evidence=silent) == ["evidence_missing"]


@pytest.mark.parametrize(
    ("asked", "line", "setting"),
    [
        ({"attention_backend": "TRITON_ATTN"}, "Using FLASH_ATTN attention backend out of potential backends: []",
         "engine.attention_backend"),
        ({"family": "v1_early"}, "Initializing a V0 LLM engine (v0.32.0) with config: model='m'", "engine.family"),
    ],
)  # fmt: skip
def test_02_engine_or_backend_that_fell_back_silently(asked, line, setting):
    """The log's own sentence about what is in use stands against the request; nothing is filled in from it."""
    logged = log_facts(parse_log(line))
    found = reported(
        [("server log", {name: logged[name] for name in ("server.attention_backend", "server.generation")})]
    )
    assert setting in settings_of(cell(engine=asked), found)
    assert "evidence_missing" in reasons(cell(engine={"attention_backend": "TRITON_ATTN"}))


@pytest.mark.parametrize(
    "told",
    [
        {"engine.plugin_sha256": "other"},
        {"engine.pids": [7], "engine.pids_marked": False},
        {"engine.error": "ImportError"},
    ],
)
def test_03_patch_that_failed_under_the_label_of_one_that_works(told):
    """Every engine process must report the very sources that were staged; another hash, no mark or an error is named."""
    found = reported([("slot", {"launch.plugin_sha256": "sha"}), ("engine process worker 0 (pid 7)", told)])
    assert "plugin" in settings_of(cell(), found)
    with pytest.raises(ValueError, match=r"no engine build offers sparse attention yet"):
        cells_of("sparsity=blasst")


@pytest.mark.parametrize(
    ("density", "expected"), [(None, "evidence_missing"), (1.0, "sparsity_without_effect")]
)
def test_04_sparsity_that_nobody_measured(density, expected):
    """Without the kernel's counters a sparse run does not count, and one that skipped nothing does not either."""
    sparse = cell(sparsity=Sparsity(method="blasst", scale_factor=1.0))
    assert reasons(sparse, metrics={"sparsity/density": density}) == [expected]


def test_05_absolute_paths_and_logs_in_a_temporary_folder():
    """No source names a home folder; every result, the server's log too, lies below runs_dir."""
    home = re.compile(r"/(?:home|Users|root|mnt/[a-z])/\w")
    packages = ("analysis", "conf", "kernels", "orchestrator", "workers", ".ci")
    sources = [path for name in packages for path in (REPOSITORY / name).rglob("*") if path.suffix != ".pyc"]
    texts = {str(path): path.read_text(encoding="utf-8") for path in sources if path.is_file()}
    assert len(texts) > 50
    assert [path for path, text in texts.items() if home.search(text)] == []
    assert Path(config_of("runs_dir=mine").runs_dir) == Path.cwd() / "mine"
    paths = SweepPaths(Path("/r"), "s").cell("c")
    for path in (paths.result, paths.evidence, paths.root / "server.log"):
        assert path.is_relative_to("/r/s/c")


def test_06_processes_ended_by_their_name(tmp_path):
    """Stopping a server ends its own tree, children in sessions of their own included, and no namesake."""
    title = "VLLM::Other"
    code = (
        f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{title}'); print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as namesake:
        namesake.stdout.readline()
        children = asyncio.run(_started_and_stopped(tmp_path, Script(children=1, child_title=title)))
        alive = [pid for pid in children if Path(f"/proc/{pid}").exists()]
        assert len(children) == 2
        assert alive == []
        assert namesake.poll() is None
        namesake.kill()


async def _started_and_stopped(folder, script):
    async with await Server.start(stub_spec(folder, script)) as server:
        return [server.pid, *descendants(server.pid)]


def test_07_failed_scrape_read_as_zero():
    """A scrape that failed leaves None and an invalid run; latencies of no request are None."""
    found = prometheus.window([], [], family=FAMILIES["v1"])
    assert found.counters["preemptions"] is None
    assert set(reasons(window=found)) == {"evidence_missing"}
    assert summarise([], slo=Slo()).metrics["ttft_ms/mean"] is None
    assert reasons(records=[row(0), row(1, error="reset")], window=window()) == ["requests_failed"]


def test_08_kv_bytes_computed_with_the_width_of_another_dtype():
    """An fp8 token is half a bf16 token; capacity that belongs to another dtype is a mismatch."""
    widths = {
        dtype: bytes_per_token(MODEL, kv_dtype=dtype, model_dtype="bfloat16") for dtype in ("bfloat16", "fp8")
    }
    assert widths == {"bfloat16": 23040, "fp8": 11520}
    assert bytes_per_token(MODEL, kv_dtype="not_known_here", model_dtype="bfloat16") is None
    lying = reported(server__kv_cache_dtype="fp8")  # 91 blocks are those of bf16
    assert settings_of(cell(kv=Kv(dtype="fp8")), lying) == {"kv.dtype"}


def test_09_one_run_taken_for_a_result():
    """A spread needs three launches; repeats are shuffled launches of their own, closed in by sentinels."""
    runs = [Run(asked={"a": 1}, workload_hash="h", metrics={"ttft_ms/p50": float(10 + i)}) for i in range(3)]
    assert noise_floor(runs[:2]) == []
    assert noise_floor(runs)[0].ttft.max_over_min == 1.2
    cells = cells_of("+sweep=scheduler_tail")
    launches = plan(cells, seed=0, shuffle=True).launches
    assert {one.config.repeat for one in cells} == {0, 1, 2}
    assert len(launches) >= 2 * 3
    assert (launches[0].cells[0].config.sentinel, launches[-1].cells[-1].config.sentinel) == (0, 1)


def test_10_numbers_of_different_sweeps_put_together():
    """Each result carries its sweep; whatever else than the request differs between two runs is named."""
    old = fake_result("k", server={"server.version": "0.24.0"}, workload_hash="a")
    new = fake_result("k", server={"server.version": "0.25.0"}, workload_hash="b")
    assert {drift.name for drift in drifts(old, new)} == {"server.version", "workload_hash"}
    assert old["sweep"] == "s"
    apart = [Run(asked={"a": i}, workload_hash="h", metrics={"ttft_ms/p50": 1.0}) for i in range(3)]
    assert noise_floor(apart) == []


def test_11_arms_with_other_workloads_compared():
    """100 requests and 200 are two workloads; another engine is the same one, byte for byte."""
    one, two = config_of("load.num_requests=100"), config_of("load.num_requests=200")
    assert workload_hash(one) != workload_hash(two)
    assert workload_hash(one) == workload_hash(
        config_of("load.num_requests=100", "engine=vllm_0_31", "kv=fp8")
    )


def test_12_burst_published_as_a_rate():
    """200 requests at 64/s against 7/s of capacity: saturated, and offered and completed rates are two numbers."""
    rows = [
        row(i, due_ns=i * S // 64, sent_ns=i * S // 64, first_token_ns=(i + 1) * S // 7,
            last_token_ns=(i + 1) * S // 7 + MS, done_ns=(i + 1) * S // 7 + MS, token_ns=())
        for i in range(200)
    ]  # fmt: skip
    metrics = summarise(rows, slo=Slo()).metrics
    assert metrics["run/saturated"] == 1.0
    assert metrics["rate/offered_per_s"] == pytest.approx(64, rel=0.02)
    assert metrics["rate/completed_per_s"] == pytest.approx(7, rel=0.02)
    with pytest.raises(ValueError, match=r"must be inf with load\.arrival=burst"):
        cells_of("load=burst", "load.rate_per_s=64")


def test_13_clock_started_at_the_send():
    """Due at 0, sent at 40 ms, first token at 100 ms: TTFT 100 ms; the other figure has a name of its own."""
    metrics = summarise([row(sent_ns=40 * MS)], slo=Slo()).metrics
    assert metrics["ttft_ms/mean"] == 100
    assert metrics["ttft_from_send_ms/mean"] == 60
    assert reasons(metrics={"send_lag_ms/p99": 40.0}) == ["send_lag"]


def test_14_warm_up_that_leaks_into_the_window():
    """Requests that still run at the start make the run invalid; rows of the warm-up are in no statistic."""
    busy = window(gauges_before={"running": 4.0, "waiting": 0.0})
    assert reasons(window=busy) == ["not_drained"]
    warm = row(0, phase="warmup", first_token_ns=9 * S, last_token_ns=10 * S)
    assert summarise([warm, row(0)], slo=Slo()).metrics["ttft_ms/mean"] == 100


def test_15_result_overwritten_by_the_next_of_its_name(tmp_path):
    """A cell's folder is named by its content; a finished cell is not run again, and an earlier attempt is kept whole."""
    one, two = config_of(), config_of("load.rate_per_s=3")
    assert cell_key(one) != cell_key(two)
    finished = [FakeCell("k", fake_config())]
    assert decide(finished, {"k": fake_result("k")}, rerun=Rerun.none).todo == ()
    paths = SweepPaths(tmp_path, "s").cell("c")
    store.write_bytes(paths.result, b'{"first": 1}')
    store.archive(paths)
    store.write_bytes(paths.result, b'{"second": 2}')
    assert json.loads((paths.attempts / "1" / "result.json").read_text()) == {"first": 1}


def test_16_readiness_read_from_a_log(tmp_path):
    """/health is fine and the log says that all is well, but no token comes: not ready; a dead child ends the wait."""
    dead = Script(exit_code=1, exit_text="ValueError: broken", exit_after_s=0.0)
    unready = Script(generation_status=500, log_lines=("Application startup complete.",))
    for name, script, text in (("dead", dead, "ValueError: broken"), ("unready", unready, "500")):
        folder = tmp_path / name
        folder.mkdir()
        with pytest.raises(EngineStartError, match=text):
            asyncio.run(_start(folder, script))


async def _start(folder, script):
    server = await start_with_retries(stub_spec(folder, script, start_timeout_s=3.0), busy_wait_s=0)
    await server.stop()


def test_17_quality_claimed_from_a_hundred_items():
    """No task accuracy is measured yet, so none can be asked for or labelled; garbage is caught before the load."""
    with pytest.raises(MissingConfigException, match="workload/gsm8k"):
        cells_of("workload=gsm8k")
    names = summarise([row()], slo=Slo()).metrics
    assert [name for name in names if re.search("accuracy|quality|exact_match", name)] == []
    assert reasons(output_problem="garbage") == ["output_corrupt"]
    assert reasons(output_unknown="no reference of this model") == ["evidence_missing"]


def test_18_dense_arm_that_runs_other_code_than_the_sparse_arm(tmp_path):
    """A dense launch loads the same plugin, and its sources are part of the cell's identity."""
    plugin = plugin_for(cell().engine, cache=tmp_path, folder=tmp_path)
    model = SimpleNamespace(path="/m", config=MODEL)
    argv = engines.command(cell(), model=model, port=1, python=Path("python"), plugin=plugin)
    assert argv[argv.index("--middleware") + 1].startswith("servelab_kernels.")
    assert cell_key(config_of(), plugin_sha256="a") != cell_key(config_of(), plugin_sha256="b")


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("server.block_size", 64),
        ("server.prefix_caching", True),
        ("server.enforce_eager", False),
        ("server.max_model_len", 4096),
        ("server.dtype", "float16"),
    ],
)
def test_19_other_settings_that_change_along_with_the_factor(fact, value):
    """Every setting is confirmed in each cell, and what a rule cannot confirm may not differ between cells."""
    assert settings_of(cell(), reported(**{fact.replace(".", "__"): value})) >= {
        {"server.dtype": "model.dtype", "server.block_size": "kv.block_size",
         "server.prefix_caching": "kv.prefix_caching"}.get(fact, fact.replace("server", "engine"))
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"engine\.extra_args cannot be an axis: no rule"):
        cells_of("+sweep.grid.engine.extra_args=[['--no-enable-chunked-prefill'],[]]")


def test_20_engines_that_share_an_environment():
    """Each release has an environment of its own, known by a hash, and is started by its interpreter's path."""
    old, new = (config_of(f"engine={name}").engine for name in ("vllm_0_25", "vllm_0_32"))
    keys = {build_inputs(engine, kind=HardwareKind.cpu).key for engine in (old, new)}
    assert len(keys) == 2
    model = SimpleNamespace(path="/m", config=MODEL)
    argv = engines.command(cell(), model=model, port=1, python=Path("/envs/a/bin/python"))
    assert argv[0] == "/envs/a/bin/python"
    configs = (config_of("engine=vllm_0_31"), config_of())
    assert launch_key(configs[0]) != launch_key(configs[1])


def test_21_crash_of_a_configuration_found_late():
    """Before a cell's window: its longest prompt alone, then a mixed batch at once; a crash there costs no window."""
    work = Workload(name="w")
    work.input = dataclasses.replace(work.input, value=900)
    load = Load(num_requests=8)
    requests = build_requests(work, load, seed=0, repeat=0, vocab_size=1000)
    warm = warmup_requests(requests, load.warmup, seed=0, repeat=0, vocab_size=1000)
    groups = [request.due_ns for request in warm]
    assert max(request.num_prompt_tokens for request in warm) == 900
    assert groups.count(0) == 1
    assert groups.count(max(groups)) == load.warmup.concurrent > 1
    measured = {tuple(request.prompt_token_ids) for request in requests}
    assert not measured & {tuple(request.prompt_token_ids) for request in warm}


def test_22_tracking_in_a_folder_of_files(tmp_path):
    """A ``file:`` store is refused with the remedy before anything runs; the default is a database."""
    with pytest.raises(ValueError, match="sqlite"):
        Tracker.open(Tracking(uri=f"file:{tmp_path / 'mlruns'}"), runs_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert config_of().tracking.uri is None
    assert RunPaths(tmp_path).root == tmp_path
