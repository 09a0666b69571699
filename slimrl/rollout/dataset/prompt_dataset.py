"""Turns data rows into prompts: text or chat messages to token ids, with label and metadata.

Every row becomes exactly one prompt or is rejected with a reason: a bad row, or one above the length limit, which
--rollout-truncate-prompt shortens instead. Training tokenizes prompts on demand (`PromptDataset`), evaluation tokenizes
a whole set at once; both read rows the same way.

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

from slimrl.data.images import IMAGES, VIDEOS, with_images
from slimrl.data.preference_pairs import PAIR_KEY, pair_of
from slimrl.data.prompt_format import (
    MESSAGES_KEY,
    PLACE_KEY,
    TOOLS_KEY,
    InvalidRow,
    PromptFormat,
    Row,
    bad_rows_error,
    in_template,
    messages_of,
    metadata_of,
    tools_of,
    truncated,
    validate_row,
)
from slimrl.data.readers import RowSet, open_rows
from slimrl.data.sample import Sample
from slimrl.rollout.async_utils import WorkerThread
from slimrl.rollout.dataset.images import ImageProcessor
from slimrl.rollout.dataset.videos import Video

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

CUT_KEY = "prompt_tokens_cut"  # metadata: tokens cut out of a prompt by --rollout-truncate-prompt
BATCH_ROWS = 1024  # rows per read and tokenization when a whole set is processed


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One tokenized row of a dataset.

    `content` is the rendered chat template, the text in --input-template, or the unchanged input column. `images` are
    the data URIs of its images, each of which has all of its tokens in `token_ids`, and so have its `videos`.
    """

    content: str | list[dict[str, Any]]
    token_ids: array[int]
    label: Any
    metadata: dict[str, Any]
    images: tuple[str, ...] = ()
    videos: tuple[Video, ...] = ()

    def sample(self, *, group_index: int, index: int) -> Sample:
        """A new sample of this prompt that shares no mutable object with others."""
        return Sample(
            prompt=_independent(self.content),
            group_index=group_index,
            index=index,
            label=_independent(self.label),
            tokens=self.token_ids.tolist(),
            metadata=_independent(self.metadata),
            multimodal_inputs=self._seen(),
        )

    def _seen(self) -> dict[str, Any] | None:
        images = {IMAGES: list(self.images)} if self.images else {}
        videos = {VIDEOS: [video.stored() for video in self.videos]} if self.videos else {}
        return {**images, **videos} or None


@dataclasses.dataclass(frozen=True)
class OverlongPrompt:
    """Stands for a prompt above the length limit."""

    num_tokens: int

    def error(self, where: str, form: PromptFormat) -> ValueError:
        """The error of --refuse-long-prompts for the row at `where`."""
        return ValueError(
            f"{where}: the prompt has {self.num_tokens} tokens, more than {form.max_prompt_len} (the smaller one of the"
            " prompt limit and the engine's context): shorten it, or leave out --refuse-long-prompts to skip such rows"
        )


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """The prompts of one dataset in file order, without the `too_long` ones above the length limit."""

    source: str
    prompts: list[Prompt]
    too_long: int

    def __len__(self) -> int:
        return len(self.prompts)


