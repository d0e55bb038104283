"""The ``/metrics`` page of the stub engine, in the text form and with the names of vLLM 0.32."""

import time
from dataclasses import dataclass, field

SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
)
GAPS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
REASONS = ("stop", "length", "abort", "error", "repetition")


@dataclass(slots=True)
class Histogram:
    """Counts by upper edge, and the sum."""

    edges: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self):
        self.counts = [0] * (len(self.edges) + 1)

    def observe(self, value):
        self.total += value
        place = next((i for i, edge in enumerate(self.edges) if value <= edge), len(self.edges))
        self.counts[place] += 1


def _histograms():
    seconds = ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time",
               "request_decode_time", "request_inference_time", "request_time_per_output_token")  # fmt: skip
    found = {f"{name}_seconds": Histogram(SECONDS) for name in seconds}
    found["inter_token_latency_seconds"] = Histogram(GAPS)
    found["request_prompt_tokens"] = Histogram(TOKENS)
    found["request_generation_tokens"] = Histogram(TOKENS)
    return found


def _counters():
    names = (
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
    )
    return dict.fromkeys(names, 0)


@dataclass(slots=True)
class Counts:
    """What the engine has done since ``created``; replaced as a whole when counters restart."""

    created: float = field(default_factory=time.time)
    counters: dict = field(default_factory=_counters)
    finished: dict = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    histograms: dict = field(default_factory=_histograms)


class Page:
    """Writes samples with their HELP and TYPE lines; applies dropped and renamed names."""

    def __init__(self, *, model, engines, drop, rename):
        self.lines = []
        self._model = model
        self._engines = engines
        self._drop = set(drop)
        self._rename = rename

    def add(self, name, kind, samples, *, base=None):
        """``samples``: (suffix, extra labels, value); ``base``: labels of every sample, by default the model's."""
        base = {"model_name": self._model} if base is None else base
        if name in self._drop:
            return
        shown = self._rename.get(name, name)
        self.lines += [f"# HELP {shown} {shown} of the engine.", f"# TYPE {shown} {kind}"]
        for engine in range(self._engines):
            for suffix, labels, value in samples:
                pairs = {**base, **labels, "engine": str(engine)}
                text = ",".join(f'{key}="{pairs[key]}"' for key in sorted(pairs))
                self.lines.append(f"{shown}{suffix}{{{text}}} {float(0 if engine else value)!r}")

    def text(self):
        return "\n".join(self.lines) + "\n"


def render(counts, *, gauges, cache, model, engines=1, drop=(), rename=None):
    """The whole page. ``gauges``: running, waiting, kv_usage (0..1); ``cache``: labels of cache_config_info."""
    page = Page(model=model, engines=engines, drop=drop, rename=rename or {})
    page.add("vllm:num_requests_running", "gauge", [("", {}, gauges["running"])])
    page.add("vllm:num_requests_waiting", "gauge", [("", {}, gauges["waiting"])])
    page.add("vllm:kv_cache_usage_perc", "gauge", [("", {}, gauges["kv_usage"])])
    for name, value in counts.counters.items():
        page.add(f"vllm:{name}_total", "counter", [("", {}, value)])
        page.add(f"vllm:{name}_created", "gauge", [("", {}, counts.created)])
    done = [("", {"finished_reason": reason}, number) for reason, number in counts.finished.items()]
    page.add("vllm:request_success_total", "counter", done)
    page.add(
        "vllm:request_success_created",
        "gauge",
        [(suffix, labels, counts.created) for suffix, labels, _ in done],
    )
    for name, histogram in counts.histograms.items():
        page.add(f"vllm:{name}", "histogram", _samples(histogram))
        page.add(f"vllm:{name}_created", "gauge", [("", {}, counts.created)])
    page.add("vllm:cache_config_info", "gauge", [("", {}, 1.0)], base=cache)
    return page.text()


def _samples(histogram):
    running, samples = 0, []
    for edge, count in zip([*histogram.edges, "+Inf"], histogram.counts, strict=True):
        running += count
        samples.append(("_bucket", {"le": edge if isinstance(edge, str) else repr(float(edge))}, running))
    return [*samples, ("_count", {}, running), ("_sum", {}, histogram.total)]
