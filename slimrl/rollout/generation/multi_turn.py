"""Builds responses: appends engine and tool output, runs the multi-turn tool loop, applies stop strings and tokens.

Token in, token out: engine output is never tokenized again, so that training uses exactly the sampled tokens.
The built-in generation and functions of `--custom-generate-function-path` use this module.

When an aborted response is continued, the engine searches only the new text for stop strings. `end_at_stop_string`
finds a stop string that starts before the abort, so that an abort changes neither the text nor where it stops.
An engine may also report an abort for a response that was complete. `complete_if_stopped` finds the end token
(`stop_tokens`) or the stop string, so that nothing is generated after it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from slimrl.data.images import IMAGES, RESPONSE_STARTS
from slimrl.data.routed_experts import continued
from slimrl.data.sample import NO_VERSION, PackedColumn, Sample, SampleStatus, Span, add_span, clip_spans
from slimrl.engines.protocol import EngineClient, Generation
from slimrl.renamed_modules import current_name
from slimrl.rollout.dataset.images import ImageProcessor, SeenText, images_of

_TOKENS_PER_CHARACTER = 4  # at most: one for each byte of UTF-8


def end_at_stop_string(
    sample: Sample, new_tokens: int, stop: list[str] | str | None, decode: Callable[[list[int]], str]
) -> None:
    """Sets `sample.response` and truncates the sample after a stop string that starts before the last `new_tokens`.

    The token that completes the stop string is kept, as engines do.
    """
    response = sample.tokens[sample.prompt_length :]
    stops = [stop] if isinstance(stop, str) else stop or []
    kept = _tokens_to_stop(response, len(response) - new_tokens, stops, decode)
    if kept is not None:
        surplus = len(response) - kept
        response = response[:kept]
        sample.tokens = sample.tokens[: len(sample.tokens) - surplus]
        sample.response_length = kept
        assert sample.loss_mask is not None and sample.rollout_log_probs is not None  # set by `append_generation`
        sample.loss_mask = sample.loss_mask[:kept]
        sample.rollout_log_probs = sample.rollout_log_probs[:kept]
        sample.version_spans = clip_spans(sample.version_spans, kept)
        sample.status = SampleStatus.COMPLETED
    sample.response = decode(response)


def complete_if_stopped(
    sample: Sample,
    generation: Generation,
    stop: list[str] | str | None,
    end_tokens: Collection[int],
    decode: Callable[[list[int]], str],
) -> None:
    """Sets the status of an aborted sample to COMPLETED if `generation`, its last part, had reached its end."""
    if sample.status is not SampleStatus.ABORTED or not generation.new_tokens:
        return
    stops = [stop] if isinstance(stop, str) else stop or []
    if generation.token_ids[-1] in end_tokens or (stops and _until(decode(generation.token_ids), stops) is not None):
        sample.status = SampleStatus.COMPLETED


def _tokens_to_stop(response: list[int], seam: int, stops: list[str], decode: Callable[[list[int]], str]) -> int | None:
    """Number of tokens up to the end of a stop string that starts before token `seam`; None if there is none."""
    reach = max(map(len, stops), default=0)  # characters
    if reach == 0:
        return None
    first = max(seam - _TOKENS_PER_CHARACTER * reach, 0)
    before = decode(response[first:seam])
    for end in range(seam + 1, len(response) + 1):
        text = decode(response[first:end])
        begins = (text.find(stop, max(len(before) - len(stop) + 1, 0)) for stop in stops)
        if any(0 <= begin < len(before) for begin in begins):
            return end
        if len(text) >= len(before) + reach:  # later matches start after the seam: the engine finds those
            return None
    return None


# metadata of a sample: seconds spent waiting for tools
NON_GENERATION_TIME = "non_generation_time"
# metadata of a multi-turn sample: for each turn of the model, the number of response tokens before it
TURN_STARTS = "turn_starts"

_STATUS_OF_FINISH_REASON = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


def append_generation(sample: Sample, generation: Generation) -> None:
    """Appends an engine's output as tokens to train on and sets the status; does not update the text.

    Raises ValueError if the output breaks the protocol.
    """
    new_tokens, log_probs = generation.new_tokens, len(generation.column("log_probs"))
    if new_tokens != log_probs:
        raise ValueError(f"the engine returned {new_tokens} tokens with {log_probs} log-probs")
    if generation.finish_reason not in _STATUS_OF_FINISH_REASON:
        raise ValueError(f"the engine returned the unknown finish reason {generation.finish_reason!r}")
    if generation.routed_experts is not None:
        known, tokens = sample.rollout_routed_experts, len(sample.column("tokens"))
        sample.rollout_routed_experts = continued(known, tokens, generation.routed_experts)
    spans = generation.version_spans or [[generation.weight_version, new_tokens]]
    if not _append_packed(sample, generation, spans):
        _append(sample, generation.token_ids, generation.log_probs, spans, trained=True)
    if new_tokens:
        sample.weight_versions.append(generation.weight_version)
    sample.status = _STATUS_OF_FINISH_REASON[generation.finish_reason]


def append_tool_output(sample: Sample, token_ids: list[int]) -> None:
    """Appends tool tokens: not trained on, with log-probability 0; does not update the text."""
    spans: list[Span] = [[NO_VERSION, len(token_ids)]]
    _append(sample, token_ids, [0.0] * len(token_ids), spans, trained=False)


def append_seen_text(sample: Sample, seen: SeenText) -> None:
    """Appends a tool's tokens with images, which later requests and training then have."""
    given = sample.multimodal_inputs or {}
    starts = [*(given.get(RESPONSE_STARTS) or ()), *(sample.response_length + start for start in seen.starts)]
    append_tool_output(sample, seen.token_ids)
    if seen.images:
        sample.multimodal_inputs = {**given, IMAGES: [*images_of(sample), *seen.images], RESPONSE_STARTS: starts}
        sample.multimodal_train_inputs = None  # made of all images, for training


