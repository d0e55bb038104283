"""Whether a run counts: every reason why not, by name.

An invalid run keeps its numbers and is left out of comparisons. An unknown is never taken for a good value: what a
reason needs and cannot read is ``evidence_missing``.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from analysis.records import Record
from conf.schema import Config, PromptSource
from workers.evidence import Evidence
from workers.prometheus import HistogramDelta, ServerWindow
from workers.rules import findings

REASONS = (
    "evidence_mismatch", "evidence_missing", "send_lag", "client_saturated", "requests_failed", "output_corrupt",
    "short_output", "warm_cache", "jit_in_window", "server_restarted", "sparsity_without_effect", "not_drained",
    "client_server_disagree",
)  # fmt: skip

Times = npt.NDArray[np.int64]

STEP_GAP_NS = 5_000_000  # token events closer than this belong to one step of the engine
# Steps until a request that arrived in one is counted for certain: the rest of that step, and, where the next one is
# already scheduled while it runs, two more.
UNSEEN_STEPS = 3


class ClientStats(Protocol):
    """What the load generator knows about itself."""

    @property
    def cpu_share(self) -> float | None:
        """CPU time of its busiest process / wall time."""

    @property
    def loop_delay_ms(self) -> Mapping[str, float]:
        """How late a timer was served: ``p99`` and others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InSystem:
    """How many requests the server had, running and waiting, at one scrape."""

    t_ns: int
    requests: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a run does not count. ``name`` is one of :data:`REASONS`."""

    name: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Valid, or the reasons why not."""

    reasons: tuple[Reason, ...] = ()

    @property
    def valid(self) -> bool:
        """True if there is no reason against it."""
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        """As stored in ``result.json``."""
        return {"valid": self.valid, "reasons": [asdict(reason) for reason in self.reasons]}


def judge(
    config: Config,
    evidence: Evidence,
    *,
    model_config: Mapping[str, Any],
    metrics: Mapping[str, float | None],
    window: ServerWindow,
    client: ClientStats,
    records: Sequence[Record],
    in_system: Sequence[InSystem] = (),
    swept: Collection[str] = (),
    output_problem: str | None = None,
    output_unknown: str | None = None,
) -> Verdict:
    """Every reason against one run.

    Args:
        config: what was asked for, with ``load.limits``.
        evidence: what the server reported.
        model_config: the served model's ``config.json``; empty if not known.
        metrics: the run's metrics; read: ``send_lag_ms/p99``, ``sparsity/density``.
        window: deltas of the server's metrics over the measured window.
        client: the load generator's own state.
        records: the run's rows; those of the warm-up are ignored.
        in_system: the server's requests at the scrapes, on the clock of the records.
        swept: settings that are axes of the sweep, which must be confirmed.
        output_problem: what was wrong with the answers to fixed probes, if they were asked.
        output_unknown: why nobody can say whether those answers are right.
    """
    measured = [record for record in records if record.phase == "measured"]
    reasons = [
        *_evidence(config, evidence, model_config=model_config, swept=swept),
        *_window(window),
        *_client(config, metrics=metrics, client=client),
        *_failed(config, measured),
        *([Reason(name="output_corrupt", detail=output_problem)] if output_problem else []),
        *([Reason(name="evidence_missing", detail=output_unknown)] if output_unknown else []),
        *_lengths(config, measured),
        *_prefix_cache(config, window),
        *_sparsity(config, metrics),
        *_agreement(config, window, measured),
        *_littles_law(config, in_system, measured),
    ]
    return Verdict(reasons=tuple(reasons))


def _evidence(
    config: Config, evidence: Evidence, *, model_config: Mapping[str, Any], swept: Collection[str]
) -> list[Reason]:
    return [
        Reason(name="evidence_missing" if finding.missing else "evidence_mismatch", detail=finding.detail)
        for finding in findings(config, evidence, model_config=model_config, swept=swept)
    ]


def _window(window: ServerWindow) -> list[Reason]:
    reasons = []
    if window.restarted:
        reasons.append(
            Reason(name="server_restarted", detail="a counter fell or was created anew in the window")
        )
    elif window.counters.get("preemptions") is None:
        reasons.append(
            Reason(name="evidence_missing", detail="preemptions: the counter could not be read at both ends")
        )
    if window.jit_events is None:
        reasons.append(
            Reason(name="evidence_missing", detail="compilation: the server's log could not be read")
        )
    elif window.jit_events:
        first = window.jit_events[0]
        reasons.append(
            Reason(name="jit_in_window", detail=f"{len(window.jit_events)} compilation(s), first: {first}")
        )
    busy = {name: window.gauges_before.get(name) for name in ("running", "waiting")}
    if any(busy.values()):
        text = ", ".join(f"{name}={value:g}" for name, value in busy.items() if value is not None)
        reasons.append(Reason(name="not_drained", detail=f"at the start of the window: {text}"))
    return reasons


