"""Every latency, rate and count of a run. The docstrings are the definitions; ``METRICS_VERSION`` names them.

Stamps are those of :class:`analysis.records.Record` (integer ns on one clock): ``due``, ``queued``, ``sent``,
``first_token``, ``token[i]``, ``last_token``, ``done``. A *token event* is a streamed chunk that carries at least
one generated token of any channel; ``n`` is the number of generated tokens. An undefined value is ``None``, never 0.

A request is *completed* if it has no error and at least one token event; every other request is *failed*.
Latencies are taken from completed requests, lags of the client from all requests that were sent.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analysis.records import Record
from conf.schema import Slo

# Changes whenever a formula below changes; runs of different versions are not compared.
METRICS_VERSION = "1"

NS_PER_MS = 1e6
NS_PER_S = 1e9
# A p99 from fewer samples is close to the largest value; it is reported with its n and a warning.
MIN_SAMPLES_OF_P99 = 100
# Share of the arrival window that is left out of the steady window while the system fills.
STEADY_RAMP_SHARE = 0.1
# Fewer arrivals do not show a trend.
MIN_REQUESTS_OF_TREND = 20
# Share of the arrivals that must stay behind for a queue to count as growing.
MIN_GROWTH_SHARE = 0.1

_PERCENTILES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
_STATISTICS = ("mean", *_PERCENTILES, "std")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers of one run: flat keys ``<metric>/<statistic>`` and sentences on how far to trust them."""

    metrics: dict[str, float | None]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How one number differs between repeats. ``std`` is the sample deviation, ``None`` for one repeat."""

    num_repeats: int
    min: float
    max: float
    std: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """Several repeats of one cell: statistics of the pooled requests, and the spread between repeats apart."""

    metrics: dict[str, float | None]
    spread: dict[str, Spread]
    warnings: tuple[str, ...] = ()


# Per request ----------------------------------------------------------------------------------------------------


def completed(record: Record) -> bool:
    """Tell whether the request has an answer: no error and at least one token event.

    ``vllm bench serve`` counts a stream without tokens as failed too, in versions that check for it.
    """
    return record.error is None and record.first_token_ns is not None


def ttft_ns(record: Record) -> int | None:
    """TTFT = ``first_token - due``; undefined without a token.

    ``vllm bench serve`` starts at the send, so that a late client or a client-side queue makes its figure smaller,
    and lets an empty first chunk count as the first token.
    """
    return _gap(record.due_ns, record.first_token_ns)


def ttft_from_send_ns(record: Record) -> int | None:
    """TTFT from send = ``first_token - sent``; undefined without a token. TTFT of ``vllm bench serve``."""
    return _gap(record.sent_ns, record.first_token_ns)


def first_answer_ns(record: Record) -> int | None:
    """First-answer time = ``first token that is not reasoning - due``; undefined without such a token.

    ``vllm bench serve`` has no such figure.
    """
    return _gap(record.due_ns, record.first_answer_ns)


def tpot_ns(record: Record) -> float | None:
    """TPOT = ``(last_token - first_token) / (n - 1)``; undefined for n ≤ 1 and for unknown n.

    ``vllm bench serve`` has the same formula, but puts 0 in the place of an undefined value for its goodput.
    """
    span = _gap(record.first_token_ns, record.last_token_ns)
    count = record.num_output_tokens
    if span is None or count is None or count <= 1:
        return None
    return span / (count - 1)


def itl_ns(record: Record) -> list[int]:
    """ITL = gaps between consecutive token events; none with fewer than two events.

    The gaps of a request sum to ``last_token - first_token``. They are *per chunk* when :func:`itl_per_chunk`.
    ``vllm bench serve`` has the same gaps, and in some versions one more for the closing usage event.
    """
    return [int(gap) for gap in np.diff(np.asarray(record.token_ns, dtype=np.int64))]


def itl_per_chunk(record: Record) -> bool:
    """Tell whether the request's token events are not one token each (``len(token) ≠ n``; unknown n: false)."""
    return record.num_output_tokens is not None and len(record.token_ns) != record.num_output_tokens


