"""Data sources other than the built-in one: a custom class (`--data-source-path`), or recorded rollouts.

The rollout manager opens the data source here. Groups of a custom class are checked and completed (tokens, indices),
and its position is part of the checkpoint.

`--load-debug-rollout-data` and `--load-forge-rollout-data` replay the groups of a dump; the data source advances as if
it had produced them.
"""

from __future__ import annotations

from typing import Any

from slimrl.arguments import Arguments
from slimrl.arguments.flags.data import DataArguments
from slimrl.arguments.namespace import PromptArguments
from slimrl.data.sample import Sample
from slimrl.hooks import accepts_keyword, naming, resolve_data_source
from slimrl.hooks.base import RunArguments
from slimrl.observability import rollout_dump
from slimrl.rollout.dataset.data_source import RolloutDataSource

_FLAG = "--data-source-path"


def open_data_source(args: Arguments, tokenizer: Any) -> RolloutDataSource | CheckedDataSource:
    """The data source of the run."""
    if args.has_custom_data_source:
        return CheckedDataSource(args.data_source_path, args, tokenizer, saves=args.save is not None, hook_args=args)
    return RolloutDataSource(args, tokenizer)


class CheckedDataSource:
    """Wraps a custom data source with the checks that the rollout loop needs; delegates all other attributes.

    Raises HookFailedError if the object raises, and ValueError if it does not return groups of samples.
    """

    def __init__(self, path: str, data: DataArguments, tokenizer: Any, *, saves: bool, hook_args: RunArguments) -> None:
        """Creates an object of the class at `path` with `hook_args`; `saves`: whether the run saves checkpoints."""
        self._path = path
        self._data = data
        self._saves = saves
        self._tokenizer = tokenizer
        self._rollout_id: int | None = None
        self._next_group_index = 0
        self._next_index = 0
        kind = resolve_data_source(path)
        offered = {"tokenizer": tokenizer} if accepts_keyword(kind, "tokenizer") else {}
        with self._named():
            self._source: Any = kind(hook_args, **offered)
        self._has_state_dict = callable(getattr(self._source, "state_dict", None))  # else it has save() and load()

    def __getattr__(self, name: str) -> Any:
        if name == "_source":  # not created yet
            raise AttributeError(name)
        return getattr(self._source, name)

    def __len__(self) -> int:
        """Number of prompts in one epoch."""
        with self._named():
            return len(self._source)

    def begin_rollout(self, rollout_id: int) -> None:
        """Sets the rollout for which the next groups are sampled."""
        self._rollout_id = rollout_id
        if hasattr(self._source, "begin_rollout"):
            with self._named():
                self._source.begin_rollout(rollout_id)

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """The next `num_groups` groups, each sample with an index and, if it has a prompt, tokens."""
        with self._named():
            groups = self._source.get_samples(num_groups)
        if not isinstance(groups, list) or len(groups) != num_groups or not all(map(_is_group, groups)):
            count = f"{len(groups)} groups" if isinstance(groups, list) else type(groups).__name__
            raise ValueError(
                f"{_FLAG} {self._path} returned {count} when asked for {num_groups}: return a list of"
                " exactly that many groups, each a list of Sample"
            )
        for group in groups:
            self._number(group)
            for sample in group:
                self._tokenize(sample)
        return groups

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Returns groups to the source."""
        with self._named():
            self._source.add_samples(groups)

    def state_dict(self) -> dict[str, Any]:
        """The object's position: its `state_dict()`, or the rollout under which it saved its files."""
        position: dict[str, Any] = {"indices": [self._next_group_index, self._next_index]}
        with self._named():
            if self._has_state_dict:
                return {**position, "state": self._source.state_dict()}
            if self._saves:
                self._source.save(self._rollout_id)
        return {**position, "saved_after": self._rollout_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the position. Raises ValueError if another data source wrote the checkpoint."""
        if "indices" not in state or ("state" in state) != self._has_state_dict:
            raise ValueError(
                f"the checkpoint was written with another data source than {_FLAG} {self._path}: resume with the data"
                " source that wrote it"
            )
        self._next_group_index, self._next_index = state["indices"]
        with self._named():
            if "state" in state:
                self._source.load_state_dict(state["state"])
            else:
                self._source.load(state["saved_after"])

    def _named(self) -> Any:
        return naming(_FLAG, self._path)

    def _number(self, group: list[Sample]) -> None:
        """Numbers samples without an index: seeds and the order of a batch depend on it."""
        if any(sample.group_index is None for sample in group):
            for sample in group:
                sample.group_index = self._next_group_index
            self._next_group_index += 1
        for sample in group:
            if sample.index is None:
                sample.index = self._next_index
                self._next_index += 1

    def _tokenize(self, sample: Sample) -> None:
        """Tokenizes a text prompt; renders messages first with the chat template if `--apply-chat-template` is set."""
        if sample.tokens or not sample.prompt:
            return
        if isinstance(sample.prompt, list) and self._data.apply_chat_template:
            sample.prompt = self._tokenizer.apply_chat_template(
                sample.prompt,
                tools=sample.metadata.get("tools"),
                tokenize=False,
                add_generation_prompt=True,
                **self._data.apply_chat_template_kwargs,
            )
        if isinstance(sample.prompt, str):
            sample.tokens = list(self._tokenizer(sample.prompt, add_special_tokens=False)["input_ids"])


def _is_group(group: Any) -> bool:
    return isinstance(group, list) and bool(group) and all(isinstance(sample, Sample) for sample in group)


def recorded_groups(
    flags: PromptArguments, template: str, rollout_id: int, data_source: RolloutDataSource
) -> list[list[Sample]]:
    """The recorded groups of this rollout, subsampled by `--load-debug-rollout-data-subsample`.

    Raises FileNotFoundError if the rollout was not recorded, ValueError if its file is not a dump.
    """
    data_source.begin_rollout(rollout_id)
    data_source.get_samples(flags.rollout_batch_size)
    groups: dict[int | None, list[Sample]] = {}
    for sample in rollout_dump.load_rollout(template, rollout_id).samples:
        groups.setdefault(sample.group_index, []).append(sample)
    return _subsample(list(groups.values()), flags.load_debug_rollout_data_subsample)


def _subsample(groups: list[list[Sample]], part: float | None) -> list[list[Sample]]:
    """A fraction of the groups: half of them from the front, the others from the end."""
    if part is None:
        return groups
    count = max(1, int(len(groups) * part))
    front = count // 2
    return groups[:front] + groups[len(groups) - (count - front) :]
