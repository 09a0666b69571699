"""The engine's answer to a generation: its bytes as a `Generation`, or an error that says what is wrong with it.

Only the fields that are needed are made into objects, and the triples of tokens and log-probabilities into structs that
the garbage collector does not follow: 512 lists per answer would make it walk over all samples again and again, which
costs more than everything else together. What no engine can mean is refused while it is read: token ids outside of the
vocabulary and log-probabilities that are none. Called by the client.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import orjson

from slimrl.data import version_spans
from slimrl.data.version_spans import Span
from slimrl.rollout.engine import Generation
from slimrl.sglang.errors import EngineAnswerError
from slimrl.sglang.request_stats import RequestStats

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


class AnswerReader:
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

        Raises EngineAnswerError where it is not, where a field is missing or of another type (a log-probability that is
        no number comes as null), and where a token id or a log-probability is outside of its range.
        """
        try:
            answer = self._decoder.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if (wrong := _out_of_range(content, self._vocabulary)) is not None:
                raise EngineAnswerError(f"the engine's answer cannot be used: {wrong}") from error
            shown = content[:_SHOWN_BYTES].decode(errors="replace")
            raise EngineAnswerError(f"the engine's answer cannot be read: {error}; it begins {shown!r}") from error
        return _checked(answer, stats)


def _checked(answer: Any, stats: RequestStats | None) -> Generation:
    meta = answer.meta_info
    token_ids, scored = answer.output_ids, meta.output_token_logprobs
    if [entry.token_id for entry in scored] != token_ids:
        raise EngineAnswerError(
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
    """The answer as plain data, whatever it holds. Raises EngineAnswerError where it is no JSON."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        shown = content[:_SHOWN_BYTES].decode(errors="replace")
        raise EngineAnswerError(f"the engine's answer is not JSON: {error}; it begins {shown!r}") from error


def _spans(meta: _MetaInfo, count: int) -> list[Span]:
    """The spans of `count` tokens; the engine's own may count a token that it does not hand out, or lack the last."""
    spans: list[Span] = []
    for span in meta.weight_versions:
        version_spans.add(spans, span.version, min(span.end, count) - span.start)
    version_spans.add(spans, meta.weight_version, count - sum(length for _, length in spans))
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