def e2el_ns(record: Record) -> int | None:
    """E2EL = ``last_token - due``; undefined without a token. ``vllm bench serve`` starts at the send."""
    return _gap(record.due_ns, record.last_token_ns)


def e2el_from_send_ns(record: Record) -> int | None:
    """E2EL from send = ``last_token - sent``; undefined without a token. E2EL of ``vllm bench serve``."""
    return _gap(record.sent_ns, record.last_token_ns)


def send_lag_ns(record: Record) -> int | None:
    """Send lag = ``sent - due``; undefined if not sent. Holds the wait for a free place under a concurrency cap.

    ``vllm bench serve`` has no such figure.
    """
    return _gap(record.due_ns, record.sent_ns)


def client_queue_ns(record: Record) -> int | None:
    """Client queue time = ``sent - queued``; undefined without a concurrency cap or if not sent.

    ``vllm bench serve`` waits here too (``--max-concurrency``) and reports it nowhere.
    """
    return _gap(record.queued_ns, record.sent_ns)


def schedule_lag_ns(record: Record) -> int | None:
    """Schedule lag = ``queued - due`` under a concurrency cap, else ``sent - due``; undefined if neither happened.

    The part of the send lag that is the client's own fault: the cap's queue is left out of it.
    ``vllm bench serve`` has no such figure.
    """
    return _gap(record.due_ns, record.sent_ns if record.queued_ns is None else record.queued_ns)


def short_output(record: Record) -> bool:
    """Tell whether a completed request has fewer tokens than it asked for (either count unknown: false)."""
    asked, got = record.num_output_tokens_requested, record.num_output_tokens
    return completed(record) and asked is not None and got is not None and got < asked


def count_mismatch(record: Record) -> bool:
    """Tell whether the client counted another number of tokens than the server reported."""
    if record.num_output_tokens_source != "server" or record.num_output_tokens_client is None:
        return False
    return record.num_output_tokens_client != record.num_output_tokens


def prompt_length_error(record: Record) -> float | None:
    """Relative error of the prompt length = ``server's prompt tokens / requested - 1``; undefined if unknown."""
    asked, got = record.num_prompt_tokens_requested, record.num_prompt_tokens
    if asked is None or got is None or asked == 0:
        return None
    return got / asked - 1


def meets(record: Record, slo: Slo) -> bool:
    """Tell whether a request is good: completed, and every limit that is set holds (``<=``).

    A one-token reply has no TPOT and cannot break its limit; a reply of unknown length cannot be said to hold it.
    ``vllm bench serve`` agrees on the first (it compares 0), and measures TTFT and E2EL from the send.
    """
    if not completed(record):
        return False
    tpot_known = record.num_output_tokens is not None or slo.tpot_ms is None
    values = ((ttft_ns(record), slo.ttft_ms), (tpot_ns(record), slo.tpot_ms), (e2el_ns(record), slo.e2el_ms))
    return tpot_known and all(
        value is None or limit is None or value / NS_PER_MS <= limit for value, limit in values
    )


def _gap(start: int | None, end: int | None) -> int | None:
    return None if start is None or end is None else end - start


# Per run --------------------------------------------------------------------------------------------------------

_OF_COMPLETED: dict[str, Callable[[Record], float | None]] = {
    "ttft_ms": ttft_ns,
    "ttft_from_send_ms": ttft_from_send_ns,
    "first_answer_ms": first_answer_ns,
    "tpot_ms": tpot_ns,
    "e2el_ms": e2el_ns,
    "e2el_from_send_ms": e2el_from_send_ns,
}
_OF_ALL: dict[str, Callable[[Record], float | None]] = {
    "send_lag_ms": send_lag_ns,
    "client_queue_ms": client_queue_ns,
    "schedule_lag_ms": schedule_lag_ns,
}


