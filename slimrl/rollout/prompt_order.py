"""The order in which one set's prompts are drawn: epoch after epoch, each usable prompt once in each, resumable.

The order of an epoch is `random.Random(seed + epoch).shuffle` over the row numbers, for the first set; a further set
of a mix has its own. Called by the data source, once per set of `--prompt-data`.
"""

from __future__ import annotations

import logging
import random
from array import array
from typing import Any

from slimrl.rollout.prompt_rows import PromptRows
from slimrl.rollout.prompts import Prompt, TooLong

logger = logging.getLogger(__name__)


class PromptOrder:
    """An endless sequence of one set's prompts. `number` is the set's place in the mix, from 0."""

    def __init__(self, rows: PromptRows, *, shuffle: bool, seed: int, number: int) -> None:
        self.rows = rows
        self.epoch = 0
        self.too_long = 0  # left out so far in this epoch
        self._shuffle = shuffle
        self._seed = seed
        self._number = number
        self._position = 0  # of the next row in this epoch's order
        self._idle = 0  # rows since the last usable one
        self._order = self._epoch_order()

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts; rows that are bad or too long are passed over and counted.

        Raises BadRowsError, and ValueError where a whole epoch has no usable prompt, or one is too long and refused.
        """
        drawn: list[Prompt] = []
        while len(drawn) < count:
            rows = self._order[self._position : self._position + count - len(drawn)]
            for row, made in zip(rows, self.rows.prompts(rows), strict=True):
                if isinstance(made, Prompt):
                    drawn.append(made)
                elif isinstance(made, TooLong):
                    self._count_too_long(row, made)
                self._idle = 0 if isinstance(made, Prompt) else self._idle + 1
                if self._idle == len(self.rows):
                    raise self._nothing_usable()
            self._position += len(rows)
            if self._position == len(self.rows):
                self._end_epoch()
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """The position and what the set is, as plain JSON data. Waits until every row has been checked."""
        form = self.rows.form
        return {
            "source": self.rows.source,
            "num_rows": len(self.rows),
            "fingerprint": self.rows.fingerprint,
            "columns": {"--input-key": form.input_key, "--label-key": form.label_key},
            "epoch": self.epoch,
            "position": self._position,
            "idle": self._idle,
            "too_long": self.too_long,
            "bad_rows": [[row, reason] for row, reason in sorted(self.rows.bad_rows.items())],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken. Raises ValueError where that was over other rows or columns."""
        rows = self.rows
        if state["num_rows"] != len(rows) or state["fingerprint"] != rows.fingerprint:
            raise ValueError(
                f"--prompt-data {rows.source} ({len(rows)} rows) is not the data set of the checkpoint,"
                f" {state['source']} ({state['num_rows']} rows): the rows differ; give the same data again, put a file"
                " that was changed back as it was, or begin a new run"
            )
        given = {"--input-key": rows.form.input_key, "--label-key": rows.form.label_key}
        for flag, saved in state["columns"].items():
            if given[flag] != saved:
                raise ValueError(
                    f"{flag} is {given[flag]} and was {saved} when the checkpoint was made: give it as it was"
                )
        rows.restore_bad({row: reason for row, reason in state["bad_rows"]})
        self.epoch, self._position, self._idle = state["epoch"], state["position"], state["idle"]
        self.too_long = state["too_long"]
        self._order = self._epoch_order()

    def _count_too_long(self, row: int, made: TooLong) -> None:
        if self.rows.form.refuse_too_long:
            raise made.refusal(self.rows.where(row), self.rows.form)
        if self.too_long == 0:
            limit = self.rows.form.max_prompt_len
            where = self.rows.where(row)
            logger.warning("leaving out prompts longer than %d tokens: %s has %d", limit, where, made.num_tokens)
        self.too_long += 1

    def _nothing_usable(self) -> ValueError:
        count, bad = len(self.rows), len(self.rows.bad_rows)
        return ValueError(
            f"data set {self.rows.source} has no prompt to train on: {count - bad} of {count} are longer than"
            f" {self.rows.form.max_prompt_len} tokens (--rollout-max-prompt-len, or an engine's context) and {bad} are"
            " bad rows: raise the limit or give other data"
        )

    def _end_epoch(self) -> None:
        if self.too_long:
            limit, source = self.rows.form.max_prompt_len, self.rows.source
            logger.warning(
                "%s: epoch %d left out %d of %d prompts, longer than %d tokens",
                *(source, self.epoch, self.too_long, len(self.rows), limit),
            )
        self.epoch += 1
        self.too_long = 0
        self._position = 0
        self._order = self._epoch_order()

    def _epoch_order(self) -> array[int] | range:
        if not self._shuffle:
            return range(len(self.rows))
        order = array("I", range(len(self.rows)))
        # sets of one mix must not run through the same permutation side by side
        seed = self._seed + self.epoch if self._number == 0 else f"{self._seed}/{self._number}/{self.epoch}"
        random.Random(seed).shuffle(order)
        return order
