"""Every reason why a run does not count, with its name."""

from dataclasses import dataclass, field

import pytest

from analysis.records import Record
from conf.schema import Config, Engine, Kv, Load, Model, PromptSource, Sparsity, Workload
from workers.evidence import Evidence, Fact
from workers.prometheus import HistogramDelta, ServerWindow
from workers.verdict import REASONS, InSystem, Reason, Verdict, judge

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
MS = 1_000_000


@dataclass(frozen=True)
class Client:
    cpu_share: float | None = 0.1
    loop_delay_ms: dict = field(default_factory=lambda: {"p50": 0.1, "p99": 1.0})


def cell(**groups) -> Config:
    defaults = {
        "engine": Engine(name="vllm_0_32", version="0.32.0"),
        "model": Model(name="m"),
        "workload": Workload(name="w"),
    }
    return Config(**(defaults | groups))


def row(index=0, **changes) -> Record:
    plain = {
        "index": index, "phase": "measured", "due_ns": 0, "sent_ns": 1 * MS, "first_token_ns": 101 * MS,
        "last_token_ns": 201 * MS, "num_prompt_tokens_requested": 100, "num_prompt_tokens": 100,
        "num_output_tokens_requested": 8, "num_output_tokens": 8, "finish_reason": "length",
    }  # fmt: skip
    return Record(**(plain | changes))


def window(*, requests=2, ttft_s=0.1, **changes) -> ServerWindow:
    plain = {
        "counters": {
            "preemptions": 0.0,
            "prefix_queries": 0.0,
            "prefix_hits": 0.0,
            "completed": float(requests),
        },
        "histograms": {"ttft": HistogramDelta(sum=ttft_s * requests, count=requests)},
        "gauges_before": {"running": 0.0, "waiting": 0.0},
    }
    return ServerWindow(**(plain | changes))


def verdict(config=None, *, evidence=None, metrics=None, client=None, records=None, **options) -> Verdict:
    records = [row(0), row(1)] if records is None else records
    values = HONEST | (evidence or {})
    twice = {name: values[name] for name in ("server.version", "server.kv_cache_dtype")}
    facts = tuple(
        Fact(name=name, value=value, source=source, time_s=0.0)
        for source, named in (("GET x", values), ("server log", twice))
        for name, value in named.items()
    )
    return judge(
        config or cell(),
        Evidence(facts=facts),
        model_config={},
        metrics={"send_lag_ms/p99": 1.0} | (metrics or {}),
        window=options.pop("window", None) or window(requests=len(records)),
        client=client or Client(),
        records=records,
        **options,
    )


def names(found: Verdict) -> list[str]:
    assert {reason.name for reason in found.reasons} <= set(REASONS)
    return [reason.name for reason in found.reasons]


def test_an_honest_run_counts():
    found = verdict()
    assert found.valid
    assert found.to_dict() == {"valid": True, "reasons": []}


def test_a_verdict_lists_its_reasons():
    found = Verdict(reasons=(Reason(name="send_lag", detail="late"),))
    assert found.to_dict() == {"valid": False, "reasons": [{"name": "send_lag", "detail": "late"}]}


def test_a_backend_that_is_not_honoured_is_a_mismatch():
    """Requested TRITON_ATTN, effective FLASH_ATTN (C1)."""
    config = cell(engine=Engine(name="e", version="0.32.0", attention_backend="TRITON_ATTN"))
    found = verdict(config, evidence={"server.attention_backend": "FLASH_ATTN"})
    assert names(found) == ["evidence_mismatch"]
    assert "asked for TRITON_ATTN, the server says FLASH_ATTN" in found.reasons[0].detail
    assert verdict(config, evidence={"server.attention_backend": "TRITON_ATTN"}).valid
    assert names(verdict(config)) == ["evidence_missing"]


def test_all_reasons_are_kept():
    found = verdict(
        evidence={"server.version": "0.31.0", "server.model": None},
        metrics={"send_lag_ms/p99": 21.0},
        client=Client(cpu_share=0.95, loop_delay_ms={"p99": 51.0}),
        output_problem="garbage",
    )
    assert names(found) == [
        "evidence_mismatch", "evidence_mismatch", "evidence_missing", "send_lag", "client_saturated",
        "client_saturated", "output_corrupt",
    ]  # fmt: skip


