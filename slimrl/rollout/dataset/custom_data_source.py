"""Data sources other than the built-in one: a custom class (`--data-source-path`), or recorded rollouts.

The rollout manager opens the data source here. Groups of a custom class are checked and completed (tokens, indices),
and its position is part of the checkpoint.

`--load-debug-rollout-data` and `--load-forge-rollout-data` replay the samples of a dump in their groups; the data
source advances as if it had produced them.
"""

from __future__ import annotations

from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.hooks import accepts_keyword, naming, resolve_data_source
from slimrl.observability import rollout_dump
from slimrl.rollout.dataset.data_source import RolloutDataSource

_FLAG = "--data-source-path"


def open_data_source(args: Arguments, tokenizer: Any) -> RolloutDataSource | CheckedDataSource:
    """The data source of the run."""
    return CheckedDataSource(args, tokenizer) if args.has_own_data_source else RolloutDataSource(args, tokenizer)


class CheckedDataSource:
    """The user's object, with what the rollout loop wants besides; any other attribute is the object's own.

    Raises HookFailedError where the object raises, and ValueError where it hands out what is no group of samples.
    """

    def __init__(self, args: Arguments, tokenizer: Any) -> None:
        self._args = args
        self._tokenizer = tokenizer
        self._rollout_id: int | None = None
        self._next_group_index = 0
        self._next_index = 0
        kind = resolve_data_source(args.data_source_path)
        offered = {"tokenizer": tokenizer} if accepts_keyword(kind, "tokenizer") else {}
        with self._named():
            self._source: Any = kind(args, **offered)
        self._keeps_state = callable(getattr(self._source, "state_dict", None))  # it keeps files otherwise

    def __getattr__(self, name: str) -> Any:
        if name == "_source":  # not made yet: there is nothing to ask
            raise AttributeError(name)
        return getattr(self._source, name)

    def __len__(self) -> int:
        """Number of prompts in one epoch."""
        with self._named():
            return len(self._source)

    def begin_rollout(self, rollout_id: int) -> None:
        """Says for which rollout the next groups are sampled."""
        self._rollout_id = rollout_id
        if hasattr(self._source, "begin_rollout"):
            with self._named():
                self._source.begin_rollout(rollout_id)

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """The next `num_groups` groups, each sample with an index and, where its prompt says them, tokens."""
        with self._named():
            groups = self._source.get_samples(num_groups)
        if not isinstance(groups, list) or len(groups) != num_groups or not all(map(_is_group, groups)):
            count = f"{len(groups)} groups" if isinstance(groups, list) else type(groups).__name__
            raise ValueError(
                f"{_FLAG} {self._args.data_source_path} returned {count} when asked for {num_groups}: return a list of"
                " exactly that many groups, each a list of Sample"
            )
        for group in groups:
            self._number(group)
            for sample in group:
                self._tokenize(sample)
        return groups

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Gives groups back."""
        with self._named():
            self._source.add_samples(groups)

    def state_dict(self) -> dict[str, Any]:
        """Where the object stands, as it says itself or under which rollout it saved that."""
        place: dict[str, Any] = {"indices": [self._next_group_index, self._next_index]}
        with self._named():
            if self._keeps_state:
                return {**place, "state": self._source.state_dict()}
            if self._args.save is not None:
                self._source.save(self._rollout_id)
        return {**place, "saved_after": self._rollout_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the object continue there. Raises ValueError where another data source made the checkpoint."""
        if "indices" not in state or ("state" in state) != self._keeps_state:
            raise ValueError(
                f"the checkpoint was made with another data source than {_FLAG} {self._args.data_source_path}: give"
                " the one it was made with"
            )
        self._next_group_index, self._next_index = state["indices"]
        with self._named():
            if "state" in state:
                self._source.load_state_dict(state["state"])
            else:
                self._source.load(state["saved_after"])

    def _named(self) -> Any:
        return naming(_FLAG, self._args.data_source_path)

    def _number(self, group: list[Sample]) -> None:
        """Running numbers for samples that have none: seeds and the order of a batch depend on them."""
        if any(sample.group_index is None for sample in group):
            for sample in group:
                sample.group_index = self._next_group_index
            self._next_group_index += 1
        for sample in group:
            if sample.index is None:
                sample.index = self._next_index
                self._next_index += 1

    def _tokenize(self, sample: Sample) -> None:
        """Text becomes tokens as it stands; messages by the chat template where `--apply-chat-template` says so."""
        if sample.tokens or not sample.prompt:
            return
        if isinstance(sample.prompt, list) and self._args.apply_chat_template:
            sample.prompt = self._tokenizer.apply_chat_template(
                sample.prompt,
                tools=sample.metadata.get("tools"),
                tokenize=False,
                add_generation_prompt=True,
                **self._args.apply_chat_template_kwargs,
            )
        if isinstance(sample.prompt, str):
            sample.tokens = list(self._tokenizer(sample.prompt, add_special_tokens=False)["input_ids"])


def _is_group(group: Any) -> bool:
    return isinstance(group, list) and bool(group) and all(isinstance(sample, Sample) for sample in group)


def recorded_groups(
    args: Arguments, template: str, rollout_id: int, data_source: RolloutDataSource
) -> list[list[Sample]]:
    """The recorded groups of this rollout, those of `--load-debug-rollout-data-subsample` where it is given.

    Raises FileNotFoundError where the rollout was not recorded, ValueError where its file is something else.
    """
    data_source.begin_rollout(rollout_id)
    data_source.get_samples(args.rollout_batch_size)
    groups: dict[int | None, list[Sample]] = {}
    for sample in rollout_dump.load_rollout(template, rollout_id).samples:
        groups.setdefault(sample.group_index, []).append(sample)
    return _subsample(list(groups.values()), args.load_debug_rollout_data_subsample)


def _subsample(groups: list[list[Sample]], part: float | None) -> list[list[Sample]]:
    """Whole groups: half of those wanted from the front, the others from the end."""
    if part is None:
        return groups
    wanted = max(1, int(len(groups) * part))
    front = wanted // 2
    return groups[:front] + groups[len(groups) - (wanted - front) :]
