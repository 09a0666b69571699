"""Per-rollout metrics of requests as reported by the servers: cache hits, speculative decoding, latencies.

An engine's client records every response; the rollout manager takes the metrics once per rollout.
"""

from __future__ import annotations

import contextlib
import contextvars
import statistics
from collections.abc import Iterator, Sequence
from typing import Protocol


class ResponseCounts(Protocol):
    """The counted fields of a response; 0 or None if the server does not report them."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    e2e_latency: float | None
    queue_time: float | None
    spec_num_correct_drafts: int
    spec_num_proposed_drafts: int
    spec_verify_ct: int


class RequestStats:
    """Sums and latencies since the last `take`."""

    def __init__(self) -> None:
        self._clear()
        self._apart = contextvars.ContextVar("apart", default=False)

    def _clear(self) -> None:
        self._prompt_tokens = self._cached_tokens = 0
        self._drafts = self._accepted = self._passes = self._tokens_of_passes = 0
        self._latencies: list[float] = []
        self._queue_times: list[float] = []

    def note(self, answer: ResponseCounts) -> None:
        """Records one response."""
        if self._apart.get():
            return
        self._prompt_tokens += answer.prompt_tokens
        self._cached_tokens += answer.cached_tokens
        if answer.e2e_latency is not None:
            self._latencies.append(answer.e2e_latency)
        if answer.queue_time is not None:
            self._queue_times.append(answer.queue_time)
        if answer.spec_verify_ct:
            self._drafts += answer.spec_num_proposed_drafts
            self._accepted += answer.spec_num_correct_drafts
            self._passes += answer.spec_verify_ct
            self._tokens_of_passes += answer.completion_tokens

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Excludes requests made within the block, and in tasks that it starts (evaluations)."""
        before = self._apart.set(True)
        try:
            yield
        finally:
            self._apart.reset(before)

    def take(self, samples: int) -> dict[str, float]:
        """Metrics by full name for a rollout of `samples` samples, then resets; empty without requests."""
        metrics: dict[str, float] = {}
        if self._prompt_tokens:
            metrics["rollout/prefix_cache_hit_rate"] = self._cached_tokens / self._prompt_tokens
            metrics["rollout/avg_cached_tokens_per_sample"] = self._cached_tokens / samples
        if self._drafts:
            metrics["rollout/spec_accept_rate"] = self._accepted / self._drafts
        if self._passes:
            metrics["rollout/spec_accept_length"] = self._tokens_of_passes / self._passes
        for name, times in (("e2e_latency", self._latencies), ("queue_time", self._queue_times)):
            metrics |= {f"perf/request/{name}/{key}": value for key, value in time_statistics(times).items()}
        self._clear()
        return metrics


def time_statistics(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median, p99 (nearest rank), max and min; empty for an empty sequence."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "p99": ordered[-(-99 * len(ordered) // 100) - 1],
        "max": ordered[-1],
        "min": ordered[0],
    }
