"""The prompts of one training set, made from its rows as they are drawn; bad rows are named, counted and limited.

Promises that a set is open in a fraction of a second per million rows, and that every row is read once and checked
before the first training step: a thread does so, and `fingerprint` waits for it. Called by the data source.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Sequence
from typing import Any

from slimrl.data.bad_row import BadRow, bad_rows_error
from slimrl.rollout.prompts import (
    BATCH_ROWS,
    Prompt,
    PromptFormat,
    PromptMaker,
    TooLong,
    open_prompt_rows,
    row_fault,
)
from slimrl.rollout.worker_thread import WorkerThread

logger = logging.getLogger(__name__)

_CHECKED_AT_ONCE = 20_000  # rows; takes less than a tenth of a second


class PromptRows:
    """Prompts by row number. `max_bad` rows may be bad: they are left out and logged."""

    def __init__(self, data_paths: Sequence[str], form: PromptFormat, tokenizer: Any, max_bad: int) -> None:
        self.form = form
        self._rows = open_prompt_rows(data_paths, form)
        self._maker = PromptMaker(form, tokenizer)
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
        """Reads every row in a thread, which few rows are waited for. Raises BadRowsError where too many are bad."""
        self._check = WorkerThread(self._read_all)
        if len(self._rows) <= _CHECKED_AT_ONCE:
            self._check.result()

    @property
    def fingerprint(self) -> str:
        """Of the bytes of all rows, wherever they lie; waits for `check`, which must be under way."""
        if self._check is None:
            raise RuntimeError(f"the rows of {self.source} are not being checked: call check() first")
        return self._check.result()

    def prompts(self, rows: Sequence[int]) -> list[Prompt | TooLong | None]:
        """One result for each of these rows; None is a bad row. Raises BadRowsError where that is one too many."""
        if self._check is not None:
            self._check.raise_if_failed()
        made = self._maker.make(self._rows.read(rows))
        for row, result in zip(rows, made, strict=True):
            if isinstance(result, BadRow):
                self._note_bad({row: result.reason})
        return [None if isinstance(result, BadRow) else result for result in made]

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
                fault = row_fault(value, self.form)
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
            mend = "mend or remove them, or raise --max-bad-rows to leave that many out"
            raise bad_rows_error(self.source, named, self._max_bad, mend)
        for row in new:
            where = self._rows.where(row)
            logger.warning("left out a bad row (at most %d may be bad): %s: %s", self._max_bad, where, found[row])
