"""A row of preference data: a prompt, and a preferred and a rejected answer to it.

The answers are text, one message, or messages; the prompt is text or messages. If the answers are whole conversations,
the messages that they share are the prompt, and the row needs no column for it. Opens no file and needs no tokenizer:
the checks of flags and the loader share this module.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

PAIR_KEY = "preference_pair"  # of Sample.metadata: {"chosen": ..., "rejected": ...}, each as in `Pair`
SIDES = ("chosen", "rejected")
Message = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PairColumns:
    """The columns of the answers; with `as_chat` texts are messages of a chat."""

    chosen: str
    rejected: str
    as_chat: bool

    @property
    def flags(self) -> dict[str, str]:
        """The flag of each column."""
        return {self.chosen: "--chosen-key", self.rejected: "--rejected-key"}


@dataclasses.dataclass(frozen=True)
class Pair:
    """Three texts, or three lists of messages; the answers continue the prompt."""

    prompt: str | list[Message]
    chosen: str | list[Message]
    rejected: str | list[Message]

    @property
    def answers(self) -> dict[str, str | list[Message]]:
        """The answers by side, for `PAIR_KEY`."""
        return {"chosen": self.chosen, "rejected": self.rejected}


def pair_of(row: dict[str, Any], input_key: str, columns: PairColumns) -> Pair:
    """The pair of a row. Raises ValueError, which completes "<file>:<line>: ...", if it has none."""
    keys = columns.chosen, columns.rejected
    if keys[0] == keys[1]:
        raise ValueError(f"--chosen-key and --rejected-key are both {keys[0]!r}: name the columns of the two answers")
    sides = [_column(row, key, flag) for key, flag in columns.flags.items()]
    if sides[0] == sides[1]:
        raise ValueError(f"{columns.chosen!r} and {columns.rejected!r} are equal: a pair needs two different answers")
    prompt = row.get(input_key)
    texts = all(isinstance(value, str) for value in (prompt, *sides))
    if texts and prompt and not columns.as_chat:
        return Pair(prompt, *sides)
    chosen, rejected = (_messages(side, key) for side, key in zip(sides, keys, strict=True))
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        if not prompt:
            state = "an empty" if input_key in row else "no"
            raise ValueError(f"{state} column {input_key!r} (--input-key) for the prompt; it has {sorted(row)}")
        opening = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt, input_key)
    else:
        opening = _shared(chosen, rejected, columns)
        _check_same(prompt, opening, input_key)
        chosen, rejected = chosen[len(opening) :], rejected[len(opening) :]
    if opening[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with a message of the assistant")
    for answer, key in ((chosen, columns.chosen), (rejected, columns.rejected)):
        last = answer[-1]
        if last["role"] != "assistant" or not (last.get("tool_calls") or str(last.get("content") or "").strip()):
            raise ValueError(f"{key!r} does not end with a message of the assistant that has content")
    return Pair(opening, chosen, rejected)


def _column(row: dict[str, Any], key: str, flag: str) -> Any:
    value = row.get(key)
    if not value or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"{'an empty' if key in row else 'no'} column {key!r} ({flag}); it has {sorted(row)}")
    return value


def _messages(value: Any, key: str) -> list[Message]:
    """The messages of a column; text is an answer of the assistant."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    found = [value] if isinstance(value, dict) else value
    if not isinstance(found, list) or not all(isinstance(part, dict) and "role" in part for part in found):
        raise ValueError(f'{key!r} must be text or a list of {{"role", "content"}} messages')
    return found


def _shared(chosen: list[Message], rejected: list[Message], columns: PairColumns) -> list[Message]:
    """The messages with which both conversations begin."""
    couples = zip(chosen, rejected, strict=False)
    shared = [one for one, _ in itertools.takewhile(lambda couple: couple[0] == couple[1], couples)]
    tails = chosen[len(shared) : len(shared) + 1] + rejected[len(shared) : len(shared) + 1]
    if not shared or len(tails) < len(SIDES) or any(part["role"] != "assistant" for part in tails):
        raise ValueError(
            f"the prompts of {columns.chosen!r} and {columns.rejected!r} differ: the conversations must be equal up to"
            " an answer of the assistant"
        )
    return shared


def _check_same(prompt: Any, opening: list[Message], input_key: str) -> None:
    """Raise ValueError if the prompt column is not the prompt of the conversations."""
    if not prompt or prompt == opening or (isinstance(prompt, str) and prompt == opening[-1].get("content")):
        return
    raise ValueError(f"the prompt differs: column {input_key!r} is not the beginning of the conversations")