def _client(config: Config, *, metrics: Mapping[str, float | None], client: ClientStats) -> list[Reason]:
    limits = config.load.limits
    lag_ms = metrics.get("send_lag_ms/p99")
    checks = [
        ("send_lag", "p99 send lag", lag_ms, limits.send_lag_p99_ms, "ms"),
        ("client_saturated", "client CPU share", client.cpu_share, limits.client_cpu_share, ""),
        (
            "client_saturated",
            "p99 loop delay",
            client.loop_delay_ms.get("p99"),
            limits.loop_delay_p99_ms,
            "ms",
        ),
    ]
    reasons = []
    for name, what, value, limit, unit in checks:
        if value is None:
            reasons.append(Reason(name="evidence_missing", detail=f"{what} is not known"))
        elif value > limit:
            reasons.append(
                Reason(
                    name=name,
                    detail=f"{what} {value:.3g} {unit} > {limit:g} {unit}".replace("  ", " ").strip(),
                )
            )
    return reasons


def _failed(config: Config, records: Sequence[Record]) -> list[Reason]:
    failed = [record for record in records if record.failed]
    if not records:
        return [Reason(name="requests_failed", detail="no request was measured")]
    if len(failed) / len(records) <= config.load.limits.failed_share:
        return []
    return [
        Reason(name="requests_failed", detail=f"{len(failed)} of {len(records)}, first: {failed[0].error}")
    ]


def _lengths(config: Config, records: Sequence[Record]) -> list[Reason]:
    answered = [record for record in records if not record.failed]
    limits = config.load.limits
    reasons = []
    forced = [record for record in answered if record.num_output_tokens_requested is not None]
    short = [
        record
        for record in forced
        if (record.num_output_tokens or 0) < (record.num_output_tokens_requested or 0)
    ]
    if config.workload.ignore_eos and short and len(short) / len(forced) > limits.short_output_share:
        detail = f"output shorter than requested ({len(short)} of {len(forced)})"
        reasons.append(Reason(name="short_output", detail=detail))
    sized = [
        record
        for record in answered
        if record.num_prompt_tokens_requested and record.num_prompt_tokens is not None
    ]
    off = [record for record in sized if not _prompt_fits(record, limit=limits.prompt_length_error)]
    if off and len(off) / len(sized) > limits.short_output_share:
        worst = max((_prompt_error(record) for record in off), key=abs)
        detail = (
            f"prompt length differs from the requested by up to {worst:+.0%} ({len(off)} of {len(sized)})"
        )
        reasons.append(Reason(name="short_output", detail=detail))
    return reasons


def _prompt_fits(record: Record, *, limit: float) -> bool:
    asked, used = record.num_prompt_tokens_requested or 0, record.num_prompt_tokens or 0
    return abs(used - asked) <= limit * asked


def _prompt_error(record: Record) -> float:
    return (record.num_prompt_tokens or 0) / (record.num_prompt_tokens_requested or 1) - 1


def _prefix_cache(config: Config, window: ServerWindow) -> list[Reason]:
    if window.restarted or expects_prefix_hits(config):
        return []
    queries, hits = window.counters.get("prefix_queries"), window.counters.get("prefix_hits")
    if queries is None or hits is None:
        if not config.kv.prefix_caching and config.engine.family == "v0":
            return []  # V0 exports them only with caching on
        return [
            Reason(
                name="evidence_missing",
                detail="prefix cache: hit share unknown, its counters could not be read",
            )
        ]
    share = hits / queries if queries else 0.0
    if share <= config.load.limits.prefix_hit_share:
        return []
    return [
        Reason(
            name="warm_cache",
            detail=f"prefix hit share {share:.1%} > {config.load.limits.prefix_hit_share:.1%}",
        )
    ]


def expects_prefix_hits(config: Config) -> bool:
    """True if caching is on and the workload repeats prefixes by design."""
    repeats = config.workload.shared_prefix_tokens > 0 or config.workload.prompts is not PromptSource.random
    return config.kv.prefix_caching and repeats


def _sparsity(config: Config, metrics: Mapping[str, float | None]) -> list[Reason]:
    if config.sparsity.method == "dense":
        return []
    density = metrics.get("sparsity/density")
    if density is None:
        return [Reason(name="evidence_missing", detail="sparsity: the measured density could not be read")]
    if density >= 1.0:
        return [Reason(name="sparsity_without_effect", detail=f"{config.sparsity.method} skipped no block")]
    return []


def _agreement(config: Config, window: ServerWindow, records: Sequence[Record]) -> list[Reason]:
    """The server counted the requests that we counted, and saw about the first-token times that we saw."""
    if window.restarted:
        return []
    answered = [record for record in records if not record.failed]
    completed, ttft = window.counters.get("completed"), window.histograms.get("ttft")
    if completed is None or ttft is None:
        return [
            Reason(
                name="evidence_missing",
                detail="client against server: the server's request counts are unknown",
            )
        ]
    reasons = []
    if len(answered) == len(records):
        reasons = [
            Reason(
                name="client_server_disagree",
                detail=f"{what}: the client counted {ours}, the server {theirs:g}",
            )
            for what, ours, theirs in _counts(window, answered, completed=completed)
            if ours != theirs
        ]
    return [*reasons, *_ttft_agreement(config, answered, ttft=ttft)]


