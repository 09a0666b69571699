"""Parses SGLang's response to a generation request into a `Generation`.

Only required fields are decoded. SGLang 0.5.20 has no shorter form of the log-probabilities of new tokens than a list
of `[log-probability, token id, null]`, two thirds of the response. `_Triples` reads that list as one flat list of
numbers, without an object for each entry, and packs them. A response that it does not recognize is decoded entry by
entry, which also finds the error of an unusable one; then the entries are structs that the garbage collector does not
track. Impossible values are rejected: token ids outside the vocabulary, and numbers that are not log-probabilities.
Called by the client.
"""

from __future__ import annotations

import json
import struct
from typing import Annotated, Any, NamedTuple

import msgspec
import orjson

from slimrl.data.routed_experts import Routes, RoutingShape
from slimrl.data.sample import PackedColumn, Span, add_span
from slimrl.engines.protocol import EngineResponseError, Generation, RequestStats

_SHOWN_BYTES = 200
_HIGHEST_LOG_PROB = 1e-3  # above 0: engines round
_LOWEST_LOG_PROB = -1e30  # servers clamp -inf to the lowest number of the type
_LARGEST_VOCABULARY = 1 << 31
_TRIPLES_BEGIN = b'"output_token_logprobs":[['


class _Scored(msgspec.Struct, array_like=True, gc=False):
    """`[log-probability, token id, text]`; the text is not decoded."""

    log_prob: Annotated[float, msgspec.Meta(ge=_LOWEST_LOG_PROB, le=_HIGHEST_LOG_PROB)]
    token_id: int


class _FinishReason(msgspec.Struct, gc=False):
    type: str


class _Span(msgspec.Struct, gc=False):
    version: str
    start: Annotated[int, msgspec.Meta(ge=0)]
    end: Annotated[int, msgspec.Meta(ge=0)]


class _MetaInfo(msgspec.Struct, kw_only=True):
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
    routed_experts: str | None = None


class _MetaWithoutTriples(_MetaInfo, kw_only=True):
    output_token_logprobs: Annotated[list[_Scored], msgspec.Meta(max_length=0)]


class ResponseReader:
    """Decodes responses of engines with `vocabulary` token ids; None if unknown."""

    def __init__(self, vocabulary: int | None = None) -> None:
        self._vocabulary = vocabulary or _LARGEST_VOCABULARY
        token_id = Annotated[int, msgspec.Meta(ge=0, lt=self._vocabulary)]
        self._decoder: msgspec.json.Decoder[Any]
        self._rest_decoder: msgspec.json.Decoder[Any]
        self._decoder, self._rest_decoder = (
            msgspec.json.Decoder(
                msgspec.defstruct("Answer", [("output_ids", list[token_id]), ("meta_info", meta), ("text", str, "")])
            )
            for meta in (_MetaInfo, _MetaWithoutTriples)
        )

    def generation(
        self, content: bytes, stats: RequestStats | None = None, routing: RoutingShape | None = None
    ) -> Generation:
        """The validated response: one log-probability per new token, of that token; recorded in `stats`.

        With `routing`, the shape of the model's routed experts, a response with tokens must have them.
        Raises EngineResponseError for misaligned log-probabilities, a missing field or wrong type (servers send null
        for NaN), and a token id or log-probability out of range.
        """
        generation, meta = self._decoded(content, stats)
        if routing is not None and generation.new_tokens:
            generation.routed_experts = _routes(meta, routing)
        return generation

    def _decoded(self, content: bytes, stats: RequestStats | None) -> tuple[Generation, _MetaInfo]:
        if (packed := self._packed_generation(content, stats)) is not None:
            return packed
        try:
            answer = self._decoder.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if (wrong := _out_of_range(content, self._vocabulary)) is not None:
                raise EngineResponseError(f"the engine's answer cannot be used: {wrong}") from error
            shown = content[:_SHOWN_BYTES].decode(errors="replace")
            raise EngineResponseError(f"the engine's answer cannot be read: {error}; it begins {shown!r}") from error
        return _checked(answer, stats), answer.meta_info

    def _packed_generation(self, content: bytes, stats: RequestStats | None) -> tuple[Generation, _MetaInfo] | None:
        """Like `_decoded`, with packed columns; None if the response is unusual or unusable."""
        triples = _Triples.found_in(content)
        if triples is None:
            return None
        try:
            answer = self._rest_decoder.decode(triples.rest)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        token_ids, meta = answer.output_ids, answer.meta_info
        log_probs = triples.log_probs(token_ids)
        if log_probs is None:
            return None
        if stats is not None:
            stats.note(meta)
        generation = Generation([], [], meta.finish_reason.type, meta.weight_version, answer.text)
        generation.version_spans = _spans(meta, len(token_ids))
        generation.prompt_tokens = meta.prompt_tokens
        generation.pack("token_ids", PackedColumn(struct.pack(f"{len(token_ids)}i", *token_ids), "i4"))
        generation.pack("log_probs", log_probs)
        return generation, meta


