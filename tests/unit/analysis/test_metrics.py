"""Metrics, on hand-worked stamps. ``s`` are seconds after the request's due time, as in the field cases."""

import json
import math

import pytest

from analysis import metrics as m
from analysis.records import Record
from conf.schema import Slo

NS = 1_000_000_000
NO_SLO = Slo()


def ns(seconds):
    return round(seconds * NS)


def record(*tokens_s, index=0, due_s=0.0, sent_s=None, n=None, **fields):
    """A request with token events at ``tokens_s`` after its due time; n defaults to one token per event."""
    stamps = tuple(ns(due_s + token) for token in tokens_s)
    defaults = {
        "index": index,
        "phase": "measured",
        "due_ns": ns(due_s),
        "sent_ns": ns(due_s) if sent_s is None else ns(due_s + sent_s),
        "first_token_ns": stamps[0] if stamps else None,
        "first_answer_ns": stamps[0] if stamps else None,
        "last_token_ns": stamps[-1] if stamps else None,
        "done_ns": stamps[-1] if stamps else ns(due_s),
        "token_ns": stamps,
        "num_output_tokens": len(stamps) if n is None else n,
        "num_output_tokens_source": "server",
    }
    return Record(**(defaults | fields))


def failed(*, due_s=0.0, error="no token", **fields):
    return record(due_s=due_s, error=error, **fields)


def numbers(records, *, slo=NO_SLO, **kwargs):
    return m.summarise(records, slo=slo, **kwargs).metrics


