"""The engine's answer to a generation: its bytes as a `Generation`, or an error that says what is wrong with it.

Only the fields that are needed are made into objects, and the triples of tokens and log-probabilities into structs that
the garbage collector does not follow: 512 lists per answer would make it walk over all samples again and again, which
costs more than everything else together. Called by the client.
"""

from __future__ import annotations

import msgspec

from slimrl.data import version_spans
from slimrl.data.version_spans import Span
from slimrl.rollout.engine import Generation
from slimrl.sglang.errors import EngineUnavailableError
from slimrl.sglang.request_stats import RequestStats

_SHOWN_BYTES = 200


class _Scored(msgspec.Struct, array_like=True, gc=False):
    """`[log-probability, token id, text]`, of which the text is left unread."""

    log_prob: float
    token_id: int


class _FinishReason(msgspec.Struct):
    type: str


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


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


class _Answer(msgspec.Struct):
    output_ids: list[int]
    meta_info: _MetaInfo
    text: str = ""


_DECODER = msgspec.json.Decoder(_Answer)


def generation_of(content: bytes, stats: RequestStats | None = None) -> Generation:
    """The answer, checked: one log-probability per new token, of that token; `stats` is told of it.

    Raises EngineUnavailableError where it is not, and where a field is missing or of another type (a log-probability
    that is no number comes as null).
    """
    try:
        answer = _DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = content[:_SHOWN_BYTES].decode(errors="replace")
        raise EngineUnavailableError(f"the engine's answer cannot be read: {error}; it begins {shown!r}") from error
    meta = answer.meta_info
    token_ids, scored = answer.output_ids, meta.output_token_logprobs
    if [entry.token_id for entry in scored] != token_ids:
        raise EngineUnavailableError(
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


def _spans(meta: _MetaInfo, count: int) -> list[Span]:
    """The spans of `count` tokens; the engine's own may count a token that it does not hand out, or lack the last."""
    spans: list[Span] = []
    for span in meta.weight_versions:
        version_spans.add(spans, span.version, min(span.end, count) - span.start)
    version_spans.add(spans, meta.weight_version, count - sum(length for _, length in spans))
    return spans