@dataclasses.dataclass(frozen=True)
class ToolOutput:
    """The text that a tool appends, and the images at its places `<image>`: paths, URLs, data URIs or bytes."""

    text: str
    images: Sequence[Any] = ()


async def _seen_text(output: str | ToolOutput, tokenizer: Any, processor: ImageProcessor | None) -> SeenText:
    """The tokens of a tool's output. Raises ValueError for bad images, and for images without a processor."""
    if isinstance(output, str) or not output.images:
        text = output if isinstance(output, str) else output.text
        return SeenText(tokenizer(text, add_special_tokens=False)["input_ids"], [], ())
    if processor is None:
        raise ValueError(
            "the tool's output has images: give multi_turn_generate the image_processor, which a function of"
            " --custom-generate-function-path gets as the keyword image_processor with a vision-language model"
        )
    try:  # decoding would hold up the other samples
        return await asyncio.to_thread(processor.tokenize, tokenizer, output.text, output.images)
    except ValueError as error:
        raise ValueError(f"the tool's output cannot be appended: {error}") from error


async def multi_turn_generate(
    sample: Sample,
    sampling_params: dict[str, Any],
    *,
    engine: EngineClient,
    tokenizer: Any,
    tool: Callable[[str], Awaitable[str | ToolOutput | None]],
    stop: list[str],
    max_calls: int,
    image_processor: ImageProcessor | None = None,
) -> Sample:
    """Alternates between model and tool until the model ends its turn without a tool call or the sample is full.

    The model generates until one of the strings `stop`. `tool` receives that turn's text, including the stop string,
    and returns the text to append, also with images (`ToolOutput`, which needs the `image_processor`), or None to end
    the sample. The sample is truncated when it reaches
    `max_new_tokens` (model and tool tokens) or makes more than `max_calls` calls. An aborted sample is returned
    ABORTED and can be continued by another call. A sample's `session_id` keeps its turns on one server.
    """
    run_stop = sampling_params["stop"] or []
    params = {**sampling_params, "stop": [*stop, *([run_stop] if isinstance(run_stop, str) else run_stop)]}
    end = sample.response_length + sampling_params["max_new_tokens"]
    end_tokens = stop_tokens(tokenizer.name_or_path, tokenizer).union(params.get("stop_token_ids") or ())
    starts: list[int] = sample.metadata.setdefault(TURN_STARTS, [sample.response_length])

    def decode(token_ids: list[int]) -> str:
        return tokenizer.decode(
            token_ids,
            skip_special_tokens=params["skip_special_tokens"],
            spaces_between_special_tokens=params["spaces_between_special_tokens"],
        )

    while True:
        if sample.response_length >= end:
            sample.status = SampleStatus.TRUNCATED
            break
        continued = sample.response_length > starts[-1]
        params["max_new_tokens"] = end - sample.response_length
        generation = await engine.generate(sample.tokens, params, session_id=sample.session_id)
        append_generation(sample, generation)
        complete_if_stopped(sample, generation, params["stop"], end_tokens, decode)
        if continued and generation.new_tokens:
            end_at_stop_string(sample, generation.new_tokens, params["stop"], decode)
        if sample.status is not SampleStatus.COMPLETED:
            break
        if image_processor is not None and _stands_for_pixels(image_processor, generation.token_ids):
            break  # sampled as text, which an engine would take for an image or a video in the next request
        call = _until(decode(sample.tokens[sample.prompt_length + starts[-1] :]), stop)
        if call is None:
            break
        started = time.monotonic()
        answer = await tool(call)
        waited = sample.metadata.get(NON_GENERATION_TIME, 0.0)
        sample.metadata[NON_GENERATION_TIME] = waited + time.monotonic() - started
        if answer is None:
            break
        if len(starts) > max_calls:
            sample.status = SampleStatus.TRUNCATED
            break
        seen = await _seen_text(answer, tokenizer, image_processor)
        if seen.images and len(seen.token_ids) > end - sample.response_length:
            sample.status = SampleStatus.TRUNCATED  # a part of an image is none
            break
        append_seen_text(sample, dataclasses.replace(seen, token_ids=seen.token_ids[: end - sample.response_length]))
        starts.append(sample.response_length)
    sample.response = decode(sample.tokens[sample.prompt_length :])
    return sample