def summarise(records: Sequence[Record], *, slo: Slo, duration_ns: int | None = None) -> Summary:
    """Compute every number of one run; rows of another phase than ``measured`` are left out.

    ``duration_ns`` is the full duration, from the first due time until the last request is answered or given up;
    ``None``: :func:`run_duration_ns`.
    """
    rows = measured(records)
    duration = run_duration_ns(rows) if duration_ns is None else duration_ns
    metrics = statistics_of(samples_ms(rows))
    metrics |= _rates(rows, slo=slo, duration_ns=duration) | _counts(rows)
    growing = saturated(rows)
    metrics["run/duration_s"] = None if duration is None else duration / NS_PER_S
    metrics["run/saturated"] = None if growing is None else float(growing)
    return Summary(metrics=metrics, warnings=_warnings(metrics))


def pooled(repeats: Sequence[Sequence[Record]], *, slo: Slo) -> Pooled:
    """Put the requests of several repeats together.

    Statistics of latencies come from the pooled samples, never from averaged percentiles; counts are sums; rates,
    throughputs and shares, which belong to one run, are means over the repeats that have them. ``spread`` holds
    every number's range over the repeats. ``vllm bench serve`` does not pool.
    """
    runs = [summarise(records, slo=slo).metrics for records in repeats]
    rows = [record for records in repeats for record in measured(records)]
    metrics = _means(runs) | statistics_of(samples_ms(rows)) | _counts(rows)
    return Pooled(metrics=metrics, spread=_spreads(runs), warnings=_warnings(metrics))


def measured(records: Iterable[Record]) -> list[Record]:
    """Keep the rows that may enter statistics."""
    return [record for record in records if record.phase == "measured"]


def samples_ms(records: Sequence[Record]) -> dict[str, npt.NDArray[np.float64]]:
    """Collect the defined values of every per-request metric, in ms."""
    answered = [record for record in records if completed(record)]
    samples = {name: _defined_ms(answered, formula) for name, formula in _OF_COMPLETED.items()}
    samples |= {name: _defined_ms(records, formula) for name, formula in _OF_ALL.items()}
    gaps = [np.diff(np.asarray(record.token_ns, dtype=np.int64)) for record in answered]
    samples["itl_ms"] = np.concatenate([np.empty(0), *gaps]) / NS_PER_MS
    return samples


def statistics_of(samples: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, float | None]:
    """Describe each sample by mean, percentiles (linear), population std and n, under ``<metric>/<statistic>``."""
    return {
        f"{name}/{key}": value
        for name, values in samples.items()
        for key, value in statistics(values).items()
    }


