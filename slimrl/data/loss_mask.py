"""Which tokens of a rendered conversation are trained on: what the assistant says, up to the mark that ends its turn.

Promises one mask entry per token of a text that is tokenised once and whole, so that no token differs from what the
model meets when it generates. Pure: the tokenizer is the caller's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class TurnMarks:
    """What a chat template writes before and after the assistant's words; the mark after is trained on too."""

    before: str
    after: str


_CHATML = TurnMarks("<|im_start|>assistant\n", "<|im_end|>")
# --loss-mask-type -> the marks of that family's chat template
TURN_MARKS: dict[str, TurnMarks] = {
    "qwen": _CHATML,
    "qwen3": _CHATML,
    "qwen3_5": _CHATML,
    "distill_qwen": TurnMarks("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
}


def assistant_spans(text: str, marks: TurnMarks) -> list[tuple[int, int]]:
    """Where the assistant speaks in a rendered conversation, as character ranges; a last turn may lack its end."""
    spans = []
    position = text.find(marks.before)
    while position >= 0:
        start = position + len(marks.before)
        end = text.find(marks.after, start)
        end = len(text) if end < 0 else end + len(marks.after)
        spans.append((start, end))
        position = text.find(marks.before, end)
    return spans


def trained_turns(messages: Sequence[dict[str, Any]]) -> list[bool]:
    """For each message of the assistant, whether it is trained on: not where its `step_loss_mask` is 0."""
    return [bool(message.get("step_loss_mask", 1)) for message in messages if message.get("role") == "assistant"]


def conversation_mask(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]], trained: Sequence[bool]
) -> list[int]:
    """1 for each token that begins within a trained span, from the tokens' character ranges.

    Raises ValueError where the template rendered another number of the assistant's turns than there are.
    """
    if len(spans) != len(trained):
        raise ValueError(
            f"the chat template wrote {len(spans)} turns of the assistant and the conversation has {len(trained)}:"
            " choose the --loss-mask-type of the model's family"
        )
    chosen = [span for span, is_trained in zip(spans, trained, strict=True) if is_trained]
    return [int(any(start <= begin < end for start, end in chosen)) for begin, _ in offsets]
