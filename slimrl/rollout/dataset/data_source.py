"""The built-in data source: an infinite, exactly resumable sequence of sample groups, and a buffer of waiting groups.

Each prompt is sampled once per epoch of its set. A restored state gives the same next groups. The rollout manager opens
the data source of a run with `open_data_source`: this one, or the custom class of `--data-source-path`, whose groups
are checked and completed (tokens, indices) and whose position is part of the checkpoint.

The buffer has groups for a later rollout: unfinished ones, and the surplus of finished ones. They are sampled before
new prompts and saved with the position. A group leaves the buffer exactly once, whatever `--buffer-filter-path` does.

`--load-debug-rollout-data` and `--load-forge-rollout-data` replay the groups of a dump; the data source advances as if
it had produced them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from slimrl.arguments import Arguments
from slimrl.arguments.flags.data import DataArguments
from slimrl.arguments.namespace import PromptArguments
from slimrl.data.sample import Sample
from slimrl.hooks import BufferFilter, accepts_keyword, named, naming, resolve_data_source
from slimrl.hooks.contracts import RunArguments
from slimrl.observability import rollout_dump
from slimrl.rollout.dataset.dataset_mixture import DatasetMixture

logger = logging.getLogger(__name__)


class GroupBuffer:
    """An ordered list of waiting groups, the longest-waiting first."""

    def __init__(self, filter_path: str | None = None, hook_args: RunArguments | None = None) -> None:
        """`filter_path` is --buffer-filter-path, `hook_args` the arguments of its function."""
        self._hook_args = hook_args
        self._path = filter_path
        self._choose: Callable[..., list[list[Sample]]] = pop_first
        if filter_path is not None:
            self._choose = named("--buffer-filter-path", filter_path, BufferFilter)
        self._groups: list[list[Sample]] = []

    def __len__(self) -> int:
        """Number of waiting groups."""
        return len(self._groups)

    def put(self, groups: list[list[Sample]]) -> None:
        """Appends groups."""
        self._groups.extend(groups)

    def take(self, num_groups: int, rollout_id: int | None) -> list[list[Sample]]:
        """Removes and returns at most `num_groups` groups, chosen by the buffer filter.

        The filter may discard groups by removing them without returning them, which is logged. Raises ValueError if it
        returns more than `num_groups` groups, or a group that it did not remove or that was not in the buffer.
        """
        if not self._groups or num_groups == 0:
            return []
        waiting = list(self._groups)  # keeps the groups alive, so that no new list reuses an id
        before = {id(group) for group in waiting}
        chosen = self._choose(self._hook_args, rollout_id, self._groups, num_groups)
        taken = [id(group) for group in chosen]
        left = {id(group) for group in self._groups}
        if len(taken) > num_groups or len(set(taken)) < len(taken) or not set(taken) <= before - left:
            raise ValueError(
                f"--buffer-filter-path {self._path} returned {len(taken)} groups when asked for {num_groups}: it must"
                " return at most that many, each once, and remove them from its argument `buffer`"
            )
        if removed := len(before - left) - len(taken):
            logger.warning("--buffer-filter-path %s removed %d groups permanently", self._path, removed)
        return list(chosen)

    def state_dict(self) -> list[list[dict[str, Any]]]:
        """The waiting groups as plain data."""
        return [[sample.to_dict() for sample in group] for group in self._groups]

    def load_state_dict(self, state: list[list[dict[str, Any]]]) -> None:
        """The inverse of `state_dict`; replaces the buffer's content."""
        self._groups = [[Sample.from_dict(data) for data in group] for group in state]


_STATE_VERSION = 2