def statistics(values: npt.ArrayLike) -> dict[str, float | None]:
    """Compute mean, p50, p90, p95, p99 (numpy, linear), population std and n; all but n undefined for n = 0.

    The same formulas as in ``vllm bench serve``, which reports 0 for an empty sample.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return dict.fromkeys(_STATISTICS) | {"n": 0.0}
    percentiles = np.percentile(array, list(_PERCENTILES.values()))
    described = dict(zip(_PERCENTILES, map(float, percentiles), strict=True))
    return {"mean": float(array.mean()), **described, "std": float(array.std()), "n": float(array.size)}


def run_duration_ns(records: Sequence[Record]) -> int | None:
    """Full duration = last stamp of any request - first due time; undefined without requests.

    ``vllm bench serve`` starts when its first task starts and ends when its last one returns.
    """
    if not records:
        return None
    ends = [
        stamp
        for record in records
        for stamp in (record.due_ns, record.sent_ns, record.last_token_ns, record.done_ns)
        if stamp is not None
    ]
    return max(ends) - min(record.due_ns for record in records)


def event_rate_per_s(stamps: Iterable[int | None]) -> float | None:
    """Rate of events = ``(count - 1) / (last - first)``; undefined for fewer than two, or all at one time.

    *Offered* takes due times, *sent* the sends, *completed* the last tokens of completed requests: one formula, so
    that the three can be compared, and none holds the time the last request takes.
    """
    known = [stamp for stamp in stamps if stamp is not None]
    if len(known) < 2 or max(known) == min(known):
        return None
    return (len(known) - 1) / (max(known) - min(known)) * NS_PER_S


def output_tokens_per_s(records: Sequence[Record], *, duration_ns: int | None) -> float | None:
    """Output token throughput = sum of n over completed requests / full duration; ``output_throughput`` of vLLM.

    Undefined without duration or if the n of a completed request is unknown.
    """
    counts = [record.num_output_tokens for record in records if completed(record)]
    known = [count for count in counts if count is not None]
    return per_s(sum(known), duration_ns=duration_ns) if len(known) == len(counts) else None


def steady_window_ns(records: Sequence[Record]) -> tuple[int, int] | None:
    """Steady window = the arrival window (first to last due time) without its first tenth.

    Load is offered all through it, and neither the filling at the start nor the draining at the end is inside.
    Undefined if all requests are due at one time.
    """
    dues = [record.due_ns for record in records]
    if not dues or max(dues) == min(dues):
        return None
    start, end = min(dues), max(dues)
    return start + round(STEADY_RAMP_SHARE * (end - start)), end


def output_tokens_per_s_steady(records: Sequence[Record]) -> float | None:
    """Steady output throughput = tokens whose event lies in the steady window / its length.

    A token event of a completed request counts as ``n / events`` tokens. Undefined without a steady window or if an
    n is unknown. ``vllm bench serve`` has no such figure (its peak is the best single second).
    """
    window = steady_window_ns(records)
    answered = [record for record in records if completed(record)]
    if window is None or any(record.num_output_tokens is None for record in answered):
        return None
    tokens = sum(_tokens_inside(record, window) for record in answered)
    return tokens / (window[1] - window[0]) * NS_PER_S


def goodput_per_s(records: Sequence[Record], *, slo: Slo, duration_ns: int | None) -> float | None:
    """Goodput = requests that meet every limit of the SLO / full duration; failed requests are misses.

    Undefined without duration or if the SLO sets no limit. ``vllm bench serve`` has the same formula.
    """
    if slo.ttft_ms is None and slo.tpot_ms is None and slo.e2el_ms is None:
        return None
    return per_s(sum(meets(record, slo) for record in records), duration_ns=duration_ns)


def per_s(count: float, *, duration_ns: int | None) -> float | None:
    """Divide a count by a duration; undefined for an unknown or empty one."""
    return None if not duration_ns or duration_ns < 0 else count / duration_ns * NS_PER_S


def saturated(records: Sequence[Record]) -> bool | None:
    """Tell whether the queue still grows when the last request arrives.

    Over the second half of the arrival window, the mean number of requests *waiting* (due, without a token, not
    given up) in its last quarter is compared with that in the quarter before. The run is saturated if the rise is
    at least 2 requests and at least a tenth of the arrivals of one quarter: that share of the load stays behind.
    An engine that admits everything and slows down instead shows in the number of requests *in the system* (due,
    not finished). It counts in the same way, if the rise is also above twice the square root of its level (the
    noise of independent arrivals), and if the requests of the first quarter took less than half the window (else
    the system is merely filling).
    Undefined for fewer than 20 requests or arrivals at one time. ``vllm bench serve`` has no such figure.
    Simulated Poisson arrivals and exponential service, 300 requests, 1 or 16 servers: called saturated in 0-2 % of
    the runs at 0.7 of the capacity, 11 % at 0.9, 67-70 % at 1.2, 99 % at 1.5.
    """
    rows = measured(records)
    dues = np.array(sorted(record.due_ns for record in rows), dtype=np.float64)
    if len(dues) < MIN_REQUESTS_OF_TREND or dues[0] == dues[-1]:
        return None
    waiting_ends = np.array([_end_of_waiting(record) for record in rows])
    system_ends = np.array([_end_in_system(record) for record in rows])
    if _grows(dues, waiting_ends, noise=0.0):
        return True
    return _filled_early(rows, dues) and _grows(dues, system_ends, noise=2.0)


def vllm_names(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Rename to the spelling of ``vllm bench serve`` result files: ``ttft_ms/p50`` → ``median_ttft_ms``.

    Only the names are vLLM's: ``*_ttft_ms`` and ``*_e2el_ms`` start at the due time (see :func:`ttft_ns`), the
    figures that match its own are ``*_ttft_from_send_ms`` and ``*_e2el_from_send_ms``.
    """
    renamed: dict[str, float | None] = {}
    for key, value in metrics.items():
        metric, _, statistic = key.partition("/")
        if key in _VLLM_NAMES:
            renamed[_VLLM_NAMES[key]] = value
        elif statistic in _STATISTICS and metric.endswith("_ms"):
            renamed[f"{'median' if statistic == 'p50' else statistic}_{metric}"] = value
    return renamed


