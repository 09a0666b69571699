"""Turns data rows into prompts: text or chat messages to token ids, with label and metadata.

Every row becomes exactly one prompt or is rejected with a reason: a bad row, or one above the length limit. Training
makes prompts as it needs them (`PromptDataset`), evaluation makes all of a set at once; both read a row alike.

A training set opens in a fraction of a second per million rows. A thread reads and checks every row once before the
first training step, and `fingerprint` waits for it. Bad rows are named, counted and limited (`--max-bad-rows`).
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
import threading
from array import array
from collections.abc import Sequence
from typing import Any

from slimrl.data.prompt_format import (
    MESSAGES_KEY,
    TOOLS_KEY,
    InvalidRow,
    PromptFormat,
    Row,
    bad_rows_error,
    messages_of,
    metadata_of,
    tools_of,
    validate_row,
)
from slimrl.data.readers import RowSet, open_rows
from slimrl.data.sample import Sample
from slimrl.rollout.async_utils import WorkerThread

__all__ = [
    "MESSAGES_KEY",
    "TOOLS_KEY",
    "Prompt",
    "PromptFormat",
    "PromptTokenizer",
    "PromptSet",
    "OverlongPrompt",
    "load_prompts",
    "open_prompt_rows",
    "validate_row",
]

logger = logging.getLogger(__name__)

BATCH_ROWS = 1024  # rows that are read and tokenised at a time where all of a set are wanted


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One row of a data set, ready to be sampled from.

    `content` is what the model is asked: the rendered chat template, or the input column as it stands.
    """

    content: str | list[dict[str, Any]]
    token_ids: array[int]
    label: Any
    metadata: dict[str, Any]

    def sample(self, *, group_index: int, index: int) -> Sample:
        """A new sample of this prompt that shares nothing changeable with any other."""
        return Sample(
            prompt=_independent(self.content),
            group_index=group_index,
            index=index,
            label=_independent(self.label),
            tokens=self.token_ids.tolist(),
            metadata=_independent(self.metadata),
        )


@dataclasses.dataclass(frozen=True)
class OverlongPrompt:
    """What is in the place of a prompt above the length limit."""

    num_tokens: int

    def refusal(self, where: str, form: PromptFormat) -> ValueError:
        """What --refuse-long-prompts says of the row at `where`."""
        return ValueError(
            f"{where}: the prompt has {self.num_tokens} tokens and may have {form.max_prompt_len} (the least of the"
            " limit for prompts and an engine's context): shorten it, or leave out --refuse-long-prompts to pass over"
            " such rows"
        )


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """The prompts of one data set in file order, those above the length limit left out and counted."""

    source: str
    prompts: list[Prompt]
    too_long: int

    def __len__(self) -> int:
        return len(self.prompts)


class PromptTokenizer:
    """Checks, renders and tokenises rows; `tokenizer` is a transformers tokenizer.

    Token ids equal `tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)`, or
    `tokenizer(text, add_special_tokens=False)` without a chat template.
    """

    def __init__(self, form: PromptFormat, tokenizer: Any) -> None:
        self._form = form
        self._tokenizer = tokenizer

    def make(self, rows: Sequence[Row]) -> list[Prompt | OverlongPrompt | InvalidRow]:
        """One result per row, in their order."""
        contents = [self._content(row) for row in rows]
        token_ids = self._tokenize(contents)
        limit = self._form.max_prompt_len
        made: list[Prompt | OverlongPrompt | InvalidRow] = []
        for row, content, ids in zip(rows, contents, token_ids, strict=True):
            if isinstance(content, InvalidRow):
                made.append(content)
            elif isinstance(row, InvalidRow):
                made.append(row)
            elif limit is not None and len(ids) > limit:
                made.append(OverlongPrompt(len(ids)))
            else:
                label = None if self._form.label_key is None else row[self._form.label_key]
                made.append(Prompt(content, ids, label, metadata_of(row, self._form)))
        return made

    def _content(self, row: Row) -> str | list[dict[str, Any]] | InvalidRow:
        """What the model is asked."""
        fault = validate_row(row, self._form)
        if isinstance(row, InvalidRow):
            return row
        if fault is not None:
            return InvalidRow(fault)
        content = row[self._form.input_key]
        if not self._form.apply_chat_template:
            return content
        try:
            return self._tokenizer.apply_chat_template(
                messages_of(content),
                tools=tools_of(row, self._form),
                tokenize=False,
                add_generation_prompt=True,
                **self._form.chat_template_kwargs,
            )
        except Exception as error:  # the template is the model's own program: it may raise anything
            return InvalidRow(f"the chat template refuses it: {type(error).__name__}: {error}")

    def _tokenize(self, contents: list[str | list[dict[str, Any]] | InvalidRow]) -> list[array[int]]:
        """Token ids as unsigned 32-bit arrays: a list of Python integers would take nine times the memory."""
        token_ids = [array("I") for _ in contents]
        texts = [place for place, content in enumerate(contents) if isinstance(content, str)]
        if texts:
            encoded = self._tokenizer([contents[place] for place in texts], add_special_tokens=False)
            for place, ids in zip(texts, encoded["input_ids"], strict=True):
                token_ids[place].extend(ids)
        return token_ids


def open_prompt_rows(data_paths: str | Sequence[str], form: PromptFormat) -> RowSet:
    """The rows of these files, which have the columns. Raises ValueError where a Parquet file lacks one."""
    rows = open_rows(data_paths, form.columns)
    for key, flag in ((form.input_key, "--input-key"), (form.label_key, "--label-key")):
        if rows.columns is not None and key is not None and key not in rows.columns:
            known = ", ".join(map(repr, sorted(rows.columns)))
            raise ValueError(f"data set {rows.source} has no column {key!r} ({flag}) but {known}: name one of them")
    return rows


