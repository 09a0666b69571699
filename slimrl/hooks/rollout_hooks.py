"""The contracts of the hooks around generation: called by the rollout manager, where prompts become judged samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from slimrl.hooks.base import Hook, RunArguments

if TYPE_CHECKING:
    from slimrl.data.sample import Sample


class DataSource(Protocol):
    """Where a rollout function takes its prompts from; slimrl's own is `slimrl.rollout.dataset.data_source`."""

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """The next `num_groups` groups, each of `--n-samples-per-prompt` samples of one prompt."""
        ...

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Gives groups back, to be handed out again."""
        ...


class CustomDataSource(DataSource, Protocol):
    """`--data-source-path`: a class of data sources. `__init__` is given `tokenizer` too where it takes it.

    Its place is kept with checkpoints, by one of two pairs: `state_dict()` and `load_state_dict(state)`, of plain
    data, or `save(rollout_id)` and `load(rollout_id)`, which keep their own files under `--save`. The first is called
    right after the prompts of a rollout were sampled that a checkpoint follows, once, and the second when a run
    continues from that checkpoint. Where the class has `begin_rollout(rollout_id)`, it is called before a rollout
    draws.
    """

    def __init__(self, args: RunArguments) -> None: ...

    def __len__(self) -> int:
        """Number of prompts in one epoch, by which `--num-epoch` counts."""
        ...


class CustomReward(Hook, Protocol):
    """`--custom-rm-path`: judges one response."""

    async def __call__(self, args: RunArguments, sample: Sample) -> float | dict[str, Any]:
        """The reward; where it is a dict, `--reward-key` names the entry to train on."""
        ...


class GroupReward(Hook, Protocol):
    """`--custom-rm-path` with `--group-rm`: judges all responses to one prompt; in an evaluation one at a time."""

    async def __call__(self, args: RunArguments, samples: list[Sample]) -> list[float] | list[dict[str, Any]]:
        """One reward per sample, in the samples' order."""
        ...


class CustomGenerate(Hook, Protocol):
    """`--custom-generate-function-path`: generates one sample.

    `evaluation` tells whether the sample is for evaluation, `engine` is the client of the engines
    (`slimrl.engines.protocol.EngineClient`) and `tokenizer` the run's tokenizer. When the engine answers with the
    finish reason "abort", the rollout is full: return the sample with status ABORTED; where `--partial-rollout` is on,
    the function is called with it again, to continue it.
    """

    offered: ClassVar[tuple[str, ...]] = ("evaluation", "engine", "tokenizer")

    async def __call__(
        self, args: RunArguments, sample: Sample, sampling_params: dict[str, Any]
    ) -> Sample | list[Sample]:
        """The sample with its tokens, response, log-probabilities and status filled in."""
        ...


class SampleHook(Hook, Protocol):
    """`--rollout-sample-hook-path`: sees each finished sample once, before its reward."""

    offered: ClassVar[tuple[str, ...]] = ("rollout_id", "evaluation")
    either: ClassVar[bool] = True

    def __call__(self, args: RunArguments, sample: Sample) -> Any:
        """The sample to continue with, or None for the one it was given."""
        ...


class RolloutFunction(Hook, Protocol):
    """`--rollout-function-path`, `--eval-function-path`: makes a whole rollout, or a whole evaluation.

    `generator` is the built-in rollout to build on (see `slimrl.rollout.sglang_rollout`).
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
    """`--buffer-filter-path`: chooses which of the groups that wait go into the next wave."""

    def __call__(
        self, args: RunArguments, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
    ) -> list[list[Sample]]:
        """At most `num_samples` groups, which it removes from `buffer`."""
        ...


class SampleFilter(Hook, Protocol):
    """`--rollout-sample-filter-path`: takes single samples out of training by setting their `remove_sample`."""

    def __call__(self, args: RunArguments, groups: list[list[Sample]]) -> None:
        """Called once per rollout with the groups that are trained on."""
        ...


class AllSamplesProcess(Hook, Protocol):
    """`--rollout-all-samples-process-path`: sees every group that a rollout judged, dropped ones too."""

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
        """True where slimrl is not to report its own metrics of the rollout (the mean reward always is).

        `extra_metrics` are those that the rollout itself brought; numbers that the function adds are reported too.
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
        """True where slimrl is not to report more than each set's mean reward.

        `data` has `rewards`, `truncated` and `samples` by name of the set; `extra_metrics` is for what it adds.
        """
        ...


class RewardPostProcess(Hook, Protocol):
    """`--custom-reward-post-process-path`: turns the rewards of a rollout into what is trained on."""

    def __call__(self, args: RunArguments, samples: list[Sample]) -> tuple[list[float], list[float]]:
        """Raw rewards and training rewards, one of each per sample, in the samples' order."""
        ...


class ConvertSamples(Hook, Protocol):
    """`--custom-convert-samples-to-train-data-path`: makes the training data of a rollout."""

    def __call__(self, args: RunArguments, samples: list[Sample]) -> dict[str, Any]:
        """Columns by name, one entry per sample (see `slimrl.rollout.convert_samples`)."""
        ...
