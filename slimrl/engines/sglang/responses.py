"""Parses an engine's answer to a generation request into a `Generation`, and adds up request statistics.

Only the fields that are needed become objects, and the triples of tokens and log-probabilities become structs that the
garbage collector does not follow: with 512 lists per answer it would walk over all samples again and again, which costs
more than everything else together. Impossible values are rejected while an answer is read: token ids outside of the
vocabulary, and numbers that are no log-probabilities. The client owns both parts; the rollout manager takes the
statistics (`RequestStats`) once per rollout.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Protocol

import msgspec
import orjson

from slimrl.data.sample import Span, add_span
from slimrl.engines.protocol import EngineResponseError, Generation


class ResponseCounts(Protocol):
    """The fields of an answer that are counted; 0 or None where the server does not report them."""

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
        """One answered request."""
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
        """What is asked within the block, and in tasks and threads that it begins, is not counted (evaluations)."""
        before = self._apart.set(True)
        try:
            yield
        finally:
            self._apart.reset(before)

    def take(self, samples: int) -> dict[str, float]:
        """Metrics by their full names, for a rollout of so many samples; restarts. Empty without requests."""
        found: dict[str, float] = {}
        if self._prompt_tokens:
            found["rollout/prefix_cache_hit_rate"] = self._cached_tokens / self._prompt_tokens
            found["rollout/avg_cached_tokens_per_sample"] = self._cached_tokens / samples
        if self._drafts:
            found["rollout/spec_accept_rate"] = self._accepted / self._drafts
        if self._passes:
            found["rollout/spec_accept_length"] = self._tokens_of_passes / self._passes
        for name, times in (("e2e_latency", self._latencies), ("queue_time", self._queue_times)):
            found |= {f"perf/request/{name}/{key}": value for key, value in time_statistics(times).items()}
        self._clear()
        return found


def time_statistics(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median, p99 (nearest rank), max and min; empty for none."""
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


_SHOWN_BYTES = 200
_HIGHEST_LOG_PROB = 1e-3  # engines round
_LOWEST_LOG_PROB = -1e30  # servers clamp infinity to the lowest number of the type
_LARGEST_VOCABULARY = 1 << 31


class _Scored(msgspec.Struct, array_like=True, gc=False):
    """`[log-probability, token id, text]`, of which the text is left unread."""

    log_prob: Annotated[float, msgspec.Meta(ge=_LOWEST_LOG_PROB, le=_HIGHEST_LOG_PROB)]
    token_id: int


class _FinishReason(msgspec.Struct):
    type: str


class _Span(msgspec.Struct):
    version: str
    start: Annotated[int, msgspec.Meta(ge=0)]
    end: Annotated[int, msgspec.Meta(ge=0)]


class _MetaInfo(msgspec.Struct):
    id: str
    finish_reason: _FinishReason
    weight_version: str
    output_token_logprobs: list[_Scored]
    weight_versions: list[_Span] = []
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    e2e_latency: float | None = None
    queue_time: float | None = None
    spec_num_correct_drafts: int = 0
    spec_num_proposed_drafts: int = 0
    spec_verify_ct: int = 0


class ResponseReader:
    """Reads answers of engines whose vocabulary has `vocabulary` token ids; None where that is not known."""

    def __init__(self, vocabulary: int | None = None) -> None:
        self._vocabulary = vocabulary or _LARGEST_VOCABULARY
        token_id = Annotated[int, msgspec.Meta(ge=0, lt=self._vocabulary)]
        answer = msgspec.defstruct(
            "Answer", [("output_ids", list[token_id]), ("meta_info", _MetaInfo), ("text", str, "")]
        )
        self._decoder = msgspec.json.Decoder(answer)

    def generation(self, content: bytes, stats: RequestStats | None = None) -> Generation:
        """The answer, checked: one log-probability per new token, of that token; `stats` is told of it.

        Raises EngineResponseError where it is not, where a field is missing or of another type (a log-probability that
        is no number comes as null), and where a token id or a log-probability is outside of its range.
        """
        try:
            answer = self._decoder.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if (wrong := _out_of_range(content, self._vocabulary)) is not None:
                raise EngineResponseError(f"the engine's answer cannot be used: {wrong}") from error
            shown = content[:_SHOWN_BYTES].decode(errors="replace")
            raise EngineResponseError(f"the engine's answer cannot be read: {error}; it begins {shown!r}") from error
        return _checked(answer, stats)


def _checked(answer: Any, stats: RequestStats | None) -> Generation:
    meta = answer.meta_info
    token_ids, scored = answer.output_ids, meta.output_token_logprobs
    if [entry.token_id for entry in scored] != token_ids:
        raise EngineResponseError(
            f"the engine answered {len(token_ids)} token ids and log-probabilities of {len(scored)} others:"
            f" request {meta.id}, finish reason {meta.finish_reason.type}"
        )
    if stats is not None:
        stats.note(meta)
    return Generation(
        token_ids=token_ids,
        log_probs=[entry.log_prob for entry in scored],
        finish_reason=meta.finish_reason.type,
        weight_version=meta.weight_version,
        text=answer.text,
        version_spans=_spans(meta, len(token_ids)),
    )


def decoded(content: bytes) -> Any:
    """The answer as plain data, whatever it holds. Raises EngineResponseError where it is no JSON."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        shown = content[:_SHOWN_BYTES].decode(errors="replace")
        raise EngineResponseError(f"the engine's answer is not JSON: {error}; it begins {shown!r}") from error


def _spans(meta: _MetaInfo, count: int) -> list[Span]:
    """The spans of `count` tokens; the engine's own may count a token that it does not hand out, or lack the last."""
    spans: list[Span] = []
    for span in meta.weight_versions:
        add_span(spans, span.version, min(span.end, count) - span.start)
    add_span(spans, meta.weight_version, count - sum(length for _, length in spans))
    return spans


def _out_of_range(content: bytes, vocabulary: int) -> str | None:
    """Which token id or log-probability of an answer is outside of its range; None where it is something else."""
    try:
        answer = json.loads(content)
        token_ids, scored = answer["output_ids"], answer["meta_info"]["output_token_logprobs"]
        for place, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocabulary:
                return f"output_ids[{place}] is {token_id}, and the model has {vocabulary} tokens"
        for place, (log_prob, *_) in enumerate(scored):
            if not _LOWEST_LOG_PROB <= log_prob <= _HIGHEST_LOG_PROB:  # true of NaN, too
                return f"output_token_logprobs[{place}] is {log_prob}, which is the logarithm of no probability"
    except (ValueError, TypeError, KeyError, IndexError):
        pass
    return None