def _append_packed(sample: Sample, generation: Generation, spans: list[Span]) -> bool:
    """Like `_append` for a sample without a response yet, if the generation is packed; otherwise returns False."""
    token_ids, log_probs = generation.columns(("token_ids", "log_probs"))
    packed = isinstance(token_ids, PackedColumn) and isinstance(log_probs, PackedColumn)
    if not packed or sample.response_length or any(sample.columns(("loss_mask", "rollout_log_probs"))):
        return False
    sample.version_spans = []
    for version, count in spans:
        add_span(sample.version_spans, version, count)
    sample.pack("tokens", token_ids.after(sample.tokens))
    sample.response_length = len(token_ids)
    sample.pack("loss_mask", PackedColumn(b"\1" * len(token_ids), "u1"))
    sample.pack("rollout_log_probs", log_probs)
    return True


def _append(sample: Sample, token_ids: list[int], log_probs: list[float], spans: list[Span], *, trained: bool) -> None:
    sample.version_spans = clip_spans(sample.version_spans, sample.response_length)
    for version, count in spans:
        add_span(sample.version_spans, version, count)
    sample.tokens = sample.tokens + token_ids
    sample.response_length += len(token_ids)
    sample.loss_mask = [*(sample.loss_mask or []), *[int(trained)] * len(token_ids)]
    sample.rollout_log_probs = [*(sample.rollout_log_probs or []), *log_probs]


def _until(text: str, stop: list[str]) -> str | None:
    """`text` up to the end of the first stop string; None if there is none."""
    ends = [text.index(string) + len(string) for string in stop if string in text]
    return text[: min(ends)] if ends else None


def stop_tokens(model_folder: str | None, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids of the tokenizer, and of config.json and generation_config.json if they exist."""
    own = tokenizer.eos_token_id
    return _stop_tokens_of(model_folder or "").union([] if own is None else [own])


@functools.lru_cache(maxsize=16)
def _stop_tokens_of(model_folder: str) -> frozenset[int]:
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        path = Path(model_folder) / name
        if model_folder and path.is_file():
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found += ids if isinstance(ids, list) else [ids]
    return frozenset(token for token in found if token is not None)


def __getattr__(name: str) -> Any:
    """Custom functions may import names of earlier versions."""
    return globals()[current_name(__name__, name)]


def _stands_for_pixels(image_processor: ImageProcessor, token_ids: Sequence[int]) -> bool:
    tokens = image_processor.tokens
    return tokens.image_token_id in token_ids or tokens.video_token_id in token_ids