class TestOneRequest:
    def test_clock_starts_when_the_request_was_due_not_when_it_was_sent(self):
        """Due 0, sent 0.05, tokens 0.20 0.22 0.24: TTFT 0.20, from the send 0.15; likewise E2EL 0.24 and 0.19."""
        one = record(0.20, 0.22, 0.24, sent_s=0.05)
        assert m.ttft_ns(one) == 200_000_000
        assert m.ttft_from_send_ns(one) == 150_000_000
        assert m.e2el_ns(one) == 240_000_000
        assert m.e2el_from_send_ns(one) == 190_000_000
        assert m.send_lag_ns(one) == 50_000_000

    def test_three_tokens_give_two_gaps(self):
        """Case A1: tokens 0.200 0.220 0.240 -> TTFT 0.200, ITL [0.020, 0.020], TPOT 0.020."""
        one = record(0.200, 0.220, 0.240)
        assert m.ttft_ns(one) == 200_000_000
        assert m.itl_ns(one) == [20_000_000, 20_000_000]
        assert m.tpot_ns(one) == 20_000_000

    def test_prefill_is_in_ttft_and_never_in_itl(self):
        """Case A1, test 2: tokens 2.20 2.22 2.24 -> TTFT 2.20, largest ITL 0.02."""
        one = record(2.20, 2.22, 2.24)
        assert m.ttft_ns(one) == 2_200_000_000
        assert max(m.itl_ns(one)) == 20_000_000

    @pytest.mark.parametrize("done_s", [0.27, 9.0])
    def test_time_after_the_last_token_is_in_no_latency(self, done_s):
        """Case A3 (a): tokens 0.10 0.15 0.20 and a closing tail -> ITL [0.05, 0.05], TPOT 0.05, E2EL 0.20."""
        one = record(0.10, 0.15, 0.20, done_ns=ns(done_s))
        assert m.itl_ns(one) == [50_000_000, 50_000_000]
        assert m.tpot_ns(one) == 50_000_000
        assert m.e2el_ns(one) == 200_000_000

    def test_tpot_divides_by_the_servers_count(self):
        """Case A3 (d): 3 chunks, server says 4 tokens -> TPOT 0.1 / 3 = 33.333 ms, mismatch flagged, both kept."""
        one = record(0.10, 0.15, 0.20, n=4, num_output_tokens_client=3)
        assert m.tpot_ns(one) / 1e6 == pytest.approx(33.3333, abs=1e-4)
        assert m.count_mismatch(one)
        assert m.itl_per_chunk(one)

    def test_clients_count_is_no_mismatch_with_itself(self):
        """Case A3 (c): without usage n = 3 comes from the client, and nothing is there to differ from."""
        one = record(0.10, 0.15, 0.20, num_output_tokens_source="client", num_output_tokens_client=3)
        assert not m.count_mismatch(one)
        assert numbers([one])["requests/counted_by_client"] == 1

    def test_gaps_sum_to_the_span_of_the_tokens(self):
        """sum(ITL) = last token - first token, whatever the spacing: 7 + 1 + 22 = 30."""
        one = record(0.010, 0.017, 0.018, 0.040)
        assert sum(m.itl_ns(one)) == one.last_token_ns - one.first_token_ns == 30_000_000

    def test_reasoning_starts_ttft_and_the_answer_has_its_own_time(self):
        """Case A6: reasoning 0.30 0.35, answer 0.40 0.45 -> TTFT 0.30, first answer 0.40."""
        one = record(0.30, 0.35, 0.40, 0.45, first_answer_ns=ns(0.40))
        assert m.ttft_ns(one) == 300_000_000
        assert m.first_answer_ns(one) == 400_000_000

    def test_reasoning_only_has_no_first_answer(self):
        """Case A6: a reply that ends while thinking has a TTFT, and an undefined first-answer time."""
        one = record(0.30, 0.35, first_answer_ns=None)
        assert m.ttft_ns(one) == 300_000_000
        assert m.first_answer_ns(one) is None

    def test_nothing_sent_leaves_every_latency_undefined(self):
        one = failed(sent_ns=None, num_output_tokens=None)
        formulas = (
            m.ttft_ns,
            m.ttft_from_send_ns,
            m.first_answer_ns,
            m.tpot_ns,
            m.e2el_ns,
            m.e2el_from_send_ns,
        )
        assert [formula(one) for formula in (*formulas, m.send_lag_ns, m.client_queue_ns)] == [None] * 8
        assert m.itl_ns(one) == []

    def test_a_concurrency_cap_keeps_its_queue_apart_from_the_clients_own_lateness(self):
        """Due 0, queued 0.002, sent 0.5: lag 500 ms, of which 498 ms in the cap's queue and 2 ms the client's."""
        one = record(0.6, queued_ns=ns(0.002), sent_s=0.5)
        assert m.send_lag_ns(one) == 500_000_000
        assert m.client_queue_ns(one) == 498_000_000
        assert m.schedule_lag_ns(one) == 2_000_000

    def test_without_a_cap_the_schedule_lag_is_the_send_lag(self):
        one = record(0.6, sent_s=0.5)
        assert m.schedule_lag_ns(one) == 500_000_000
        assert m.client_queue_ns(one) is None

    def test_unknown_count_is_not_guessed_from_the_chunks(self):
        one = record(0.1, 0.2, num_output_tokens=None)
        assert m.tpot_ns(one) is None
        assert not m.itl_per_chunk(one)


class TestStatistics:
    def test_five_numbers(self):
        """0..4: mean 2, median 2, p90 3.6, p95 3.8, p99 3.96, population std sqrt(2)."""
        found = m.statistics([4, 0, 3, 1, 2])
        expected = {"mean": 2, "p50": 2, "p90": 3.6, "p95": 3.8, "p99": 3.96, "std": math.sqrt(2), "n": 5}
        assert found == pytest.approx(expected)

    def test_no_samples_are_none_and_counted_as_zero(self):
        found = m.statistics([])
        assert found.pop("n") == 0
        assert set(found.values()) == {None}


