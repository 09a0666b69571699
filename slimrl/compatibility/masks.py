"""slime's loss masks of conversations, made as supervised training here makes them."""

from __future__ import annotations

import itertools
from typing import Any

from slimrl.data.loss_mask import TURN_MARKS, assistant_spans, conversation_mask, trained_turns


def get_response_lengths(loss_masks: list[list[int]]) -> list[int]:
    """Tokens from the first trained one to the end; 0 where none is trained on."""
    return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Masks for one tokenizer, which must be a fast one; `tokenizer_type` says how its template marks turns."""

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        if tokenizer_type not in TURN_MARKS:
            raise ValueError(f"tokenizer_type {tokenizer_type!r} is not known: use {', '.join(TURN_MARKS)}")
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type

    def get_loss_mask(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids of the conversation, and a 1 for each that the assistant wrote.

        A turn whose `step_loss_mask` is 0 is left out.
        Raises ValueError where the template wrote another number of the assistant's turns than there are.
        """
        text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = assistant_spans(text, TURN_MARKS[self.tokenizer_type])
        mask = conversation_mask(encoded["offset_mapping"], spans, trained_turns(messages))
        return list(encoded["input_ids"]), mask

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        """As the function of that name."""
        return get_response_lengths(loss_masks)

    def get_text_from_loss_mask(self, token_ids: list[int], loss_masks: list[int]) -> list[str]:
        """The texts of the trained stretches, in order."""
        runs = itertools.groupby(zip(token_ids, loss_masks, strict=True), key=lambda pair: pair[1])
        return [self.tokenizer.decode([token for token, _ in pairs]) for trained, pairs in runs if trained]