def test_an_unknown_lag_is_not_a_good_lag():
    assert names(verdict(metrics={"send_lag_ms/p99": None})) == ["evidence_missing"]
    assert names(verdict(client=Client(loop_delay_ms={}))) == ["evidence_missing"]


def prefix(queries, hits, **changes):
    counters = window().counters | {"prefix_queries": queries, "prefix_hits": hits}
    return window(counters=counters, **changes)


@pytest.mark.parametrize(
    ("queries", "hits", "expected"),
    [
        (131072.0, 0.0, []),
        (131072.0, 124518.0, ["warm_cache"]),
        (0.0, 0.0, []),
        (None, None, ["evidence_missing"]),
    ],
)
def test_prefix_cache_of_an_earlier_cell(queries, hits, expected):
    """0 of 131072 is cold, 124518 of 131072 is 95.0 % warm, no counter is unknown (B5)."""
    found = verdict(window=prefix(queries, hits))
    assert names(found) == expected
    if expected == ["warm_cache"]:
        assert "95.0%" in found.reasons[0].detail


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        (Workload(name="w"), ["warm_cache"]),
        (Workload(name="w", shared_prefix_tokens=64), []),
        (Workload(name="w", prompts=PromptSource.file), []),
    ],
)
def test_hits_are_fine_where_prefixes_repeat_by_design(workload, expected):
    config = cell(kv=Kv(prefix_caching=True), workload=workload)
    found = verdict(config, evidence={"server.prefix_caching": True}, window=prefix(100.0, 50.0))
    assert names(found) == expected


def test_compilation_inside_the_window():
    """A log line saying that a kernel was compiled during inference flags the cell (B6)."""
    line = "Triton kernel JIT compilation during inference: _k"
    found = verdict(window=window(jit_events=(line,)))
    assert names(found) == ["jit_in_window"]
    assert line in found.reasons[0].detail
    assert names(verdict(window=window(jit_events=None))) == ["evidence_missing"]


def test_replies_shorter_than_asked_for():
    """15 of 20 replies end at 38 of 512 tokens (B7)."""
    rows = [
        row(i, num_output_tokens_requested=512, num_output_tokens=38 if i < 15 else 512) for i in range(20)
    ]
    found = verdict(records=rows)
    assert names(found) == ["short_output"]
    assert found.reasons[0].detail == "output shorter than requested (15 of 20)"


def test_natural_stops_are_not_short():
    config = cell(workload=Workload(name="w", ignore_eos=False))
    assert verdict(config, records=[row(num_output_tokens=3, finish_reason="stop")]).valid


def test_prompts_longer_than_asked_for():
    """Prompt usage 14 % above the target is flagged likewise, 10 % is inside the limit (B7)."""
    found = verdict(records=[row(num_prompt_tokens=114)])
    assert names(found) == ["short_output"]
    assert "+14% (1 of 1)" in found.reasons[0].detail
    assert verdict(records=[row(num_prompt_tokens=110)]).valid
    assert verdict(records=[row(num_prompt_tokens_requested=None)]).valid


def test_a_restart_is_named_and_nothing_else_is_derived():
    """Counters that fell leave no deltas: one reason, not five (D2)."""
    gone = dict.fromkeys(window().counters)
    found = verdict(window=window(restarted=True, counters=gone, histograms={"ttft": None}))
    assert names(found) == ["server_restarted"]


def test_preemptions_that_cannot_be_read_are_missing():
    """A failed scrape is not 0 preemptions."""
    counters = window().counters | {"preemptions": None}
    assert names(verdict(window=window(counters=counters))) == ["evidence_missing"]


def test_a_load_that_is_still_running():
    found = verdict(window=window(gauges_before={"running": 0.0, "waiting": 2.0}))
    assert names(found) == ["not_drained"]
    assert "waiting=2" in found.reasons[0].detail


def test_failed_requests():
    rows = [row(0), row(1, error="connection reset", first_token_ns=None)]
    found = verdict(records=rows, window=window(requests=1))
    assert names(found) == ["requests_failed"]
    assert found.reasons[0].detail == "1 of 2, first: connection reset"


def test_a_share_of_failures_can_be_allowed():
    load = Load()
    load.limits.failed_share = 0.5
    rows = [row(0), row(1, error="x")]
    assert verdict(cell(load=load), records=rows, window=window(requests=1)).valid


