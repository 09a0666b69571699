"""The prompts of `--prompt-data`: one set, or a mixture that samples each prompt's set by its probability.

The set of the n-th prompt depends only on `--rollout-seed` and n. Each set has its own epochs: every usable prompt once
per epoch, resumable. The order of an epoch is `random.Random(seed + epoch).shuffle` of the row numbers for the first
set; each further set has its own seed.
"""

from __future__ import annotations

import logging
import random
from array import array
from typing import Any

from slimrl.arguments.eval_datasets import training_prompt_format
from slimrl.arguments.namespace import PromptArguments
from slimrl.data.prompt_format import DataMix, PromptFormat
from slimrl.rollout.dataset.prompt_dataset import OverlongPrompt, Prompt, PromptDataset

logger = logging.getLogger(__name__)


def _columns(form: PromptFormat) -> dict[str, str | None]:
    """The columns of prompt and label, or of pairs, by flag; a resumed run reads the same ones."""
    answers = {} if form.pair is None else {flag: column for column, flag in form.pair.flags.items()}
    return {"--input-key": form.input_key, "--label-key": form.label_key, **answers}


class EpochSampler:
    """An infinite sequence of one set's prompts. `number` is the set's position in the mix, from 0."""

    def __init__(self, rows: PromptDataset, *, shuffle: bool, seed: int, number: int) -> None:
        self.rows = rows
        self.epoch = 0
        self.too_long = 0  # skipped so far in this epoch
        self._shuffle = shuffle
        self._seed = seed
        self._number = number
        self._position = 0  # of the next row in this epoch's order
        self._idle = 0  # rows since the last usable one
        self._order = self._epoch_order()

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts; rows that are bad or too long are skipped and counted.

        Raises InvalidRowsError, and ValueError if a whole epoch has no usable prompt, or if a prompt is too long with
        --refuse-long-prompts.
        """
        prompts: list[Prompt] = []
        while len(prompts) < count:
            rows = self._order[self._position : self._position + count - len(prompts)]
            for row, prompt in zip(rows, self.rows.prompts(rows), strict=True):
                if isinstance(prompt, Prompt):
                    prompts.append(prompt)
                elif isinstance(prompt, OverlongPrompt):
                    self._count_too_long(row, prompt)
                self._idle = 0 if isinstance(prompt, Prompt) else self._idle + 1
                if self._idle == len(self.rows):
                    raise self._nothing_usable()
            self._position += len(rows)
            if self._position == len(self.rows):
                self._end_epoch()
        return prompts

    def prefetch(self, count: int) -> None:
        """Starts to tokenize what `draw(count)` would return, as far as this epoch goes; changes no state."""
        if rows := self._order[self._position : self._position + count]:
            self.rows.prefetch(rows)

    def state_dict(self) -> dict[str, Any]:
        """The position and the set's identity as plain JSON data. Waits until every row has been checked."""
        form = self.rows.form
        return {
            "source": self.rows.source,
            "num_rows": len(self.rows),
            "fingerprint": self.rows.fingerprint,
            "columns": _columns(form),
            "epoch": self.epoch,
            "position": self._position,
            "idle": self._idle,
            "too_long": self.too_long,
            "bad_rows": [[row, reason] for row, reason in sorted(self.rows.bad_rows.items())],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state`. Raises ValueError if it was saved with other rows or columns."""
        rows = self.rows
        if state["num_rows"] != len(rows) or state["fingerprint"] != rows.fingerprint:
            raise ValueError(
                f"--prompt-data {rows.source} ({len(rows)} rows) is not the dataset of the checkpoint,"
                f" {state['source']} ({state['num_rows']} rows): the rows differ; use the same data, restore a changed"
                " file, or start a new run"
            )
        given = _columns(rows.form)
        for flag, saved in state["columns"].items():
            if given.get(flag) != saved:
                raise ValueError(
                    f"{flag} is {given.get(flag)} but was {saved} when the checkpoint was saved: use the saved value"
                )
        rows.restore_bad({row: reason for row, reason in state["bad_rows"]})
        self.epoch, self._position, self._idle = state["epoch"], state["position"], state["idle"]
        self.too_long = state["too_long"]
        self._order = self._epoch_order()

    def _count_too_long(self, row: int, prompt: OverlongPrompt) -> None:
        if self.rows.form.refuse_too_long:
            raise prompt.error(self.rows.where(row), self.rows.form)
        if self.too_long == 0:
            limit = self.rows.form.max_prompt_len
            where = self.rows.where(row)
            logger.warning("skipping prompts longer than %d tokens: %s has %d", limit, where, prompt.num_tokens)
        self.too_long += 1

    def _nothing_usable(self) -> ValueError:
        count, bad = len(self.rows), len(self.rows.bad_rows)
        return ValueError(
            f"dataset {self.rows.source} has no prompt to train on: {count - bad} of {count} are longer than"
            f" {self.rows.form.max_prompt_len} tokens (--rollout-max-prompt-len, or an engine's context) and {bad} are"
            " bad rows: raise the limit or use other data"
        )

    def _end_epoch(self) -> None:
        if self.too_long:
            limit, source = self.rows.form.max_prompt_len, self.rows.source
            logger.warning(
                "%s: epoch %d skipped %d of %d prompts, longer than %d tokens",
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
        # the sets of a mix must not have the same permutation
        seed = self._seed + self.epoch if self._number == 0 else f"{self._seed}/{self._number}/{self.epoch}"
        random.Random(seed).shuffle(order)
        return order


class DatasetMixture:
    """An infinite sequence of prompts."""

    def __init__(self, flags: PromptArguments, tokenizer: Any) -> None:
        mix = DataMix.parse(flags.prompt_data or ())
        # without probabilities, all paths together are one set
        groups = [mix.paths] if mix.probabilities is None else [(path,) for path in mix.paths]
        self._probabilities = mix.probabilities or (1.0,)
        self._shuffle: bool = flags.rollout_shuffle
        self._seed: int = flags.rollout_seed
        form = training_prompt_format(flags)
        rows = [PromptDataset(paths, form, tokenizer, flags.max_bad_rows) for paths in groups]
        self._sets = [
            EpochSampler(part, shuffle=self._shuffle, seed=self._seed, number=number)
            for number, part in enumerate(rows)
        ]
        for part in rows:
            part.check()  # its thread starts after the shuffling, so that they do not compete for the GIL
        self._sampled = 0
        # with --num-epoch alone, the run's length must not change when prompts turn out too long
        may_lose_rows = flags.rollout_max_prompt_len is not None or flags.max_bad_rows > 0
        exact = flags.num_rollout is None and may_lose_rows
        self._length = sum(part.count_usable() if exact else len(part) for part in rows)

    def __len__(self) -> int:
        """Number of prompts in one epoch, including rows not yet found bad or too long.

        If `--num-epoch` alone determines the run's length, exactly the usable prompts.
        """
        return self._length

    @property
    def epoch(self) -> int:
        """The epoch of the next prompt, from 0; with several sets, the lowest of their epochs."""
        return min(order.epoch for order in self._sets)

    @property
    def too_long(self) -> int:
        """Number of prompts skipped by `--rollout-max-prompt-len` so far in this epoch."""
        return sum(order.too_long for order in self._sets)

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts. Raises InvalidRowsError, and ValueError if a set has no usable prompt."""
        choices = self._choices(count)
        prompts = {number: iter(order.draw(choices.count(number))) for number, order in enumerate(self._sets)}
        self._sampled += count
        return [next(prompts[number]) for number in choices]

    def prefetch(self, count: int) -> None:
        """Starts to tokenize the next `count` prompts; changes no state."""
        choices = self._choices(count)
        for number, order in enumerate(self._sets):
            order.prefetch(choices.count(number))

    def state_dict(self) -> dict[str, Any]:
        """The position as plain JSON data."""
        return {
            "shuffle": self._shuffle,
            "seed": self._seed,
            "sampled": self._sampled,
            "probabilities": list(self._probabilities),
            "sets": [order.state_dict() for order in self._sets],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state`. Raises ValueError if it was saved with other data or another order."""
        probabilities = list(self._probabilities)
        if state["probabilities"] != probabilities:
            sources = " ".join(saved["source"] for saved in state["sets"])
            raise ValueError(
                f"--prompt-data has the probabilities {probabilities} but the checkpoint's, {sources}, had"
                f" {state['probabilities']}: prompts would be repeated and skipped; use the checkpoint's --prompt-data"
            )
        ordered_by_seed = self._shuffle or len(self._sets) > 1
        for flag, saved, given, matters in (
            ("--rollout-shuffle", state["shuffle"], self._shuffle, True),
            ("--rollout-seed", state["seed"], self._seed, ordered_by_seed),
        ):
            if saved != given and matters:
                raise ValueError(
                    f"{flag} is {given} but the checkpoint's epoch was ordered with {saved}: prompts would be"
                    f" repeated and skipped; use the checkpoint's {flag}"
                )
        for order, saved in zip(self._sets, state["sets"], strict=True):
            order.load_state_dict(saved)
        self._sampled = state["sampled"] if "sampled" in state else state["drawn"]  # the key until 2026-11-28

    def _choices(self, count: int) -> list[int]:
        """The sets of the next `count` prompts."""
        return [self._choice(self._sampled + offset) for offset in range(count)]

    def _choice(self, index: int) -> int:
        """The set of the prompt with this index."""
        if len(self._sets) == 1:
            return 0
        number = random.Random(f"{self._seed}/{index}").random()
        for choice, probability in enumerate(self._probabilities):
            number -= probability
            if number < 0:
                return choice
        return len(self._probabilities) - 1  # the probabilities may sum to a little less than 1
