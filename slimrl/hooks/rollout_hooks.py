"""Contracts of the generation hooks, which the rollout manager calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from slimrl.hooks.base import Hook, RunArguments

if TYPE_CHECKING:
    from slimrl.data.sample import Sample


class DataSource(Protocol):
    """The prompts of a rollout function; the built-in one is in `slimrl.rollout.dataset.data_source`."""

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """The next `num_groups` groups, each of `--n-samples-per-prompt` samples of one prompt."""
        ...

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Returns groups to the source, which samples them again later."""
        ...


class CustomDataSource(DataSource, Protocol):
    """`--data-source-path`: a data source class. `__init__` also receives `tokenizer` if it accepts it.

    Checkpoints keep its position by one of two pairs: `state_dict()` and `load_state_dict(state)`, of plain data, or
    `save(rollout_id)` and `load(rollout_id)`, which keep their own files under `--save`. The first is called once,
    right after the prompts of a rollout with a checkpoint were sampled, the second when a run resumes from that
    checkpoint. If the class has `begin_rollout(rollout_id)`, it is called before prompts of a rollout are sampled.
    """

    def __init__(self, args: RunArguments) -> None: ...

    def __len__(self) -> int:
        """Number of prompts in one epoch, for `--num-epoch`."""
        ...


class CustomReward(Hook, Protocol):
    """`--custom-rm-path`: scores one response."""

    async def __call__(self, args: RunArguments, sample: Sample) -> float | dict[str, Any]:
        """The reward; if it is a dict, `--reward-key` names the entry to train on."""
        ...


class GroupReward(Hook, Protocol):
    """`--custom-rm-path` with `--group-rm`: scores all responses to one prompt; in evaluations one at a time."""

    async def __call__(self, args: RunArguments, samples: list[Sample]) -> list[float] | list[dict[str, Any]]:
        """One reward per sample, in the samples' order."""
        ...


class CustomGenerate(Hook, Protocol):
    """`--custom-generate-function-path`: generates one sample.

    `evaluation` is True for samples of an evaluation, `engine` is the client of the engines
    (`slimrl.engines.protocol.EngineClient`) and `tokenizer` the run's tokenizer. With a vision-language model
    its requests have the sample's images, and `image_processor` is that of multi_turn_generate; else it is None. The
    engine's finish reason "abort" means that the rollout is full: return the sample with status ABORTED. With
    `--partial-rollout` the function is called with it again, to continue it.
    """

    offered: ClassVar[tuple[str, ...]] = ("evaluation", "engine", "tokenizer", "image_processor")

    async def __call__(
        self, args: RunArguments, sample: Sample, sampling_params: dict[str, Any]
    ) -> Sample | list[Sample]:
        """The sample with its tokens, response, log-probabilities and status filled in."""
        ...


class SampleHook(Hook, Protocol):
    """`--rollout-sample-hook-path`: called once with each finished sample, before its reward."""

    offered: ClassVar[tuple[str, ...]] = ("rollout_id", "evaluation")
    either: ClassVar[bool] = True

    def __call__(self, args: RunArguments, sample: Sample) -> Any:
        """The sample to use instead, or None to keep the given one."""
        ...


class RolloutFunction(Hook, Protocol):
    """`--rollout-function-path`, `--eval-function-path`: runs a whole rollout, or a whole evaluation.

    `generator` gives access to the built-in rollout (see `slimrl.rollout.rollout_function`).
    """

    offered: ClassVar[tuple[str, ...]] = ("generator", "tokenizer")

    def __call__(self, args: RunArguments, rollout_id: int, data_source: DataSource, *, evaluation: bool) -> Any:
        """The groups of a rollout with its metrics, or with `evaluation` the results by data set."""
        ...


class DynamicSamplingFilter(Hook, Protocol):
    """`--dynamic-sampling-filter-path`: keeps or drops one finished group."""

    def __call__(self, args: RunArguments, samples: list[Sample]) -> Any:
        """True (or an object with `keep` True and a `reason`) to keep the group."""
        ...


class BufferFilter(Hook, Protocol):
    """`--buffer-filter-path`: chooses which waiting groups are submitted next."""

    def __call__(
        self, args: RunArguments, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
    ) -> list[list[Sample]]:
        """At most `num_samples` groups, which the function removes from `buffer`."""
        ...


class SampleFilter(Hook, Protocol):
    """`--rollout-sample-filter-path`: excludes single samples from training by setting their `remove_sample`."""

    def __call__(self, args: RunArguments, groups: list[list[Sample]]) -> None:
        """Called once per rollout with the groups that are trained on."""
        ...


class AllSamplesProcess(Hook, Protocol):
    """`--rollout-all-samples-process-path`: called with every scored group of a rollout, including dropped ones."""

    def __call__(self, args: RunArguments, all_groups: list[list[Sample]], data_source: DataSource) -> None:
        """Called once per rollout."""
        ...


class RolloutLog(Hook, Protocol):
    """`--custom-rollout-log-function-path`: reports a rollout."""

    def __call__(
        self,
        rollout_id: int,
        args: RunArguments,
        samples: list[Sample],
        extra_metrics: dict[str, float] | None,
        rollout_time: float,
    ) -> Any:
        """True to suppress slimrl's own metrics of the rollout, except the mean reward.

        `extra_metrics` are those that the rollout returned; numbers that the function adds are reported too.
        """
        ...


class EvalRolloutLog(Hook, Protocol):
    """`--custom-eval-rollout-log-function-path`: reports an evaluation."""

    def __call__(
        self,
        rollout_id: int,
        args: RunArguments,
        data: dict[str, dict[str, Any]],
        extra_metrics: dict[str, float] | None,
    ) -> Any:
        """True to suppress slimrl's own metrics, except each set's mean reward.

        `data` has `rewards`, `truncated` and `samples` by name of the set; the function may add to `extra_metrics`.
        """
        ...


class RewardPostProcess(Hook, Protocol):
    """`--custom-reward-post-process-path`: computes the training rewards of a rollout."""

    def __call__(self, args: RunArguments, samples: list[Sample]) -> tuple[list[float], list[float]]:
        """Raw rewards and training rewards, one of each per sample, in the samples' order."""
        ...


class ConvertSamples(Hook, Protocol):
    """`--custom-convert-samples-to-train-data-path`: makes the training data of a rollout."""

    def __call__(self, args: RunArguments, samples: list[Sample]) -> dict[str, Any]:
        """Columns by name, one entry per sample (see `slimrl.rollout.convert_samples`)."""
        ...
