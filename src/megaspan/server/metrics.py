"""Prometheus metrics under vLLM's names with our prefix, and the figures that the page's panel shows."""

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megaspan.engine.request import Output
from megaspan.engine.stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RECENT = 64

# Seconds; a prompt of a million tokens takes minutes.
LONG_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 10)

GAUGES = {
    "num_requests_running": ("Requests that the engine computes", "running"),
    "num_requests_waiting": ("Requests that wait for room", "waiting"),
    "num_requests_loading": ("Requests whose prefix is being restored from a lower tier", "loading"),
    "num_pages": ("Device pages", "pages_total"),
    "num_pages_free": ("Device pages that hold nothing", "pages_free"),
    "num_pages_cached": ("Device pages that only the prefix cache holds", "pages_cached"),
    "num_pages_locked": ("Device pages that running requests hold", "pages_locked"),
    "num_host_pages": ("Pages of the host tier", "host_pages_total"),
    "num_host_pages_used": ("Pages of the host tier in use", "host_pages_used"),
    "num_disk_pages_used": ("Pages of the disk tier in use", "disk_pages_used"),
    "tokens_per_second": ("Tokens generated a second, over the last seconds", "tokens_per_second"),
}
COUNTERS = {
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", "prefix_queries_total"),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache", "prefix_hits_total"),
    "host_cache_hits": ("Prompt tokens restored from a lower tier", "host_hits_total"),
    "failed_restores": ("Restores that failed and were computed again", "failed_restores_total"),
    "prompt_tokens": ("Prompt tokens read, without those found in the cache", "prompt_tokens_total"),
    "generation_tokens": ("Tokens generated", "generation_tokens_total"),
    "num_preemptions": ("Requests put aside to make room", "preempted_total"),
    "engine_steps": ("Steps of the engine", "steps_total"),
}


class EngineCollector(Collector):
    """Reads the engine's own counts when they are asked for."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str) -> None:
        self.stats = stats
        self.model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self.stats()
        for name, (text, field) in GAUGES.items():
            yield self._sample(GaugeMetricFamily, name, text, getattr(stats, field))
        for name, (text, field) in COUNTERS.items():
            yield self._sample(CounterMetricFamily, name, text, getattr(stats, field))
        used = (stats.pages_total - stats.pages_free) / max(stats.pages_total, 1)
        yield self._sample(
            GaugeMetricFamily, "kv_cache_usage_perc", "Share of device pages in use, 0 to 1", used
        )
        ended = CounterMetricFamily(
            "megaspan:request_success", "Requests that ended", labels=["model_name", "finished_reason"]
        )
        for reason, count in stats.requests_total.items():
            ended.add_metric([self.model_name, reason], count)
        yield ended

    def _sample(self, family: Any, name: str, text: str, value: float) -> Metric:
        metric = family(f"megaspan:{name}", text, labels=["model_name"])
        metric.add_metric([self.model_name], value)
        return metric


class Metrics:
    """One server's metrics, in a registry of its own so that several servers can live in one process."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str) -> None:
        self.stats = stats
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(stats, model_name))
        self.first_token = self._histogram(
            "time_to_first_token", "From arrival to the first token", model_name
        )
        self.between_tokens = self._histogram(
            "inter_token_latency", "Between two tokens of a request", model_name, SHORT_SECONDS
        )
        self.whole_request = self._histogram("e2e_request_latency", "From arrival to the end", model_name)
        self.cached_tokens = Counter(
            "megaspan:prompt_tokens_cached",
            "Prompt tokens of ended requests that were not computed again",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name)
        self.recent_first: deque[float] = deque(maxlen=RECENT)
        self.recent_gaps: deque[float] = deque(maxlen=RECENT)

    def _histogram(
        self, name: str, text: str, model_name: str, buckets: tuple[float, ...] = LONG_SECONDS
    ) -> Histogram:
        full_name = f"megaspan:{name}_seconds"
        histogram = Histogram(full_name, text, ["model_name"], registry=self.registry, buckets=buckets)
        return histogram.labels(model_name)

    def observe_tokens(self, now: float, previous: float | None, arrival: float, count: int) -> None:
        """`count` tokens came at `now`; the ones before them, if any, at `previous`. All in seconds."""
        if previous is None:
            self.first_token.observe(now - arrival)
            self.recent_first.append(now - arrival)
            return
        gap = (now - previous) / count
        for _ in range(count):
            self.between_tokens.observe(gap)
        self.recent_gaps.append(gap)

    def observe_end(self, seconds: float, output: Output) -> None:
        self.whole_request.observe(seconds)
        self.cached_tokens.inc(output.cached_tokens)

    def exposition(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)

    def summary(self) -> dict[str, Any]:
        """The engine's counts and the median times, in seconds, of the last tokens; None before the first."""
        return {
            **asdict(self.stats()),
            "time_to_first_token_p50": statistics.median(self.recent_first) if self.recent_first else None,
            "inter_token_latency_p50": statistics.median(self.recent_gaps) if self.recent_gaps else None,
        }