_VLLM_NAMES = {
    "run/duration_s": "duration",
    "requests/completed": "completed",
    "requests/failed": "failed",
    "prompt_tokens/total": "total_input_tokens",
    "output_tokens/total": "total_output_tokens",
    "throughput/requests_per_s": "request_throughput",
    "throughput/output_tokens_per_s": "output_throughput",
    "goodput/requests_per_s": "request_goodput",
}


def _defined_ms(
    records: Iterable[Record], formula: Callable[[Record], float | None]
) -> npt.NDArray[np.float64]:
    values = (formula(record) for record in records)
    return np.array([value for value in values if value is not None], dtype=np.float64) / NS_PER_MS


def _rates(rows: Sequence[Record], *, slo: Slo, duration_ns: int | None) -> dict[str, float | None]:
    answered = [record for record in rows if completed(record)]
    return {
        "rate/offered_per_s": event_rate_per_s(record.due_ns for record in rows),
        "rate/sent_per_s": event_rate_per_s(record.sent_ns for record in rows),
        "rate/completed_per_s": event_rate_per_s(record.last_token_ns for record in answered),
        "throughput/requests_per_s": per_s(len(answered), duration_ns=duration_ns),
        "throughput/output_tokens_per_s": output_tokens_per_s(rows, duration_ns=duration_ns),
        "throughput/output_tokens_per_s_steady": output_tokens_per_s_steady(rows),
        "goodput/requests_per_s": goodput_per_s(rows, slo=slo, duration_ns=duration_ns),
    }


def _counts(rows: Sequence[Record]) -> dict[str, float | None]:
    answered = [record for record in rows if completed(record)]
    errors = [error for error in map(prompt_length_error, answered) if error is not None]
    return {
        "requests/total": float(len(rows)),
        "requests/completed": float(len(answered)),
        "requests/failed": float(len(rows) - len(answered)),
        "requests/short_output": float(sum(map(short_output, rows))),
        "requests/count_mismatch": float(sum(map(count_mismatch, answered))),
        "requests/itl_per_chunk": float(sum(map(itl_per_chunk, answered))),
        "requests/counted_by_client": float(sum(r.num_output_tokens_source == "client" for r in answered)),
        "prompt_tokens/max_relative_error": max(map(abs, errors), default=None),
        **_totals("prompt_tokens", [record.num_prompt_tokens for record in answered]),
        **_totals("output_tokens", [record.num_output_tokens for record in answered]),
    }


def _totals(name: str, counts: Sequence[int | None]) -> dict[str, float | None]:
    known = [count for count in counts if count is not None]
    complete = bool(known) and len(known) == len(counts)
    return {
        f"{name}/total": float(sum(known)) if complete else None,
        f"{name}/mean": float(np.mean(known)) if complete else None,
    }