class TestRepliesWithoutOrWithOneToken:
    """Case A8: r1 five tokens 0.2..0.6, r2 none, r3 one token 0.3, r4 five tokens 0.4..0.8."""

    @pytest.fixture
    def records(self):
        return [
            record(0.2, 0.3, 0.4, 0.5, 0.6, index=0),
            failed(index=1),
            record(0.3, index=2),
            record(0.4, 0.5, 0.6, 0.7, 0.8, index=3),
        ]

    def test_empty_reply_is_failed_and_in_no_latency(self, records):
        found = numbers(records)
        assert (found["requests/total"], found["requests/failed"], found["requests/completed"]) == (4, 1, 3)
        assert found["ttft_ms/n"] == 3
        assert found["ttft_ms/p50"] == pytest.approx(300)

    def test_one_token_reply_has_no_tpot(self, records):
        found = numbers(records)
        assert m.tpot_ns(records[2]) is None
        assert found["tpot_ms/n"] == 2
        assert found["tpot_ms/mean"] == pytest.approx(100)

    def test_a_reply_without_tokens_is_failed_even_if_nobody_called_it_an_error(self):
        assert not m.completed(record())
        assert numbers([record(), record(0.1)])["requests/failed"] == 1

    def test_tokens_of_a_failed_request_are_in_no_statistic(self):
        found = numbers([record(0.2, 0.3, error="stream cut"), record(0.4, 0.5)])
        assert found["ttft_ms/mean"] == pytest.approx(400)
        assert found["output_tokens/total"] == 2
        assert found["send_lag_ms/n"] == 2


class TestUndefinedValues:
    def test_one_token_replies_in_a_burst_give_none_and_strict_json(self):
        """Case G4: TPOT undefined -> null with n = 0; nothing is NaN or infinite."""
        found = numbers([record(0.1, index=i) for i in range(3)])
        assert found["tpot_ms/mean"] is None
        assert found["tpot_ms/p99"] is None
        assert found["tpot_ms/n"] == 0
        assert found["rate/offered_per_s"] is None
        json.dumps(found, allow_nan=False)

    def test_no_records_at_all(self):
        found = numbers([])
        json.dumps(found, allow_nan=False)
        assert found["requests/total"] == 0
        assert found["throughput/output_tokens_per_s"] is None
        assert found["run/duration_s"] is None

    def test_every_request_failed(self):
        found = numbers([failed(due_s=i) for i in range(3)])
        assert found["requests/failed"] == 3
        assert found["ttft_ms/mean"] is None
        assert found["rate/completed_per_s"] is None
        assert found["throughput/output_tokens_per_s"] == 0

    def test_warm_up_rows_enter_nothing(self):
        """Case B6: rows of the warm-up are stored, and are in no number."""
        warm = record(9.0, 9.9, phase="warmup")
        assert numbers([warm, record(0.1, 0.2)]) == numbers([record(0.1, 0.2)])

    def test_every_promised_key_is_there_whatever_happened(self):
        names = (
            "ttft_ms ttft_from_send_ms first_answer_ms tpot_ms itl_ms e2el_ms e2el_from_send_ms send_lag_ms"
        )
        keys = {
            f"{name}/{key}"
            for name in (*names.split(), "client_queue_ms", "schedule_lag_ms")
            for key in ("mean", "p50", "p90", "p95", "p99", "std", "n")
        }
        assert keys < set(numbers([]))
        assert set(numbers([])) == set(numbers([record(0.1, 0.2)]))