class PromptTokenizer:
    """Checks, renders and tokenizes rows; `tokenizer` is a transformers tokenizer.

    Token ids equal `tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)`, or
    `tokenizer(text, add_special_tokens=False)` without a chat template.
    """

    def __init__(self, form: PromptFormat, tokenizer: Any) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._images = None if form.images is None else ImageProcessor(form.images.folder)

    def make(self, rows: Sequence[Row], places: Sequence[str]) -> list[Prompt | OverlongPrompt | InvalidRow]:
        """One result per row, in order; `places` has the "<file>:<line>" of each."""
        contents = [self._content(row) for row in rows]
        token_ids = self._tokenize(contents)
        limit = self._form.max_prompt_len
        results: list[Prompt | OverlongPrompt | InvalidRow] = []
        valid = [None if isinstance(content, InvalidRow) else row for row, content in zip(rows, contents, strict=True)]
        seen: Sequence[Any] = [None] * len(valid)
        if self._images is not None and self._form.images is not None:
            seen = self._images.of_rows(valid, self._form.images)
        for row, place, content, ids, own in zip(rows, places, contents, token_ids, seen, strict=True):
            images: tuple[str, ...] = ()
            videos: tuple[Video, ...] = ()
            try:
                if self._images is not None and own is not None:
                    counts, images, videos = own()
                    if isinstance(content, str):  # a conversation is tokenized with its loss mask
                        ids = self._images.expand_all(ids, counts, videos, self._tokenizer)
            except ValueError as error:
                content = InvalidRow(str(error))
            if isinstance(content, InvalidRow):
                results.append(content)
            elif isinstance(row, InvalidRow):
                results.append(row)
            elif limit is not None and len(ids) > limit and self._form.truncation is None:
                results.append(OverlongPrompt(len(ids)))
            else:
                label = None if self._form.label_key is None else row[self._form.label_key]
                metadata = metadata_of(row, self._form) | ({PLACE_KEY: place} if self._form.holds_answers else {})
                if self._form.pair is not None:
                    metadata = {**metadata, PAIR_KEY: pair_of(row, self._form.input_key, self._form.pair).answers}
                prompt = Prompt(content, ids, label, metadata, images, videos)
                results.append(prompt if limit is None or len(ids) <= limit else self._shortened(prompt, limit))
        return results

    def _shortened(self, prompt: Prompt, limit: int) -> Prompt:
        """The prompt cut to `limit` tokens, with the text of those; the metadata tells how many were cut out."""
        assert self._form.truncation is not None  # checked by the caller
        kept = truncated(prompt.token_ids, limit, self._form.truncation)
        return dataclasses.replace(
            prompt,
            content=self._tokenizer.decode(kept),
            token_ids=array("I", kept),
            metadata={**prompt.metadata, CUT_KEY: len(prompt.token_ids) - limit},
        )

    def _content(self, row: Row) -> str | list[dict[str, Any]] | InvalidRow:
        """The prompt of the row, or why it is bad."""
        fault = validate_row(row, self._form)
        if isinstance(row, InvalidRow):
            return row
        if fault is not None:
            return InvalidRow(fault)
        if self._form.pair is not None:
            return pair_of(row, self._form.input_key, self._form.pair).prompt
        content = row[self._form.input_key]
        if not self._form.apply_chat_template:
            template = self._form.input_template
            return content if template is None else in_template(template, content)
        messages = messages_of(content)
        try:
            return self._tokenizer.apply_chat_template(
                messages if self._form.images is None else with_images(messages),
                tools=tools_of(row, self._form),
                tokenize=False,
                add_generation_prompt=True,
                **self._form.chat_template_kwargs,
            )
        except Exception as error:  # the template is the model's code: it may raise anything
            return InvalidRow(f"the chat template rejects it: {type(error).__name__}: {error}")

    def _tokenize(self, contents: list[str | list[dict[str, Any]] | InvalidRow]) -> list[array[int]]:
        """Token ids as unsigned 32-bit arrays: a list of Python integers would take nine times the memory."""
        token_ids = [array("I") for _ in contents]
        texts = [index for index, content in enumerate(contents) if isinstance(content, str)]
        if texts:
            encoded = self._tokenizer([contents[index] for index in texts], add_special_tokens=False)
            for index, ids in zip(texts, encoded["input_ids"], strict=True):
                token_ids[index].extend(ids)
        return token_ids