def load_prompts(data_path: str, form: PromptFormat, tokenizer: Any) -> PromptSet:
    """All prompts of a data set at once.

    Raises InvalidRowsError naming every bad row, and ValueError where the length limit leaves no prompt, or refuses
    one.
    """
    rows, maker = open_prompt_rows(data_path, form), PromptTokenizer(form, tokenizer)
    prompts: list[Prompt] = []
    bad: list[str] = []
    for start in range(0, len(rows), BATCH_ROWS):
        numbers = range(start, min(start + BATCH_ROWS, len(rows)))
        for number, made in zip(numbers, maker.make(rows.read(numbers)), strict=True):
            if isinstance(made, InvalidRow):
                bad.append(f"{rows.where(number)}: {made.reason}")
            elif isinstance(made, Prompt):
                prompts.append(made)
            elif form.refuse_too_long:
                raise made.refusal(rows.where(number), form)
    if bad:
        raise bad_rows_error(data_path, bad, 0, "fix or remove them")
    if not prompts:
        raise ValueError(
            f"data set {data_path}: all {len(rows)} prompts are longer than the limit of {form.max_prompt_len} tokens"
            " (--eval-max-prompt-len, or an engine's context): raise the limit or give shorter prompts"
        )
    too_long = len(rows) - len(prompts)
    if too_long:
        logger.warning(
            "%s: left out %d of %d prompts, longer than %d tokens", data_path, too_long, len(rows), form.max_prompt_len
        )
    return PromptSet(data_path, prompts, too_long)


def _independent(value: Any) -> Any:
    """A deep copy; texts and numbers, which cannot change, as they are (a deep copy costs microseconds)."""
    if value is None or isinstance(value, str | int | float):
        return value
    return copy.deepcopy(value)


_CHECKED_AT_ONCE = 20_000  # rows; takes less than a tenth of a second


class PromptDataset:
    """Prompts by row number. `max_bad` rows may be bad: they are left out and logged."""

    def __init__(self, data_paths: Sequence[str], form: PromptFormat, tokenizer: Any, max_bad: int) -> None:
        self.form = form
        self._rows = open_prompt_rows(data_paths, form)
        self._maker = PromptTokenizer(form, tokenizer)
        self._max_bad = max_bad
        self._bad: dict[int, str] = {}
        self._lock = threading.Lock()
        self._check: WorkerThread[str] | None = None

    def __len__(self) -> int:
        """Number of rows, usable or not."""
        return len(self._rows)

    def where(self, row: int) -> str:
        """The address of a row, for messages: `file:line`."""
        return self._rows.where(row)

    @property
    def source(self) -> str:
        """The paths, as they were given."""
        return self._rows.source

    @property
    def bad_rows(self) -> dict[int, str]:
        """Bad rows found so far, each with what is wrong with it."""
        return dict(self._bad)

    def check(self) -> None:
        """Reads every row in a thread, which few rows are waited for. Raises InvalidRowsError where too many are
        bad.
        """
        self._check = WorkerThread(self._read_all)
        if len(self._rows) <= _CHECKED_AT_ONCE:
            self._check.result()

    @property
    def fingerprint(self) -> str:
        """Of the bytes of all rows, wherever they lie; waits for `check`, which must be in progress."""
        if self._check is None:
            raise RuntimeError(f"the rows of {self.source} are not being checked: call check() first")
        return self._check.result()

    def prompts(self, rows: Sequence[int]) -> list[Prompt | OverlongPrompt | None]:
        """One result for each of these rows; None is a bad row. Raises InvalidRowsError where that is one too many."""
        if self._check is not None:
            self._check.raise_if_failed()
        made = self._maker.make(self._rows.read(rows))
        for row, result in zip(rows, made, strict=True):
            if isinstance(result, InvalidRow):
                self._note_bad({row: result.reason})
        return [None if isinstance(result, InvalidRow) else result for result in made]

    def count_usable(self) -> int:
        """How many rows make prompts within the limit: makes all of them once, a few minutes for a million."""
        usable = 0
        for start in range(0, len(self), BATCH_ROWS):
            made = self.prompts(range(start, min(start + BATCH_ROWS, len(self))))
            usable += sum(isinstance(prompt, Prompt) for prompt in made)
        return usable

    def restore_bad(self, bad: dict[int, str]) -> None:
        """Counts rows that an earlier run found bad."""
        self._note_bad(bad)

    def _read_all(self) -> str:
        """Parses every row and looks at its columns; returns the fingerprint. Runs in a thread."""
        digest = hashlib.blake2b(digest_size=16)
        bad, row = {}, 0
        for block in self._rows.blocks(digest):
            for value in block:
                fault = validate_row(value, self.form)
                if fault is not None:
                    bad[row] = fault
                row += 1
        self._note_bad(bad)
        return digest.hexdigest()

    def _note_bad(self, found: dict[int, str]) -> None:
        with self._lock:  # both the thread that checks and the one that draws come here
            new = sorted(row for row in found if row not in self._bad)
            self._bad.update((row, found[row]) for row in new)
            bad = sorted(self._bad)
        if len(bad) > self._max_bad:
            named = [f"{self._rows.where(row)}: {self._bad[row]}" for row in bad]
            fix = "fix or remove them, or raise --max-bad-rows to leave that many out"
            raise bad_rows_error(self.source, named, self._max_bad, fix)
        for row in new:
            where = self._rows.where(row)
            logger.warning("left out a bad row (at most %d may be bad): %s: %s", self._max_bad, where, found[row])