class _Triples(NamedTuple):
    """The entries of `output_token_logprobs` as JSON, and the response with an empty list in their place."""

    entries: bytes
    rest: bytes

    @classmethod
    def found_in(cls, content: bytes) -> _Triples | None:
        """None if the response has no such list. A text cannot contain the key: its quotes are escaped there."""
        begin = content.find(_TRIPLES_BEGIN) + len(_TRIPLES_BEGIN) - 2
        end = content.rfind(b"]]", begin)  # from the end: a search from the front stops at each of the entries
        if begin < len(_TRIPLES_BEGIN) - 2 or end < 0:
            return None
        return cls(content[begin:end], b"%b[]%b" % (content[:begin], content[end + 2 :]))

    def log_probs(self, token_ids: list[int]) -> PackedColumn | None:
        """Their log-probabilities, float64; None unless the entries are `[log-probability, token id, null]`.

        The token ids must be `token_ids`, and the log-probabilities in range.
        """
        if b"a" in self.entries or b"r" in self.entries:  # NaN, true or false: Python's bools are numbers
            return None
        try:
            flat = orjson.loads(b"[%b]" % self.entries.replace(b"[", b" ").replace(b"]", b" "))
            log_probs = flat[::3]
            data = struct.pack(f"{len(token_ids)}d", *log_probs)
        except (orjson.JSONDecodeError, struct.error):
            return None
        if flat[1::3] != token_ids or flat[2::3].count(None) != len(token_ids):
            return None
        # not NumPy's reductions: they release the GIL, and waiting for it costs more than these
        if max(log_probs) > _HIGHEST_LOG_PROB or (sum(log_probs) < -1e6 and min(log_probs) < _LOWEST_LOG_PROB):
            return None
        return PackedColumn(data, "f8")


def _checked(answer: Any, stats: RequestStats | None) -> Generation:
    meta = answer.meta_info
    token_ids, scored = answer.output_ids, meta.output_token_logprobs
    if [entry.token_id for entry in scored] != token_ids:
        raise EngineResponseError(
            f"the engine answered {len(token_ids)} token ids and {len(scored)} log-probabilities of other tokens:"
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
        prompt_tokens=meta.prompt_tokens,
    )


def _routes(meta: _MetaInfo, routing: RoutingShape) -> Routes:
    """The experts of the tokens of prompt and response."""
    if meta.routed_experts is None:
        raise EngineResponseError(
            f"the engine's answer to request {meta.id} has no routed_experts: start the server with"
            " --enable-return-routed-experts"
        )
    try:
        return routing.decoded(meta.routed_experts)
    except ValueError as error:
        raise EngineResponseError(f"the engine's answer cannot be used: {error}") from error


def decoded(content: bytes) -> Any:
    """The response decoded as JSON. Raises EngineResponseError for invalid JSON."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        shown = content[:_SHOWN_BYTES].decode(errors="replace")
        raise EngineResponseError(f"the engine's answer is not JSON: {error}; it begins {shown!r}") from error


def _spans(meta: _MetaInfo, count: int) -> list[Span]:
    """The version spans of `count` tokens; the engine's spans may include an unreturned token, or lack the last."""
    spans: list[Span] = []
    for span in meta.weight_versions:
        add_span(spans, span.version, min(span.end, count) - span.start)
    add_span(spans, meta.weight_version, count - sum(length for _, length in spans))
    return spans


def _out_of_range(content: bytes, vocabulary: int) -> str | None:
    """The message about the token id or log-probability that is out of range; None if the problem is another."""
    try:
        answer = json.loads(content)
        token_ids, scored = answer["output_ids"], answer["meta_info"]["output_token_logprobs"]
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocabulary:
                return f"output_ids[{index}] is {token_id}, and the model has {vocabulary} tokens"
        for index, (log_prob, *_) in enumerate(scored):
            if not _LOWEST_LOG_PROB <= log_prob <= _HIGHEST_LOG_PROB:  # also catches NaN
                return f"output_token_logprobs[{index}] is {log_prob}, which is not a log-probability"
    except (ValueError, TypeError, KeyError, IndexError):
        pass
    return None
