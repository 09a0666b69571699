"""How many drafts a `STANDALONE` draft model of SGLang gets right, counted with transformers."""

from __future__ import annotations

from typing import Any

import torch

CHAIN = 3  # tokens that are drafted before each pass, SGLang's default
ASKED_FOR = 8  # tokens of the answers whose drafts are counted in a run


def count_drafts(draft: Any, prompt: list[int], answer: list[int], tokens: int) -> tuple[int, int]:
    """Right and proposed drafts while a server generates the first `tokens` of `answer`, its most likely tokens.

    The first token comes from the prompt alone, then each pass keeps the drafts up to the first wrong one and adds
    a token of the served model. Drafts that a last pass keeps beyond `tokens` count, so `answer` needs CHAIN more.

    SGLang gives the draft model the tokens of a sequence without the first: for heads such as EAGLE's, which see the
    served model's state of each position beside the token behind it, and for whole models alike.
    """
    right, proposed, done = 0, 0, 1
    while done < tokens:
        drafts, wanted = _most_likely(draft, [*prompt, *answer[:done]][1:]), answer[done : done + CHAIN]
        kept = next((place for place in range(CHAIN) if drafts[place] != wanted[place]), CHAIN)
        right, proposed, done = right + kept, proposed + CHAIN, done + kept + 1
    return right, proposed


@torch.no_grad()
def _most_likely(model: Any, sequence: list[int]) -> list[int]:
    """The next tokens, the end of a sequence among them, which `generate` would stop at or leave out."""
    found = list(sequence)
    for _ in range(CHAIN):
        found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[-CHAIN:]