def _tokens_inside(record: Record, window: tuple[int, int]) -> float:
    if not record.token_ns or record.num_output_tokens is None:
        return 0.0
    inside = sum(window[0] <= stamp < window[1] for stamp in record.token_ns)
    return inside * record.num_output_tokens / len(record.token_ns)


def _end_of_waiting(record: Record) -> float:
    ended = record.done_ns if record.first_token_ns is None else record.first_token_ns
    return np.inf if ended is None else float(ended)


def _end_in_system(record: Record) -> float:
    ended = record.done_ns if record.last_token_ns is None else record.last_token_ns
    return np.inf if ended is None else float(ended)


def _grows(dues: npt.NDArray[np.float64], ends: npt.NDArray[np.float64], *, noise: float) -> bool:
    start, end = dues[0], dues[-1]
    middle, last = (start + end) / 2, start + (end - start) * 3 / 4
    before, after = _mean_inside(dues, ends, middle, last), _mean_inside(dues, ends, last, end)
    arrivals = float(np.count_nonzero(dues > middle)) / 2
    return bool(after - before >= max(2.0, MIN_GROWTH_SHARE * arrivals, noise * np.sqrt(before)))


def _mean_inside(
    dues: npt.NDArray[np.float64], ends: npt.NDArray[np.float64], start: float, end: float
) -> float:
    """Time average over start..end of the number that is due and not ended: areas of arrivals - departures."""
    arrived = np.clip(end - dues, 0, end - start).sum()
    departed = np.clip(end - ends, 0, end - start).sum()
    return float((arrived - departed) / (end - start))


def _filled_early(rows: Sequence[Record], dues: npt.NDArray[np.float64]) -> bool:
    half = (dues[-1] - dues[0]) / 2
    first = [record for record in rows if record.due_ns <= dues[0] + half / 2]
    return all(_end_in_system(record) - record.due_ns <= half for record in first)


def _means(runs: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    values = _by_key(runs)
    keys = dict.fromkeys(key for run in runs for key in run)
    return {key: float(np.mean(values[key])) if values[key] else None for key in keys}


def _spreads(runs: Sequence[Mapping[str, float | None]]) -> dict[str, Spread]:
    return {key: _spread(values) for key, values in _by_key(runs).items() if values}


def _spread(values: Sequence[float]) -> Spread:
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(num_repeats=len(values), min=min(values), max=max(values), std=deviation)


def _by_key(runs: Sequence[Mapping[str, float | None]]) -> defaultdict[str, list[float]]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        for key, value in run.items():
            if value is not None:
                values[key].append(value)
    return values


def _warnings(metrics: Mapping[str, float | None]) -> tuple[str, ...]:
    return (*_p99_warnings(metrics), *_count_warnings(metrics))


def _p99_warnings(metrics: Mapping[str, float | None]) -> list[str]:
    names: defaultdict[int, list[str]] = defaultdict(list)
    for key, value in metrics.items():
        name, _, statistic = key.partition("/")
        if statistic == "n" and value is not None and 0 < value < MIN_SAMPLES_OF_P99:
            names[int(value)].append(name)
    return [
        f"p99 of {', '.join(group)} comes from n = {count} samples, fewer than {MIN_SAMPLES_OF_P99}"
        for count, group in sorted(names.items())
    ]


_COUNT_WARNINGS = {
    "requests/itl_per_chunk": "itl_ms is per chunk, not per token, in {} of {} completed requests",
    "requests/count_mismatch": "client and server count different output tokens in {} of {} completed requests",
    "requests/counted_by_client": "output tokens are counted by the client in {} of {} completed requests",
    "requests/short_output": "output shorter than requested ({} of {})",
}


def _count_warnings(metrics: Mapping[str, float | None]) -> list[str]:
    whole = int(metrics["requests/completed"] or 0)
    return [
        text.format(int(count), whole) for key, text in _COUNT_WARNINGS.items() if (count := metrics[key])
    ]