class RolloutDataSource:
    """Groups of samples without a last one; `group_index` and `index` run over the whole training.

    Custom classes may inherit it (`--data-source-path`), so its constructor takes the same arguments as theirs. With
    `--disable-rollout-global-dataset` there are no prompts: samples are blank, and custom functions fill them.
    """

    def __init__(self, args: Arguments, tokenizer: Any) -> None:
        self._n_samples_per_prompt: int = args.n_samples_per_prompt
        # a run that only evaluates samples no prompts
        self._prompts = DatasetMixture(args, tokenizer) if args.rollout_global_dataset and not args.eval_only else None
        self._next_group_index = 0
        self._next_index = 0
        self._rollout_id: int | None = None
        self._buffer = GroupBuffer(args.buffer_filter_path, args)

    def __len__(self) -> int:
        """Number of prompts in one epoch (see `DatasetMixture`); 0 without prompts."""
        return 0 if self._prompts is None else len(self._prompts)

    @property
    def epoch(self) -> int:
        """The epoch of the next prompt, from 0; with several sets, the lowest of their epochs."""
        return 0 if self._prompts is None else self._prompts.epoch

    @property
    def too_long(self) -> int:
        """Number of prompts skipped by `--rollout-max-prompt-len` so far in this epoch."""
        return 0 if self._prompts is None else self._prompts.too_long

    def begin_rollout(self, rollout_id: int) -> None:
        """Sets the rollout for which the next groups are sampled; it is passed to `--buffer-filter-path`."""
        self._rollout_id = rollout_id

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """The next `num_groups` groups of `--n-samples-per-prompt` samples: buffered ones first, oldest first.

        Raises InvalidRowsError if more than `--max-bad-rows` rows are bad.
        """
        if num_groups < 0:
            raise ValueError(f"get_samples was asked for {num_groups} groups: ask for zero or more")
        groups = self._buffer.take(num_groups, self._rollout_id)
        return groups + self._new_groups(num_groups - len(groups))

    def prefetch(self, num_groups: int) -> None:
        """Starts to read and tokenize the prompts of the next `num_groups` groups in a thread; changes no state.

        The rollout loop calls it at the end of a rollout, so that this runs during training and the weight update.
        """
        missing = num_groups - len(self._buffer)
        if self._prompts is not None and missing > 0:
            self._prompts.prefetch(missing)

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Adds groups to the buffer; they are sampled before any new prompt."""
        self._buffer.put(groups)

    def state_dict(self) -> dict[str, Any]:
        """The position and the buffer as plain JSON data. Waits until every row has been checked."""
        return {
            "version": _STATE_VERSION,
            "prompts": None if self._prompts is None else self._prompts.state_dict(),
            "next_group_index": self._next_group_index,
            "next_index": self._next_index,
            "returned": self._buffer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state`. Raises ValueError if it was saved with other data or another order."""
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"the saved data position has version {state.get('version')!r}, this slimrl reads {_STATE_VERSION}:"
                " resume with the slimrl that saved it"
            )
        if (state["prompts"] is None) != (self._prompts is None):
            raise ValueError(
                "the checkpoint was saved with --prompt-data and this run has --disable-rollout-global-dataset, or vice"
                " versa: use the flags that it was saved with"
            )
        if self._prompts is not None:
            self._prompts.load_state_dict(state["prompts"])
        self._next_group_index = state["next_group_index"]
        self._next_index = state["next_index"]
        self._buffer.load_state_dict(state["returned"])

    def _new_groups(self, count: int) -> list[list[Sample]]:
        prompts = [None] * count if self._prompts is None else self._prompts.draw(count)
        groups = []
        for prompt in prompts:
            indices = range(self._next_index, self._next_index + self._n_samples_per_prompt)
            if prompt is None:
                group = [Sample(prompt="", group_index=self._next_group_index, index=index) for index in indices]
            else:
                group = [prompt.sample(group_index=self._next_group_index, index=index) for index in indices]
            groups.append(group)
            self._next_group_index += 1
            self._next_index += self._n_samples_per_prompt
        return groups


# slime's name; slime also has a class without the buffer
RolloutDataSourceWithBuffer = RolloutDataSource

# slime has `pop_first` in this module
__all__ = ["RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"]


def pop_first(
    args: RunArguments, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
) -> list[list[Sample]]:
    """Removes the longest-waiting groups from the buffer and returns them, at most `num_samples`."""
    chosen = buffer[:num_samples]
    del buffer[:num_samples]
    return chosen


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
