"""Building a response: appending engine output and tool output, the multi-turn tool loop, stop strings, stop tokens.

Token in, token out: engine output is never tokenised again, so that training sees the very tokens that were sampled.
The built-in generation and functions of `--custom-generate-function-path` use it.

An engine looks for stop strings only in what it adds. `end_at_stop_string` finds those that begin before the seam of a
continued response; cutting a response changes neither its text nor where it stops. `stop_tokens` are the end tokens
that engines know: an aborted request may end with one, and must not be continued after it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from slimrl.data.sample import NO_VERSION, Sample, SampleStatus, Span, add_span, clip_spans
from slimrl.engines.protocol import EngineClient, Generation

_TOKENS_PER_CHARACTER = 4  # at most: one for each byte of UTF-8


def end_at_stop_string(
    sample: Sample, new_tokens: int, stop: list[str] | str | None, decode: Callable[[list[int]], str]
) -> None:
    """Fills in `sample.response` as one text, and cuts behind a stop string that reaches over the seam.

    `new_tokens` are the last tokens of the sample, just added. The token that completes the stop string stays, as
    where an engine finds it itself.
    """
    response = sample.tokens[sample.prompt_length :]
    stops = [stop] if isinstance(stop, str) else stop or []
    kept = _tokens_to_stop(response, len(response) - new_tokens, stops, decode)
    if kept is not None:
        surplus = len(response) - kept
        response = response[:kept]
        sample.tokens = sample.tokens[: len(sample.tokens) - surplus]
        sample.response_length = kept
        sample.loss_mask = sample.loss_mask[:kept]
        sample.rollout_log_probs = sample.rollout_log_probs[:kept]
        sample.version_spans = clip_spans(sample.version_spans, kept)
        sample.status = SampleStatus.COMPLETED
    sample.response = decode(response)


def _tokens_to_stop(response: list[int], seam: int, stops: list[str], decode: Callable[[list[int]], str]) -> int | None:
    """Tokens up to the one that completes a stop string which begins before the seam; None where there is none."""
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
        if len(text) >= len(before) + reach:  # what comes now begins behind the seam, where the engine looks itself
            return None
    return None


# metadata of a sample: seconds in which it waited for its tools, and not for an engine
NON_GENERATION_TIME = "non_generation_time"
# metadata of a sample of several turns: the response tokens before each of the model's turns
TURN_STARTS = "turn_starts"

_STATUS_OF_FINISH_REASON = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


def append_generation(sample: Sample, generation: Generation) -> None:
    """Adds what an engine answered, to be trained on, and the status that follows; the text is left as it is.

    Raises ValueError where the answer breaks the protocol.
    """
    new_tokens = len(generation.token_ids)
    if new_tokens != len(generation.log_probs):
        raise ValueError(f"the engine returned {new_tokens} tokens with {len(generation.log_probs)} log-probs")
    if generation.finish_reason not in _STATUS_OF_FINISH_REASON:
        raise ValueError(f"the engine ended with the unknown finish reason {generation.finish_reason!r}")
    spans = generation.version_spans or [[generation.weight_version, new_tokens]]
    _append(sample, generation.token_ids, generation.log_probs, spans, trained=True)
    if new_tokens:
        sample.weight_versions.append(generation.weight_version)
    sample.status = _STATUS_OF_FINISH_REASON[generation.finish_reason]


def append_observation(sample: Sample, token_ids: list[int]) -> None:
    """Adds what no model wrote: not trained on, with log-probability 0; the text is left as it is."""
    spans: list[Span] = [[NO_VERSION, len(token_ids)]]
    _append(sample, token_ids, [0.0] * len(token_ids), spans, trained=False)


async def converse(
    sample: Sample,
    sampling_params: dict[str, Any],
    *,
    engine: EngineClient,
    tokenizer: Any,
    tool: Callable[[str], Awaitable[str | None]],
    stop: list[str],
    max_calls: int,
) -> Sample:
    """The model and a tool take turns until the model ends by itself or the sample is full.

    The model writes until one of the strings `stop`; `tool` is given that turn's text up to and with the stop string
    and answers with the text to continue from, or with None to end the sample. The sample is truncated where it has no
    room (`max_new_tokens` counts tokens of both sides) or wants more than `max_calls` calls. An aborted sample comes
    back ABORTED and may be given in again. A sample's `session_id` keeps its turns on one server.
    """
    own_stop = sampling_params["stop"] or []
    params = {**sampling_params, "stop": [*stop, *([own_stop] if isinstance(own_stop, str) else own_stop)]}
    end = sample.response_length + sampling_params["max_new_tokens"]
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
        if continued and generation.token_ids:
            end_at_stop_string(sample, len(generation.token_ids), params["stop"], decode)
        if sample.status is not SampleStatus.COMPLETED:
            break
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
        token_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        append_observation(sample, token_ids[: end - sample.response_length])
        starts.append(sample.response_length)
    sample.response = decode(sample.tokens[sample.prompt_length :])
    return sample


def _append(sample: Sample, token_ids: list[int], log_probs: list[float], spans: list[Span], *, trained: bool) -> None:
    sample.version_spans = clip_spans(sample.version_spans, sample.response_length)
    for version, count in spans:
        add_span(sample.version_spans, version, count)
    sample.tokens = sample.tokens + token_ids
    sample.response_length += len(token_ids)
    sample.loss_mask = [*(sample.loss_mask or []), *[int(trained)] * len(token_ids)]
    sample.rollout_log_probs = [*(sample.rollout_log_probs or []), *log_probs]


def _until(text: str, stop: list[str]) -> str | None:
    """`text` up to and with the first of the stop strings; None where there is none."""
    ends = [text.index(string) + len(string) for string in stop if string in text]
    return text[: min(ends)] if ends else None


def stop_tokens(model_folder: str | None, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids of the tokenizer, and of config.json and generation_config.json where they are there."""
    found = [tokenizer.eos_token_id]
    for name in ("config.json", "generation_config.json"):
        path = Path(model_folder or "") / name
        if model_folder is not None and path.is_file():
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found += ids if isinstance(ids, list) else [ids]
    return frozenset(token for token in found if token is not None)
