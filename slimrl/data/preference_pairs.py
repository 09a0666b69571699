"""A row of preference data: a prompt, and a preferred and one or several rejected answers to it, or a labelled answer.

The answers are text, one message, or messages; the prompt is text or messages. If the answers are whole conversations,
the messages that they share are the prompt, and the row needs no column for it. Opens no file and needs no tokenizer:
the checks of flags and the loader share this module.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

# of Sample.metadata: {"chosen": ..., "rejected": ...}, each as in `Pair`; several rejected answers are a list of them.
# For a reward model also "margin". A labelled answer: {"completion": ..., "label": whether it is desirable}.
PAIR_KEY = "preference_pair"
SIDES = ("chosen", "rejected")
Message = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PairColumns:
    """The columns of the answers; with `as_chat` texts are messages of a chat.

    With more than one of `rejected_answers` the column of the rejected ones is a list of so many. `has_margin`: the
    pair has a margin, 0 without the column `margin`.
    """

    chosen: str
    rejected: str
    as_chat: bool
    rejected_answers: int = 1
    has_margin: bool = False
    margin: str | None = None

    @property
    def flags(self) -> dict[str, str]:
        """The flag of each column."""
        own = {self.chosen: "--chosen-key", self.rejected: "--rejected-key"}
        return own if self.margin is None else {**own, self.margin: "--margin-key"}


@dataclasses.dataclass(frozen=True)
class AnswerColumns:
    """The columns of an answer and its label, true if it is desirable; with `as_chat` texts are messages of a chat."""

    completion: str
    label: str
    as_chat: bool

    @property
    def flags(self) -> dict[str, str]:
        """The flag of each column."""
        return {self.completion: "--completion-key", self.label: "--label-key"}


@dataclasses.dataclass(frozen=True)
class Pair:
    """Prompt and answers: texts, or lists of messages; the answers continue the prompt.

    With `desirable` there is no rejected answer, and it tells what `chosen` is.
    """

    prompt: str | list[Message]
    chosen: str | list[Message]
    rejected: tuple[str | list[Message], ...]
    margin: float | None = None
    desirable: bool | None = None

    @property
    def answers(self) -> dict[str, Any]:
        """The answers by side, for `PAIR_KEY`."""
        if self.desirable is not None:
            return {"completion": self.chosen, "label": self.desirable}
        rejected = self.rejected[0] if len(self.rejected) == 1 else list(self.rejected)
        own = {"chosen": self.chosen, "rejected": rejected}
        return own if self.margin is None else {**own, "margin": self.margin}


def answers_of(pair: dict[str, Any], count: int) -> list[Any]:
    """The `count` answers of a `PAIR_KEY` entry, the preferred one first. Raises ValueError for another number."""
    if "completion" in pair:
        if count != 1:
            raise ValueError(f"it has one answer with a label, and --n-samples-per-prompt is {count}: give 1")
        return [pair["completion"]]
    if "chosen" not in pair or count < len(SIDES):
        raise ValueError(f"it has no 'completion' with a 'label', and --n-samples-per-prompt is {count}: give 2")
    rejected = pair["rejected"] if count > len(SIDES) else [pair["rejected"]]
    if not isinstance(rejected, list) or len(rejected) != count - 1:
        raise ValueError(f"its 'rejected' is not a list of {count - 1}: give the --n-samples-per-prompt of its answers")
    return [pair["chosen"], *rejected]


def pair_of(row: dict[str, Any], input_key: str, columns: PairColumns | AnswerColumns) -> Pair:
    """The answers of a row. Raises ValueError, which completes "<file>:<line>: ...", if it has none."""
    if isinstance(columns, AnswerColumns):
        return _labelled(row, input_key, columns)
    rows = [row]
    if columns.rejected_answers > 1:
        rejected = _column(row, columns.rejected, "--rejected-key")
        if not isinstance(rejected, list) or len(rejected) != columns.rejected_answers:
            count = len(rejected) if isinstance(rejected, list) else 1
            raise ValueError(
                f"{columns.rejected!r} has {count} rejected answer{'' if count == 1 else 's'} and"
                f" --n-samples-per-prompt {columns.rejected_answers + 1} needs a list of {columns.rejected_answers}"
            )
        if any(one == other for one, other in itertools.combinations(rejected, 2)):
            raise ValueError(f"{columns.rejected!r} has the same answer twice")
        rows = [{**row, columns.rejected: one} for one in rejected]
    found = [_pair(one, input_key, columns) for one in rows]
    first = found[0]
    if any((one.prompt, one.chosen) != (first.prompt, first.chosen) for one in found):
        raise ValueError(f"the prompts of the answers in {columns.rejected!r} differ")
    return dataclasses.replace(first, rejected=tuple(one.rejected[0] for one in found), margin=_margin(row, columns))


def _labelled(row: dict[str, Any], input_key: str, columns: AnswerColumns) -> Pair:
    answer = _column(row, columns.completion, "--completion-key")
    desirable = row.get(columns.label)
    if not isinstance(desirable, bool):
        if columns.label not in row:
            raise ValueError(f"no column {columns.label!r} (--label-key); it has {sorted(row)}")
        raise ValueError(f"{columns.label!r} (--label-key) is {desirable!r} and must be true (desirable) or false")
    prompt = row.get(input_key)
    if isinstance(prompt, str) and isinstance(answer, str) and prompt and not columns.as_chat:
        return Pair(prompt, answer, (), desirable=desirable)
    messages = _messages(answer, columns.completion)
    if messages[0]["role"] != "assistant":
        raise ValueError(f"{columns.completion!r} does not begin with a message of the assistant")
    return Pair(_opening(row, input_key), _ended(messages, columns.completion), (), desirable=desirable)


def _opening(row: dict[str, Any], input_key: str) -> list[Message]:
    """The prompt column as messages. Raises ValueError if it is missing, or ends with the assistant."""
    prompt = row.get(input_key)
    if not prompt:
        state = "an empty" if input_key in row else "no"
        raise ValueError(f"{state} column {input_key!r} (--input-key) for the prompt; it has {sorted(row)}")
    opening = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt, input_key)
    return _asked(opening)


def _asked(opening: list[Message]) -> list[Message]:
    if opening[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with a message of the assistant")
    return opening


def _ended(answer: list[Message], key: str) -> list[Message]:
    last = answer[-1]
    if last["role"] != "assistant" or not (last.get("tool_calls") or str(last.get("content") or "").strip()):
        raise ValueError(f"{key!r} does not end with a message of the assistant that has content")
    return answer


def _margin(row: dict[str, Any], columns: PairColumns) -> float | None:
    if not columns.has_margin or columns.margin is None:
        return 0.0 if columns.has_margin else None
    return number_of(row, columns.margin, "--margin-key")


def number_of(row: dict[str, Any], key: str, flag: str) -> float:
    """The number in a column. Raises ValueError if it is none, or not finite."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key!r} ({flag}) is {value!r} and must be a finite number")
    return float(value)


def _pair(row: dict[str, Any], input_key: str, columns: PairColumns) -> Pair:
    keys = columns.chosen, columns.rejected
    if keys[0] == keys[1]:
        raise ValueError(f"--chosen-key and --rejected-key are both {keys[0]!r}: name the columns of the two answers")
    sides = [_column(row, keys[0], "--chosen-key"), _column(row, keys[1], "--rejected-key")]
    if sides[0] == sides[1]:
        raise ValueError(f"{columns.chosen!r} and {columns.rejected!r} are equal: a pair needs two different answers")
    prompt = row.get(input_key)
    texts = all(isinstance(value, str) for value in (prompt, *sides))
    if texts and prompt and not columns.as_chat:
        return Pair(prompt, sides[0], (sides[1],))
    chosen, rejected = (_messages(side, key) for side, key in zip(sides, keys, strict=True))
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        opening = _opening(row, input_key)
    else:
        opening = _asked(_shared(chosen, rejected, columns))
        _check_same(prompt, opening, input_key)
        chosen, rejected = chosen[len(opening) :], rejected[len(opening) :]
    return Pair(opening, _ended(chosen, columns.chosen), (_ended(rejected, columns.rejected),))


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
