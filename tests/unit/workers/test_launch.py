"""One launch as a stream of events, its effects replaced: what a failure takes along and what it leaves."""

import asyncio
from pathlib import Path

import pytest

from conf.schema import Config, Engine, Hardware, HardwareKind, Kv, Model
from workers import launch
from workers.environment import EngineBuild
from workers.errors import (
    ClientLimitError,
    EngineDiedError,
    EngineStartError,
    EnvironmentBrokenError,
    NotDrainedError,
    ServelabError,
)
from workers.events import CellFailed, CellFinished, CellSpec, LaunchFinished, LaunchSpec, Phase
from workers.launch import check_devices, check_host, run_launch
from workers.model import PreparedModel
from workers.probes import Probed

BUILD = EngineBuild(key="k", python=Path("python"), root=Path("root"), freeze="", freeze_sha256="")
MODEL = PreparedModel(path="/m", sha256=None, vocab_size=None, config={})
PROBED = Probed(unknown="not asked")


def cell_config(**values) -> Config:
    base = {"engine": Engine(name="e", version="0.32.0"), "model": Model(name="m")}
    return Config(**(base | values))


class FakeServer:
    """Counts its stops; ``problem`` is raised by them."""

    def __init__(self, log_path):
        self.log_path, self.stops, self.problem = log_path, 0, None
        self.base_url = "http://127.0.0.1:1"

    async def while_alive(self, work):
        return await work

    async def stop(self):
        self.stops += 1
        if self.problem is not None:
            raise self.problem


class Stage:
    """The effects of a launch; ``measured`` says by cell what measuring it does: an error, or seconds."""

    def __init__(self, monkeypatch):
        self.measured, self.starting, self.building = {}, None, None
        self.server, self.stop_problem = None, None
        monkeypatch.setattr(launch, "build_environment", self.build)
        monkeypatch.setattr(launch, "prepare_model", lambda *_args, **_values: MODEL)
        monkeypatch.setattr(launch, "start_with_retries", self.start)
        monkeypatch.setattr(launch, "probe_launch", self.probe)
        monkeypatch.setattr(launch, "measure_cell", self.measure)
        monkeypatch.setattr(launch, "free_cores", lambda *_: None)
        monkeypatch.setattr(launch.clean, "end_leftovers", self.nothing)

    async def nothing(self, **_values):
        return None

    def build(self, *_args, **_values):
        if self.building is not None:
            raise self.building
        return BUILD

    async def start(self, spec, **_values):
        spec.log_path.write_text("line one\nline two\n")
        if self.starting is not None:
            raise self.starting(spec)
        self.server = FakeServer(spec.log_path)
        self.server.problem = self.stop_problem
        return self.server

    async def probe(self, *_args, **_values):
        return PROBED

    async def measure(self, measurement):
        assert measurement.probed is PROBED
        what = self.measured.get(measurement.cell.key, 1.0)
        if isinstance(what, BaseException):
            raise what
        if what == "hangs":
            await asyncio.Event().wait()
        return CellFinished(
            cell=measurement.cell.key, payload={"timing": {"warmup_s": what, "measured_s": what}}, files={}
        )

    def run(self, *keys, config=None):
        cells = tuple(CellSpec(key=key, config=config or cell_config()) for key in keys)
        return asyncio.run(collect(LaunchSpec(key="l", cells=cells, base_env={})))


async def collect(spec):
    return [event async for event in run_launch(spec, device_ids=())]


@pytest.fixture
def stage(monkeypatch):
    return Stage(monkeypatch)


def names(events):
    """Cells' outcomes in order: ``+a`` finished, ``-a`` failed."""
    return [
        ("+" if isinstance(event, CellFinished) else "-") + event.cell
        for event in events
        if isinstance(event, CellFinished | CellFailed)
    ]


def failures(events):
    return [event for event in events if isinstance(event, CellFailed)]


def test_a_launch_tells_its_phases_cells_and_time(stage):
    """Environment, model, start, every cell, stop, the end; cells carry the launch's start and their own times."""
    stage.measured = {"a": 1.0, "b": 2.0}
    events = stage.run("a", "b")
    phases = [event.name for event in events if isinstance(event, Phase) and event.name != "clean"]
    assert phases == ["environment", "model", "start", "probe", "stop"]
    assert names(events) == ["+a", "+b"]
    timing = {event.cell: event.payload["timing"] for event in events if isinstance(event, CellFinished)}
    assert (timing["b"]["warmup_s"], timing["b"]["measured_s"]) == (2.0, 2.0)
    assert timing["a"].keys() == {"environment_s", "model_s", "start_s", "probe_s", "warmup_s", "measured_s"}
    assert isinstance(events[-1], LaunchFinished)
    assert (events[-1].timing["measured_s"], events[-1].problem, stage.server.stops) == (3.0, None, 1)