class TestRates:
    @pytest.fixture
    def records(self):
        """Due at 0 1 2 3 4, sent twice as slowly from 1, answered (two tokens) 2 s after being due, the last at 9."""
        ends = (2, 3, 4, 5, 9)
        return [
            record(end - i - 0.5, end - i, index=i, due_s=i, sent_ns=ns(1 + 2 * i), done_ns=ns(end))
            for i, end in enumerate(ends)
        ]

    def test_three_rates_are_apart(self, records):
        """4 gaps in 4 s offered, in 8 s sent, in 7 s completed."""
        found = numbers(records)
        assert found["rate/offered_per_s"] == pytest.approx(1.0)
        assert found["rate/sent_per_s"] == pytest.approx(0.5)
        assert found["rate/completed_per_s"] == pytest.approx(4 / 7)

    def test_throughput_is_over_the_full_duration(self, records):
        """5 requests and 10 tokens from 0 to 9 s."""
        found = numbers(records)
        assert found["run/duration_s"] == 9
        assert found["throughput/requests_per_s"] == pytest.approx(5 / 9)
        assert found["throughput/output_tokens_per_s"] == pytest.approx(10 / 9)

    def test_duration_of_the_caller_wins(self, records):
        assert numbers(records, duration_ns=20 * NS)["throughput/output_tokens_per_s"] == pytest.approx(0.5)

    def test_steady_window_leaves_out_the_first_tenth_and_the_tail(self, records):
        """Window 0.4..4.0 s holds the events at 1.5 2 2.5 3 3.5 (4.0 is its open end): 5 tokens in 3.6 s."""
        assert m.steady_window_ns(records) == (400_000_000, 4 * NS)
        assert numbers(records)["throughput/output_tokens_per_s_steady"] == pytest.approx(5 / 3.6)

    def test_a_chunk_of_several_tokens_counts_as_several(self):
        """8 tokens in 2 chunks, at 0.5 and 1.5 s of a window 0.2..2.0 s -> 8 tokens in 1.8 s."""
        records = [record(0.5, 1.5, n=8), record(0.5, 1.0, due_s=2)]
        assert m.output_tokens_per_s_steady(records) == pytest.approx(8 / 1.8)

    def test_an_unknown_count_leaves_throughput_unknown(self):
        found = numbers([record(0.1, 0.2), record(0.1, 0.2, due_s=1, num_output_tokens=None)])
        assert found["throughput/output_tokens_per_s"] is None
        assert found["throughput/output_tokens_per_s_steady"] is None
        assert found["output_tokens/total"] is None


class TestGoodput:
    def test_limits_include_their_own_value_and_failures_miss(self):
        """TTFT <= 200 ms: 0.2 good, 0.201 not, failed not -> 1 of 3 in 2 s."""
        records = [record(0.2, 0.3), record(0.201, 0.3), failed()]
        found = numbers(records, slo=Slo(ttft_ms=200), duration_ns=2 * NS)
        assert found["goodput/requests_per_s"] == pytest.approx(0.5)

    def test_every_limit_must_hold(self):
        """TTFT 100, TPOT 50, E2EL 200: the second is good alone in TPOT, the third in none."""
        slo = Slo(ttft_ms=150, tpot_ms=50, e2el_ms=200)
        good, late, slow = record(0.1, 0.15, 0.2), record(0.3, 0.35), record(0.1, 0.3)
        assert [m.meets(one, slo) for one in (good, late, slow)] == [True, False, False]

    def test_one_token_cannot_break_a_tpot_limit_but_an_unknown_length_cannot_hold_it(self):
        slo = Slo(tpot_ms=50)
        assert m.meets(record(0.1), slo)
        assert not m.meets(record(0.1, 0.11, num_output_tokens=None), slo)

    def test_without_limits_goodput_is_undefined(self):
        assert numbers([record(0.1, 0.2)])["goodput/requests_per_s"] is None


