"""The text of each token, for showing tokens one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4  # tokens: UTF-8 has at most 4 bytes for a character, and no token has less than one


class Decoder(Protocol):
    """A tokenizer, as far as it is needed here."""

    def decode(self, token_ids: list[int]) -> str: ...


class RememberingDecoder:
    """A tokenizer that decodes each token by itself once only: the same ones come again and again."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def decode(self, token_ids: list[int]) -> str:
        """As the tokenizer."""
        if len(token_ids) != 1:
            return self._tokenizer.decode(token_ids)
        (token,) = token_ids
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode(token_ids)
        return self._texts[token]


def token_pieces(tokenizer: Decoder, tokens: Sequence[int]) -> Iterator[tuple[str, int]]:
    """(text, number of tokens) of the shortest runs of `tokens` that end where a character ends, in order.

    Byte-level tokenizers cut characters apart; a run of more than four tokens that still is none stays as it is.
    """
    start = 0
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(list(tokens[start:end]))
        if text.endswith(_INCOMPLETE) and end < len(tokens) and end - start < _LONGEST_CHARACTER:
            continue
        yield text, end - start
        start = end
