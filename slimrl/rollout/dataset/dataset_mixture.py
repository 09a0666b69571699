"""The prompts of `--prompt-data`: one set, or a mixture that samples each prompt's set by its probability.

Which set the n-th prompt comes from depends only on `--rollout-seed` and n. Each set keeps its own epochs: every usable
prompt once per epoch, resumable. The order of an epoch is `random.Random(seed + epoch).shuffle` over the row numbers
for the first set; each further set has its own seed.
"""

from __future__ import annotations

import logging
import random
from array import array
from typing import Any

from slimrl.arguments import Arguments
from slimrl.arguments.eval_datasets import training_prompt_format
from slimrl.data.dataset_spec import DataMix
from slimrl.rollout.dataset.prompt_dataset import OverlongPrompt, Prompt, PromptDataset

logger = logging.getLogger(__name__)


class EpochSampler:
    """An endless sequence of one set's prompts. `number` is the set's place in the mix, from 0."""

    def __init__(self, rows: PromptDataset, *, shuffle: bool, seed: int, number: int) -> None:
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

        Raises InvalidRowsError, and ValueError where a whole epoch has no usable prompt, or one is too long and
        refused.
        """
        drawn: list[Prompt] = []
        while len(drawn) < count:
            rows = self._order[self._position : self._position + count - len(drawn)]
            for row, made in zip(rows, self.rows.prompts(rows), strict=True):
                if isinstance(made, Prompt):
                    drawn.append(made)
                elif isinstance(made, OverlongPrompt):
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

    def _count_too_long(self, row: int, made: OverlongPrompt) -> None:
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


class DatasetMixture:
    """An endless sequence of prompts."""

    def __init__(self, args: Arguments, tokenizer: Any) -> None:
        mix = DataMix.parse(args.prompt_data or ())
        # without probabilities several paths make one set
        groups = [mix.paths] if mix.probabilities is None else [(path,) for path in mix.paths]
        self._probabilities = mix.probabilities or (1.0,)
        self._shuffle: bool = args.rollout_shuffle
        self._seed: int = args.rollout_seed
        form = training_prompt_format(args)
        rows = [PromptDataset(paths, form, tokenizer, args.max_bad_rows) for paths in groups]
        self._sets = [
            EpochSampler(part, shuffle=self._shuffle, seed=self._seed, number=number)
            for number, part in enumerate(rows)
        ]
        for part in rows:
            part.check()  # after the orders are made, so that the two do not take turns
        self._drawn = 0
        # --num-epoch alone gives the run its length, which must not change while prompts are found too long
        may_lose_rows = args.rollout_max_prompt_len is not None or args.max_bad_rows > 0
        exact = args.num_rollout is None and may_lose_rows
        self._length = sum(part.count_usable() if exact else len(part) for part in rows)

    def __len__(self) -> int:
        """Number of prompts in one epoch, those included that are not yet known to be bad or too long.

        Where the run's length is given by `--num-epoch` alone, exactly the usable ones.
        """
        return self._length

    @property
    def epoch(self) -> int:
        """The epoch of the next prompt, from 0; of several sets, of the one that is least far."""
        return min(order.epoch for order in self._sets)

    @property
    def too_long(self) -> int:
        """Number of prompts left out by `--rollout-max-prompt-len` so far in this epoch."""
        return sum(order.too_long for order in self._sets)

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts. Raises InvalidRowsError, and ValueError where a set has no usable prompt."""
        choices = [self._choice(self._drawn + offset) for offset in range(count)]
        drawn = {number: iter(order.draw(choices.count(number))) for number, order in enumerate(self._sets)}
        self._drawn += count
        return [next(drawn[number]) for number in choices]

    def state_dict(self) -> dict[str, Any]:
        """The position as plain JSON data."""
        return {
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drawn": self._drawn,
            "probabilities": list(self._probabilities),
            "sets": [order.state_dict() for order in self._sets],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken. Raises ValueError where it was taken over other data or another order."""
        probabilities = list(self._probabilities)
        if state["probabilities"] != probabilities:
            sources = " ".join(saved["source"] for saved in state["sets"])
            raise ValueError(
                f"--prompt-data has the probabilities {probabilities} and the checkpoint's, {sources}, had"
                f" {state['probabilities']}: prompts would be repeated and left out; give it as it was"
            )
        ordered_by_seed = self._shuffle or len(self._sets) > 1
        for flag, saved, given, matters in (
            ("--rollout-shuffle", state["shuffle"], self._shuffle, True),
            ("--rollout-seed", state["seed"], self._seed, ordered_by_seed),
        ):
            if saved != given and matters:
                raise ValueError(
                    f"{flag} is {given} and the checkpoint's epoch was ordered with {saved}: prompts would be"
                    f" repeated and left out; give {flag} as it was"
                )
        for order, saved in zip(self._sets, state["sets"], strict=True):
            order.load_state_dict(saved)
        self._drawn = state["drawn"]

    def _choice(self, draw: int) -> int:
        """The set of the draw with this number."""
        if len(self._sets) == 1:
            return 0
        number = random.Random(f"{self._seed}/{draw}").random()
        for choice, probability in enumerate(self._probabilities):
            number -= probability
            if number < 0:
                return choice
        return len(self._probabilities) - 1  # the probabilities may sum to a little less than 1