def _counts(
    window: ServerWindow, answered: Sequence[Record], *, completed: float
) -> list[tuple[str, int, float]]:
    """What both sides count alike: requests, and output tokens where the server's usage gave ours."""
    counts = [("completed requests", len(answered), completed)]
    generated = window.counters.get("generation_tokens")
    if generated is not None and all(record.num_output_tokens_source == "server" for record in answered):
        tokens = sum(record.num_output_tokens or 0 for record in answered)
        counts.append(("output tokens", tokens, generated))
    return counts


def _ttft_agreement(config: Config, answered: Sequence[Record], *, ttft: HistogramDelta) -> list[Reason]:
    """The client's mean TTFT from send against the server's own, which starts a little later."""
    seen_ms = [
        (record.first_token_ns - record.sent_ns) / 1e6
        for record in answered
        if record.first_token_ns is not None and record.sent_ns is not None
    ]
    if not seen_ms or ttft.mean is None:
        return []
    client_ms, server_ms = sum(seen_ms) / len(seen_ms), ttft.mean * 1000
    limits = config.load.limits
    allowed_ms = max(limits.client_server_ttft_ms, limits.client_server_ttft_share * client_ms)
    if abs(client_ms - server_ms) <= allowed_ms:
        return []
    detail = f"mean TTFT from send: client {client_ms:.1f} ms, server {server_ms:.1f} ms (allowed: {allowed_ms:.1f} ms)"
    return [Reason(name="client_server_disagree", detail=detail)]


def _littles_law(config: Config, in_system: Sequence[InSystem], records: Sequence[Record]) -> list[Reason]:
    """Requests in the system, by the client's stamps and by the server's gauges, are the same number.

    Little: the mean number in the system is the arrival rate times the mean time in it, that is the mean over time of
    ``#{sent <= t < done}``. Both sides take that mean over the same instants, those of the scrapes, so that late or
    unevenly spaced scrapes cannot make them differ. A server renews its gauges at the end of a step and does not see
    who arrived meanwhile, so the client has a range: with and without those sent since the last few steps.
    Too few scrapes say nothing and are ignored, unless the window was long enough for twice as many.
    """
    limits = config.load.limits
    sent, done = _spans_ns(records)
    if not len(sent):
        return []
    inside = [scrape for scrape in in_system if sent[0] <= scrape.t_ns < done[-1]]
    if len(inside) < limits.in_system_scrapes:
        expected = (done[-1] - sent[0]) / 1e9 / config.load.scrape_interval_s
        if expected < 2 * limits.in_system_scrapes:
            return []
        detail = f"requests in the system: {len(inside)} scrapes in the window, about {expected:.0f} were due"
        return [Reason(name="evidence_missing", detail=detail)]
    times = np.array([scrape.t_ns for scrape in inside], dtype=np.int64)
    gone = np.searchsorted(done, times, side="right")
    most = float(np.mean(np.searchsorted(sent, times, side="right") - gone))
    known = np.searchsorted(sent, _renewed_ns(records, times), side="right")
    least = float(np.mean(np.maximum(known - gone, 0)))
    server = sum(scrape.requests for scrape in inside) / len(inside)
    allowed = max(limits.in_system_requests, limits.in_system_share * most)
    if least - allowed <= server <= most + allowed:
        return []
    detail = (
        f"Little's law, mean requests in the system over {len(inside)} scrapes: "
        f"client {least:.2f} to {most:.2f}, server {server:.2f} (allowed: {allowed:.2f} more or less)"
    )
    return [Reason(name="client_server_disagree", detail=detail)]


def _spans_ns(records: Sequence[Record]) -> tuple[Times, Times]:
    """When requests were sent and when they were done, each in order of time; those that never ended are left out."""
    spans = [
        (record.sent_ns, record.done_ns)
        for record in records
        if record.sent_ns is not None and record.done_ns is not None
    ]
    sent, done = (
        (np.array(sorted(ends), dtype=np.int64) for ends in zip(*spans, strict=True)) if spans else ((), ())
    )
    return np.asarray(sent, dtype=np.int64), np.asarray(done, dtype=np.int64)


def _renewed_ns(records: Sequence[Record], times: Times) -> Times:
    """For each time: before when a request must have been sent to be in the server's gauges for certain.

    A step of the engine ends with tokens for all who run, so token events that lie together are one step's end.
    """
    events = np.array(sorted(t for record in records for t in record.token_ns), dtype=np.int64)
    ends = events[np.diff(events, prepend=-STEP_GAP_NS - 1) > STEP_GAP_NS]
    place = np.searchsorted(ends, times, side="right") - UNSEEN_STEPS
    never = np.full(len(times), np.iinfo(np.int64).min)
    return np.where(place >= 0, ends[np.maximum(place, 0)], never) if len(ends) else never