def test_warm_up_rows_do_not_count():
    rows = [row(0), row(0, phase="warmup", error="x"), row(1)]
    assert verdict(records=rows, window=window(requests=2)).valid


def test_no_rows_at_all_are_not_a_run():
    assert "requests_failed" in names(verdict(records=[], window=window(requests=0)))


@pytest.mark.parametrize(("ttft_s", "valid"), [(0.1, True), (0.149, True), (0.151, False), (0.049, False)])
def test_first_token_times_of_client_and_server(ttft_s, valid):
    """The client saw 100 ms from send; 50 ms off are allowed."""
    found = verdict(window=window(ttft_s=ttft_s))
    assert names(found) == ([] if valid else ["client_server_disagree"])


def test_a_share_is_allowed_where_it_is_larger():
    """5 % of 10 s are 500 ms."""
    slow = [row(first_token_ns=10_001 * MS, last_token_ns=11_000 * MS)]
    assert verdict(records=slow, window=window(requests=1, ttft_s=9.6)).valid
    assert not verdict(records=slow, window=window(requests=1, ttft_s=9.4)).valid


def test_counts_of_client_and_server():
    found = verdict(window=window(requests=3))
    assert names(found) == ["client_server_disagree"]
    assert found.reasons[0].detail == "completed requests: the client counted 2, the server 3"


@pytest.mark.parametrize(
    ("generated", "source", "expected"),
    [
        (16.0, "server", []),
        (17.0, "server", ["client_server_disagree"]),
        (None, "server", []),  # a family that does not count them
        (17.0, "client", []),  # chunks of several tokens: our count is no count of tokens
    ],
)
def test_output_tokens_of_client_and_server(generated, source, expected):
    """Two replies of 8 tokens are 16."""
    rows = [row(i, num_output_tokens_source=source) for i in range(2)]
    counters = window().counters | {"generation_tokens": generated}
    found = verdict(records=rows, window=window(counters=counters))
    assert names(found) == expected
    if expected:
        assert found.reasons[0].detail == "output tokens: the client counted 16, the server 17"


S = 1_000 * MS


def overlapping(**changes):
    """Three requests of 4 s, sent at 0, 2 and 4 s: in the system 1, 2, 2, 1 for 2 s each, 1.5 on average over 8 s.

    By Little: 3 requests in 8 s, each 4 s in the system, 3 / 8 x 4 = 1.5. A step of the engine takes 100 ms.
    """
    return [
        row(i, sent_ns=2 * i * S, first_token_ns=2 * i * S + 100 * MS, last_token_ns=(2 * i + 4) * S,
            done_ns=(2 * i + 4) * S, token_ns=tuple(range(2 * i * S + 100 * MS, (2 * i + 4) * S + 1, 100 * MS)),
            **changes)
        for i in range(3)
    ]  # fmt: skip


def scrapes(*counts, every_s=0.5):
    """The server's requests at 0.25 s, 0.75 s, ..."""
    return [InSystem(t_ns=int((0.25 + i * every_s) * S), requests=n) for i, n in enumerate(counts)]


TRUE = (*[1] * 4, *[2] * 4, *[2] * 4, *[1] * 4)  # sixteen scrapes, mean 1.5


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (TRUE, []),
        ([n + 1 for n in TRUE], []),  # 2.5 against 1.5: one request off is allowed
        ([n + 1.1 for n in TRUE], ["client_server_disagree"]),
        ([0] * 16, ["client_server_disagree"]),  # a client that reads its replies late
        ([9] * 9, []),  # nine scrapes are too few to say anything
    ],
)
def test_littles_law(counts, expected):
    """Client 1.5 requests in the system; the server's gauges must say about the same."""
    found = verdict(records=overlapping(), in_system=scrapes(*counts))
    assert names(found) == expected


def test_littles_law_says_both_numbers():
    """At the first scrape, 0.25 s, two steps have ended: the request sent at 0 need not be counted yet, 23 / 16."""
    found = verdict(records=overlapping(), in_system=scrapes(*[4] * 16))
    assert found.reasons[0].detail == (
        "Little's law, mean requests in the system over 16 scrapes: client 1.44 to 1.50, server 4.00 "
        "(allowed: 1.00 more or less)"
    )