class TestLengths:
    def test_short_outputs_are_counted(self):
        """Case B7: 15 of 20 replies end at 38 of 512 tokens -> mean (15 x 38 + 5 x 512) / 20 = 156.5."""
        lengths = [38] * 15 + [512] * 5
        records = [
            record(0.1, 0.2, index=i, n=n, num_output_tokens_requested=512) for i, n in enumerate(lengths)
        ]
        summary = m.summarise(records, slo=NO_SLO)
        assert summary.metrics["output_tokens/mean"] == 156.5
        assert summary.metrics["requests/short_output"] == 15
        assert "output shorter than requested (15 of 20)" in summary.warnings

    def test_prompt_length_error_is_relative_to_the_request(self):
        """Case B7: 570 prompt tokens where 500 were asked for: 14 % above; shorter counts in the same way."""
        longer = record(0.1, num_prompt_tokens=570, num_prompt_tokens_requested=500)
        shorter = record(0.1, num_prompt_tokens=400, num_prompt_tokens_requested=500)
        assert m.prompt_length_error(longer) == pytest.approx(0.14)
        assert m.prompt_length_error(shorter) == pytest.approx(-0.2)
        assert numbers([longer, shorter])["prompt_tokens/max_relative_error"] == pytest.approx(0.2)
        assert m.prompt_length_error(record(0.1)) is None


class TestWarnings:
    def test_p99_of_few_samples_warns_with_its_n(self):
        """Case G7: p99 from fewer than 100 samples carries its n and a warning; from 100 it does not."""
        few = m.summarise([record(0.1, due_s=i) for i in range(99)], slo=NO_SLO)
        enough = m.summarise([record(0.1, due_s=i) for i in range(100)], slo=NO_SLO)
        assert few.metrics["ttft_ms/n"] == 99
        (warning,) = few.warnings
        assert warning.startswith("p99 of ttft_ms, ttft_from_send_ms, ")
        assert warning.endswith(" comes from n = 99 samples, fewer than 100")
        assert enough.warnings == ()

    def test_itl_per_chunk_is_said(self):
        summary = m.summarise([record(0.1, 0.2, n=8)], slo=NO_SLO)
        assert summary.metrics["requests/itl_per_chunk"] == 1
        assert "itl_ms is per chunk, not per token, in 1 of 1 completed requests" in summary.warnings


class TestPooled:
    """Case G7: percentiles over repeats are taken from pooled requests."""

    @staticmethod
    def repeat(*groups):
        return [record(ttft, index=i) for count, ttft in groups for i in range(count)]

    def test_pooled_percentiles_are_not_means_of_percentiles(self):
        """A 100 x 0.1, B 90 x 0.1 and 10 x 1.0 -> p95 0.145 (not 0.55), p99 1.0."""
        both = m.pooled([self.repeat((100, 0.1)), self.repeat((90, 0.1), (10, 1.0))], slo=NO_SLO)
        assert both.metrics["ttft_ms/p95"] == pytest.approx(145)
        assert both.metrics["ttft_ms/p99"] == pytest.approx(1000)
        assert both.metrics["ttft_ms/n"] == 200
        assert both.metrics["requests/total"] == 200

    def test_repeats_weigh_by_their_requests(self):
        """A 99 x 0.1 and 1 x 2.0, B 900 x 0.5 -> p50 0.5, p99 0.5."""
        both = m.pooled([self.repeat((99, 0.1), (1, 2.0)), self.repeat((900, 0.5))], slo=NO_SLO)
        assert both.metrics["ttft_ms/p50"] == pytest.approx(500)
        assert both.metrics["ttft_ms/p99"] == pytest.approx(500)

    def test_spread_between_repeats_is_apart(self):
        """Means 100 and 300 ms: range 100..300, sample deviation sqrt(2) x 100."""
        both = m.pooled([self.repeat((4, 0.1)), self.repeat((4, 0.3))], slo=NO_SLO)
        spread = both.spread["ttft_ms/mean"]
        assert (spread.num_repeats, spread.min, spread.max) == pytest.approx((2, 100, 300))
        assert spread.std == pytest.approx(141.42136)

    def test_one_repeat_has_no_deviation_and_undefined_values_no_spread(self):
        alone = m.pooled([self.repeat((4, 0.1))], slo=NO_SLO)
        assert alone.spread["ttft_ms/mean"].std is None
        assert "tpot_ms/mean" not in alone.spread
        assert alone.metrics["tpot_ms/mean"] is None

    def test_rates_of_repeats_are_averaged_not_laid_over_each_other(self):
        """Both repeats start at 0: 1/s and 2/s -> 1.5/s, not the 2.5/s of laying their arrivals together."""
        slow = [record(0.1, due_s=i) for i in range(5)]
        fast = [record(0.1, due_s=i / 2) for i in range(9)]
        both = m.pooled([slow, fast], slo=NO_SLO)
        assert both.metrics["rate/offered_per_s"] == pytest.approx(1.5)


