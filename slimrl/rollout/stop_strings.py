"""Where a response that was cut off and continued ends: an engine looks for stop strings in what it adds only.

Called for continued samples; promises that cutting a response changes neither its text nor where it stops.
"""

from __future__ import annotations

from collections.abc import Callable

from slimrl.data import version_spans
from slimrl.data.sample import Sample, SampleStatus

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
        sample.version_spans = version_spans.fitted(sample.version_spans, kept)
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