def prefilling(*, step_s):
    """Ten requests arrive every 100 ms during one step, whose end gives all of them their first token; then 10 more steps."""
    ends = tuple(int(step_s * S) + i * 100 * MS for i in range(10))
    return [
        row(
            i,
            sent_ns=i * 100 * MS,
            first_token_ns=ends[0],
            last_token_ns=ends[-1],
            done_ns=ends[-1],
            token_ns=ends,
        )
        for i in range(10)
    ]


def test_arrivals_during_a_long_step_are_not_in_the_servers_gauges_yet():
    """A prefill of 8 s: the server still shows the first request alone, and a real vLLM on a slow CPU does so."""
    rows = prefilling(step_s=8)
    assert verdict(records=rows, window=window(requests=10, ttft_s=7.55), in_system=scrapes(*[1] * 15)).valid
    late = verdict(records=rows, window=window(requests=10, ttft_s=7.55), in_system=scrapes(*[12] * 15))
    assert names(late) == ["client_server_disagree"]


def test_replies_that_the_client_reads_late_are_not_explained_by_steps():
    """Steps of 100 ms went on for 8 s, and the server had nobody for all of it: the client kept what was done."""
    rows = [
        row(
            i, sent_ns=0, last_token_ns=8 * S, done_ns=8 * S, token_ns=tuple(range(100 * MS, 8 * S, 100 * MS))
        )
        for i in range(5)
    ]
    found = verdict(records=rows, in_system=scrapes(*[0] * 16), window=window(requests=5))
    assert names(found) == ["client_server_disagree"]


def test_scrapes_outside_the_window_do_not_count():
    """An idle server after the window is not a server that had fewer requests in it."""
    assert verdict(records=overlapping(), in_system=scrapes(*TRUE, *[0] * 50)).valid


def test_uneven_scrapes_compare_the_same_instants():
    """Both sides are taken at the scrapes: only the two busy seconds were scraped, and 2 is 2."""
    busy = [InSystem(t_ns=2 * S + i * 200 * MS, requests=2) for i in range(20)]
    assert verdict(records=overlapping(), in_system=busy).valid
    assert not verdict(
        records=overlapping(), in_system=[InSystem(t_ns=one.t_ns, requests=0.5) for one in busy]
    ).valid


def test_a_share_of_many_requests_is_allowed():
    """100 requests at once for 8 s: 109 are within 10 %, 111 are not."""
    rows = [
        row(i, sent_ns=0, first_token_ns=100 * MS, last_token_ns=8 * S - 1, done_ns=8 * S) for i in range(100)
    ]
    assert verdict(records=rows, in_system=scrapes(*[109] * 15)).valid
    assert names(verdict(records=rows, in_system=scrapes(*[111] * 15))) == ["client_server_disagree"]


def test_a_long_window_that_was_not_scraped_is_unknown():
    """8 s at 0.25 s are 32 scrapes; that there were 3 is not a short window but missing evidence."""
    load = Load(scrape_interval_s=0.25)
    found = verdict(cell(load=load), records=overlapping(), in_system=scrapes(1, 1, 1))
    assert names(found) == ["evidence_missing"]
    assert found.reasons[0].detail == "requests in the system: 3 scrapes in the window, about 32 were due"


def test_a_swept_setting_that_nobody_confirms_is_missing():
    config = cell(engine=Engine(name="vllm_0_32", version="0.32.0", max_num_seqs=64))
    assert verdict(config).valid
    assert names(verdict(config, swept={"engine.max_num_seqs"})) == ["evidence_missing"]
    assert verdict(config, evidence={"server.max_num_seqs": 64}, swept={"engine.max_num_seqs"}).valid


def test_unknown_server_counts_are_missing():
    counters = window().counters | {"completed": None}
    assert names(verdict(window=window(counters=counters))) == ["evidence_missing"]


@pytest.mark.parametrize(
    ("density", "expected"),
    [(0.25, []), (1.0, ["sparsity_without_effect"]), (None, ["evidence_missing"])],
)
def test_sparsity_must_have_been_measured(density, expected):
    config = cell(sparsity=Sparsity(method="blasst", scale_factor=1.0))
    assert names(verdict(config, metrics={"sparsity/density": density})) == expected
