"""Numbers for Prometheus, in a registry of each server's own."""

from functools import partial
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tilewright.engine import Engine

_FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_EACH = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.5)


class Metrics:
    """Counts of requests by status, tokens, seconds to the first token and between tokens, and the engine's state."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("tilewright_requests", "Answered requests", ["status"], registry=self.registry)
        self.prompt_tokens = Counter("tilewright_prompt_tokens", "Tokens of prompts", registry=self.registry)
        self.new_tokens = Counter("tilewright_generated_tokens", "Generated tokens", registry=self.registry)
        self.first = Histogram(
            "tilewright_first_token_seconds", "To the first token", buckets=_FIRST, registry=self.registry
        )
        self.each = Histogram(
            "tilewright_token_seconds", "Between tokens of a request", buckets=_EACH, registry=self.registry
        )
        for name in engine.statistics:
            gauge = Gauge(f"tilewright_engine_{name}", f"The engine's {name.replace('_', ' ')}", registry=self.registry)
            gauge.set_function(partial(_statistic, engine, name))

    def text(self) -> bytes:
        """The format that Prometheus reads."""
        return generate_latest(self.registry)


def _statistic(engine: Engine, name: str) -> float:
    return engine.statistics[name]


class Timing:
    """The clock of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._begin, self._last = metrics, perf_counter(), 0.0

    def token(self) -> None:
        """A token came."""
        now = perf_counter()
        if self._last:
            self._metrics.each.observe(now - self._last)
        else:
            self._metrics.first.observe(now - self._begin)
        self._last = now
        self._metrics.new_tokens.inc()