def open_prompt_rows(data_paths: str | Sequence[str], form: PromptFormat) -> RowSet:
    """Opens the rows of these files. Raises ValueError if a Parquet file lacks the input or label column."""
    rows = open_rows(data_paths, form.columns)
    for key, flag in form.required.items():
        if rows.columns is not None and key not in rows.columns:
            known = ", ".join(map(repr, sorted(rows.columns)))
            raise ValueError(f"dataset {rows.source} has no column {key!r} ({flag}): set {flag} to one of {known}")
    return rows


def load_prompts(data_path: str, form: PromptFormat, tokenizer: Any) -> PromptSet:
    """Loads all prompts of a dataset.

    Raises InvalidRowsError with every bad row, and ValueError if all prompts are too long, or one is with
    --refuse-long-prompts.
    """
    rows, prompt_tokenizer = open_prompt_rows(data_path, form), PromptTokenizer(form, tokenizer)
    prompts: list[Prompt] = []
    bad: list[str] = []
    for start in range(0, len(rows), BATCH_ROWS):
        numbers = range(start, min(start + BATCH_ROWS, len(rows)))
        places = [rows.where(number) for number in numbers]
        for place, result in zip(places, prompt_tokenizer.make(rows.read(numbers), places), strict=True):
            if isinstance(result, InvalidRow):
                bad.append(f"{place}: {result.reason}")
            elif isinstance(result, Prompt):
                prompts.append(result)
            elif form.refuse_too_long:
                raise result.error(place, form)
    if bad:
        raise bad_rows_error(data_path, bad, 0, "fix or remove them")
    if not prompts:
        raise ValueError(
            f"dataset {data_path}: all {len(rows)} prompts are longer than the limit of {form.max_prompt_len} tokens"
            " (--eval-max-prompt-len, or an engine's context): raise the limit or use shorter prompts"
        )
    too_long = len(rows) - len(prompts)
    if too_long:
        logger.warning(
            "%s: skipped %d of %d prompts, longer than %d tokens", data_path, too_long, len(rows), form.max_prompt_len
        )
    return PromptSet(data_path, prompts, too_long)


def _independent(value: Any) -> Any:
    """A deep copy; immutable texts and numbers are returned unchanged (a deep copy costs microseconds)."""
    if value is None or isinstance(value, str | int | float):
        return value
    return copy.deepcopy(value)


_CHECKED_SYNCHRONOUSLY = 20_000  # rows; takes less than a tenth of a second