class TestSaturated:
    @staticmethod
    def served(*, gap_s, service_s, count=60, tail_s=0.01):
        """One server takes requests in turn: due every ``gap_s``, a first token ``service_s`` after its start."""
        free, records = 0.0, []
        for i in range(count):
            free = max(free, i * gap_s) + service_s
            first = free - i * gap_s
            records.append(record(first, first + tail_s, index=i, due_s=i * gap_s))
        return records

    def test_service_faster_than_arrivals_is_not_saturated(self):
        assert m.saturated(self.served(gap_s=1.0, service_s=0.9)) is False

    def test_service_slower_than_arrivals_is_saturated(self):
        """1.5 s of work per second: a third of the arrivals stays behind, for ever."""
        assert m.saturated(self.served(gap_s=1.0, service_s=1.5)) is True

    def test_a_short_window_under_heavy_load_is_saturated(self):
        """48 requests in 16 s at a server that needs 1 s each."""
        assert m.saturated(self.served(gap_s=1 / 3, service_s=1.0, count=48)) is True

    def test_filling_of_a_slow_but_unsaturated_engine_is_not_saturation(self):
        """Every request takes 40 s in parallel, first token after 0.1 s: in 30 s of arrivals the system only fills."""
        assert m.saturated(self.served(gap_s=0.5, service_s=0.1, tail_s=40)) is False

    def test_an_engine_that_admits_everything_and_slows_down_is_saturated(self):
        """First tokens at once, the i-th answer takes i/2 s (due every 0.5 s): only half of the work gets done."""
        records = [record(0.1, 0.2 + i / 2, index=i, due_s=i / 2) for i in range(200)]
        assert m.saturated(records) is True

    def test_requests_that_never_got_a_token_are_still_waiting(self):
        lost = [failed(due_s=float(i), error="timed out", done_ns=ns(600)) for i in range(40)]
        assert m.saturated(lost) is True

    def test_burst_and_few_requests_are_undecided(self):
        assert m.saturated([record(0.1, 0.2)] * 100) is None
        assert m.saturated([record(0.1, 0.2, due_s=i) for i in range(19)]) is None

    def test_summary_carries_it(self):
        assert numbers(self.served(gap_s=1.0, service_s=1.5))["run/saturated"] == 1
        assert numbers(self.served(gap_s=1.0, service_s=0.5))["run/saturated"] == 0
        assert numbers([record(0.1)])["run/saturated"] is None


def test_names_of_vllm_bench_serve():
    """``p50`` is called median, totals and throughputs have vLLM's keys, other keys have no vLLM name."""
    found = m.vllm_names(numbers([record(0.1, 0.3), record(0.2, 0.4, due_s=1)], slo=Slo(ttft_ms=150)))
    assert found["mean_ttft_ms"] == pytest.approx(150)
    assert found["median_ttft_ms"] == pytest.approx(150)
    assert found["std_ttft_ms"] == pytest.approx(50)
    assert found["p99_tpot_ms"] == pytest.approx(200)
    assert found["std_e2el_ms"] == pytest.approx(50)
    assert found["mean_ttft_from_send_ms"] == pytest.approx(150)
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (2, 0, 4)
    assert found["duration"] == pytest.approx(1.4)
    assert found["request_goodput"] == pytest.approx(1 / 1.4)
    assert "p50_ttft_ms" not in found
    assert not [name for name in found if "/" in name]


def test_version_is_text():
    assert m.METRICS_VERSION.startswith("1")