def test_a_failing_start_fails_every_cell(stage):
    """With its class, reason and log; another try would not help, and the log's own path is nobody's business."""
    stage.starting = lambda spec: EngineStartError(
        f"no memory; log: {spec.log_path}", cause="does_not_fit", log_tail="line two"
    )
    events = stage.run("a", "b")
    assert names(events) == ["-a", "-b"]
    for failure in failures(events):
        assert (failure.cause, failure.message, failure.retryable) == ("does_not_fit", "no memory", False)
        assert (failure.log_tail, failure.files["server.log"]) == ("line two", b"line one\nline two\n")
        assert "EngineStartError: no memory" in failure.traceback


def test_a_broken_environment_starts_nothing(stage):
    stage.building = EnvironmentBrokenError("no torch")
    (failure,) = failures(stage.run("a"))
    assert (failure.cause, failure.message, failure.files, stage.server) == (
        "environment_broken",
        "no torch",
        {},
        None,
    )


@pytest.mark.parametrize("error", [ValueError("lengths"), ClientLimitError("descriptors")])
def test_what_is_wrong_with_one_cell_leaves_the_server(stage, error):
    """The next cell is measured on the same engine; the failure carries what the log says so far."""
    stage.measured = {"a": error}
    events = stage.run("a", "b")
    assert names(events) == ["-a", "+b"]
    (failure,) = failures(events)
    assert (failure.message, failure.retryable, failure.log_tail) == (str(error), False, "line one\nline two")


@pytest.mark.parametrize(
    ("error", "cause", "retryable"),
    [
        (EngineDiedError("gone", log_tail="last"), "died", True),
        (NotDrainedError("busy"), "not_drained", True),
        (KeyError("x"), "KeyError", False),
    ],
)
def test_what_spoils_the_server_is_blamed_on_its_cell(stage, error, cause, retryable):
    """The launch ends after a, c was not tried and says nothing; b was measured before and stays."""
    stage.measured = {"a": error}
    events = stage.run("b", "a", "c")
    assert names(events) == ["+b", "-a"]
    (failure,) = failures(events)
    assert (failure.cause, failure.retryable, stage.server.stops) == (cause, retryable, 1)


def test_an_engine_that_cannot_be_ended_is_said_after_its_cells(stage):
    """All cells are done: nothing fails, but the driver hears of it."""
    stage.stop_problem = ServelabError("processes [7] survived SIGKILL")
    events = stage.run("a")
    assert names(events) == ["+a"]
    assert events[-1].problem == "processes [7] survived SIGKILL"


def test_closing_the_stream_stops_the_server(stage):
    """As on Ctrl-C: the server is stopped before the iterator's end, and the cell is not called failed."""
    stage.measured = {"a": "hangs"}

    async def run():
        spec = LaunchSpec(key="l", cells=(CellSpec(key="a", config=cell_config()),), base_env={})
        stream = run_launch(spec, device_ids=())
        async for event in stream:
            if isinstance(event, Phase) and event.name == "start":
                break
        while stage.server is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await stream.aclose()
        return stage.server.stops

    assert asyncio.run(run()) == 1


# --- refused before anything is built ---


@pytest.mark.parametrize(
    ("dtype", "flags", "refused"),
    [
        ("fp8", {"sse2", "avx2"}, True),
        ("int8_per_token_head", {"sse2", "avx2"}, True),
        ("fp8", {"sse2", "avx512f"}, False),
        ("fp8", {"sse2", "amx_tile"}, False),
        ("fp8", {"asimd"}, False),
        ("bfloat16", {"sse2"}, False),
        ("auto", {"sse2"}, False),
        ("float16", {"sse2"}, False),
    ],
)
def test_a_kv_dtype_that_this_processor_cannot_run_is_refused(stage, monkeypatch, dtype, flags, refused):
    """No AVX-512 or AMX on x86: class refused_by_host, no environment is built for it, no server starts."""
    monkeypatch.setattr(launch.host, "cpu_flags", lambda: frozenset(flags))
    stage.building = None if not refused else AssertionError("was built")
    events = stage.run("a", config=cell_config(kv=Kv(dtype=dtype)))
    if not refused:
        assert names(events) == ["+a"]
        return
    (failure,) = failures(events)
    assert (failure.cause, failure.retryable) == ("refused_by_host", False)
    assert failure.message.startswith(f"kv.dtype={dtype} needs AVX-512 or AMX")


def test_a_gpu_host_is_not_asked_for_its_processor(monkeypatch):
    monkeypatch.setattr(launch.host, "cpu_flags", lambda: frozenset({"sse2"}))
    check_host(cell_config(kv=Kv(dtype="fp8"), hardware=Hardware(kind=HardwareKind.cuda)))


@pytest.mark.parametrize(
    ("ids", "cause"), [((), "no_device"), (("0", "1"), "wrong_devices"), (("GPU-1111",), None)]
)
def test_a_cuda_launch_holds_what_it_asked_for(ids, cause):
    """One device for tensor * pipeline = 1; names are not numbers."""
    config = cell_config(hardware=Hardware(kind=HardwareKind.cuda))
    if cause is None:
        check_devices(config, ids)
        return
    with pytest.raises(EngineStartError) as raised:
        check_devices(config, ids)
    assert raised.value.cause == cause


def test_a_cpu_launch_needs_no_device():
    check_devices(cell_config(), ())