class PromptDataset:
    """Prompts by row number. Up to `max_bad` rows may be bad: they are skipped and logged."""

    def __init__(self, data_paths: Sequence[str], form: PromptFormat, tokenizer: Any, max_bad: int) -> None:
        self.form = form
        self._rows = open_prompt_rows(data_paths, form)
        self._prompt_tokenizer = PromptTokenizer(form, tokenizer)
        self._max_bad = max_bad
        self._bad: dict[int, str] = {}
        self._lock = threading.Lock()
        self._check: WorkerThread[str] | None = None
        self._ahead: tuple[list[int], WorkerThread[list[Prompt | OverlongPrompt | InvalidRow]]] | None = None

    def __len__(self) -> int:
        """Number of rows, usable or not."""
        return len(self._rows)

    def where(self, row: int) -> str:
        """The address of a row, for messages: `file:line`."""
        return self._rows.where(row)

    @property
    def source(self) -> str:
        """The paths as given on the command line."""
        return self._rows.source

    @property
    def bad_rows(self) -> dict[int, str]:
        """Bad rows found so far, with reasons."""
        return dict(self._bad)

    def check(self) -> None:
        """Starts a thread that checks every row; waits for it if there are few. Raises InvalidRowsError."""
        self._check = WorkerThread(self._read_all)
        if len(self._rows) <= _CHECKED_SYNCHRONOUSLY:
            self._check.result()

    @property
    def fingerprint(self) -> str:
        """Hash of the bytes of all rows, independent of the files' paths; waits for `check`, which must be running."""
        if self._check is None:
            raise RuntimeError(f"the rows of {self.source} are not being checked: call check() first")
        return self._check.result()

    def prompts(self, rows: Sequence[int]) -> list[Prompt | OverlongPrompt | None]:
        """One result per row; None for a bad row. Raises InvalidRowsError if there are too many bad rows."""
        if self._check is not None:
            self._check.raise_if_failed()
        results = self._take_prefetched(rows)
        results += self._make(rows[len(results) :])
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, InvalidRow):
                self._add_bad_rows({row: result.reason})
        return [None if isinstance(result, InvalidRow) else result for result in results]

    def prefetch(self, rows: Sequence[int]) -> None:
        """Starts a thread that reads and tokenizes `rows` for the next call of `prompts`; bad rows count only then."""
        self._take_prefetched(())  # one thread at a time uses the tokenizer
        self._ahead = list(rows), WorkerThread(lambda: self._make(rows))

    def _take_prefetched(self, rows: Sequence[int]) -> list[Prompt | OverlongPrompt | InvalidRow]:
        """The prefetched results of the first of `rows`, as many as there are; forgets all."""
        if self._ahead is None:
            return []
        (prefetched, work), self._ahead = self._ahead, None
        results = work.result()
        pairs = enumerate(zip(rows, prefetched, strict=False))
        return results[: next((number for number, (row, other) in pairs if row != other), len(rows))]

    def _make(self, rows: Sequence[int]) -> list[Prompt | OverlongPrompt | InvalidRow]:
        results = self._prompt_tokenizer.make(self._rows.read(rows), [self.where(row) for row in rows])
        if self.form.teachers is not None:
            results = [self._with_teacher(row, result) for row, result in zip(rows, results, strict=True)]
        return results

    def _with_teacher(
        self, row: int, result: Prompt | OverlongPrompt | InvalidRow
    ) -> Prompt | OverlongPrompt | InvalidRow:
        """The prompt with its teacher's name in the metadata, or why it has none."""
        choice = self.form.teachers
        if choice is None or not isinstance(result, Prompt):
            return result
        file, _, _ = self.where(row).rpartition(":")
        try:
            name = choice.of(result.metadata, file)
        except ValueError as error:
            return InvalidRow(str(error))
        return dataclasses.replace(result, metadata={**result.metadata, choice.key: name})

    def count_usable(self) -> int:
        """Number of prompts within the limit; tokenizes all rows, a few minutes for a million."""
        usable = 0
        for start in range(0, len(self), BATCH_ROWS):
            prompts = self.prompts(range(start, min(start + BATCH_ROWS, len(self))))
            usable += sum(isinstance(prompt, Prompt) for prompt in prompts)
        return usable

    def restore_bad(self, bad: dict[int, str]) -> None:
        """Adds rows that an earlier run found bad."""
        self._add_bad_rows(bad)

    def _read_all(self) -> str:
        """Parses every row and checks its columns; returns the fingerprint. Runs in a thread."""
        digest = hashlib.blake2b(digest_size=16)
        bad, row = {}, 0
        for block in self._rows.blocks(digest):
            for value in block:
                fault = validate_row(value, self.form)
                if fault is not None:
                    bad[row] = fault
                row += 1
        self._add_bad_rows(bad)
        return digest.hexdigest()

    def _add_bad_rows(self, found: dict[int, str]) -> None:
        with self._lock:  # called from the checking thread and from the rollout's thread
            new = sorted(row for row in found if row not in self._bad)
            self._bad.update((row, found[row]) for row in new)
            bad = sorted(self._bad)
        if len(bad) > self._max_bad:
            named = [f"{self._rows.where(row)}: {self._bad[row]}" for row in bad]
            fix = "fix or remove them, or raise --max-bad-rows to skip that many"
            raise bad_rows_error(self.source, named, self._max_bad, fix)
        for row in new:
            where = self._rows.where(row)
            logger.warning("skipping a bad row (at most %d may be bad): %s: %s", self._max_bad, where, found[row])
