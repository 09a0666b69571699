"""The rollout loop: samples groups, keeps them in flight, and returns a full batch sorted by index; and evaluation.

Every sample is one asyncio task. No task outlives the call, and the first failure ends the call with a named error.
The rollout manager creates and drives it, and owns the engine client.

An evaluation samples all datasets concurrently, each with its own settings. The same dataset, weights and settings give
the same samples in the same order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from slimrl import hooks
from slimrl.arguments import Arguments
from slimrl.arguments.eval_datasets import eval_prompt_format
from slimrl.arguments.flags.rollout import RolloutArguments
from slimrl.arguments.namespace import EvalDataset, PromptArguments
from slimrl.data.sample import Sample
from slimrl.engines.protocol import EngineClient, SamplingConfig, StoppableEngine
from slimrl.rollout.async_rollout import AsyncRollout
from slimrl.rollout.async_utils import gather_or_cancel
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.dataset.prompt_dataset import PromptSet, load_prompts
from slimrl.rollout.filter_hub.dynamic_sampling_filters import MAX_CONSECUTIVE_DROPS, DynamicSampler, GroupFilter
from slimrl.rollout.generation.inflight_groups import InflightGroups, sort_by_index
from slimrl.rollout.generation.sample_generator import GeneratorConfig, SampleConfig, SampleError, SampleGenerator
from slimrl.rollout.generation.sample_tracker import ActiveSample, SampleTrace
from slimrl.rollout.metrics import EvalResult, dynamic_filter_metrics, partial_metrics
from slimrl.rollout.rm_hub import RewardConfig, RewardScorer
from slimrl.rollout.rollout_function import CustomRollout, ExpectedOutput, RolloutOutput, eval_results


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """The run's configuration of generation and evaluation, and custom rollout functions (None: built in)."""

    rollout: RolloutArguments
    prompts: PromptArguments
    generator: GeneratorConfig
    samples: SampleConfig
    sampling: SamplingConfig
    eval_datasets: tuple[EvalDataset, ...]
    max_staleness: int | None
    saves: bool  # whether the run saves checkpoints
    custom_rollout: CustomRollout | None
    custom_evaluation: CustomRollout | None
    expected: ExpectedOutput

    @classmethod
    def from_args(cls, args: Arguments) -> RolloutConfig:
        """Reads the flags. Raises HookError if a rollout function cannot be used."""
        return cls(
            rollout=args,
            prompts=args,
            generator=GeneratorConfig.from_args(args),
            samples=SampleConfig.for_training(args),
            sampling=SamplingConfig.for_training(args),
            eval_datasets=tuple(args.eval_datasets),
            max_staleness=args.max_weight_staleness,
            saves=args.save is not None,
            custom_rollout=CustomRollout.for_training(args),
            custom_evaluation=CustomRollout.for_evaluation(args),
            expected=ExpectedOutput.from_args(args),
        )


class RolloutGenerator:
    """Generates rollouts and evaluations, one at a time: a second call waits for the first. Close it when done."""

    def __init__(
        self,
        config: RolloutConfig,
        tokenizer: Any,
        client: EngineClient,
        scorer: RewardScorer,
        trace: SampleTrace,
    ) -> None:
        self._config = config
        self._rollout = config.rollout
        self._hook_args = config.generator.hook_args
        self._tokenizer = tokenizer
        self._client = client
        self._engine = StoppableEngine(client)
        self._scorer = scorer
        self._trace = trace
        self._sample_generator = SampleGenerator(config.generator, tokenizer, self._engine, scorer, trace)
        self._sample_generator.check(config.samples, "--rm-type")
        self._evaluator = Evaluator(config.eval_datasets, config.prompts, tokenizer, self._sample_generator)
        path = self._rollout.dynamic_sampling_filter_path
        self._filter = None if path is None else GroupFilter(path, self._hook_args)
        path = self._rollout.rollout_sample_filter_path
        self._sample_filter = self._hook("--rollout-sample-filter-path", path, hooks.SampleFilter)
        path = self._rollout.rollout_all_samples_process_path
        self._process_all = self._hook("--rollout-all-samples-process-path", path, hooks.AllSamplesProcess)
        self._expected = 0
        self.continuous: AsyncRollout | None = None
        self._lock = asyncio.Lock()  # one call at a time: a full batch aborts everything that is in flight

    @classmethod
    def from_args(
        cls, args: Arguments, tokenizer: Any, client: EngineClient, trace: SampleTrace | None = None
    ) -> RolloutGenerator:
        """The generator for the flags."""
        config = RolloutConfig.from_args(args)
        return cls(config, tokenizer, client, RewardScorer.from_args(args), trace or SampleTrace.off())

    def _hook(self, flag: str, path: str | None, contract: type[hooks.Hook]) -> Callable[..., Any] | None:
        """The function at `path` with the flags as its first argument; its errors name flag and path."""
        return None if path is None else functools.partial(hooks.named(flag, path, contract), self._hook_args)

    def move_reward_server(self, old: str, new: str) -> None:
        """The replacement of the server at `old`, of the reward model or a teacher, is at `new`."""
        self._scorer.move_server(old, new)

    def progress(self) -> tuple[int, int]:
        """Finished and expected samples of the current generation, or of the last one."""
        if self.continuous is not None and not self._lock.locked():  # only evaluations hold the lock here
            return self.continuous.progress()
        return self._sample_generator.finished, self._expected

    def active_samples(self) -> list[ActiveSample]:
        """The samples in work, the slowest first; may be called from any thread."""
        return self._sample_generator.tracker.snapshot()

    def start_async(self, data_source: RolloutDataSource, requests: Callable[[], int]) -> None:
        """Switches to fully asynchronous generation; the engines take `requests()` concurrent requests."""
        engine = StoppableEngine(self._client)
        config = self._config
        generator = SampleGenerator(config.generator, self._tokenizer, engine, self._scorer, self._trace)
        generator.tracker = self._sample_generator.tracker
        if config.max_staleness is None:
            raise ValueError("fully asynchronous generation requires --max-weight-staleness")
        self.continuous = AsyncRollout(
            self._rollout,
            generator,
            config.samples,
            engine,
            config.sampling,
            self._filter,
            data_source,
            requests,
            max_staleness=config.max_staleness,
            saves=config.saves,
        )

    async def generate_rollout(
        self, rollout_id: int, data_source: RolloutDataSource, *, saved: bool = True
    ) -> RolloutOutput:
        """Generates one rollout, by the custom `--rollout-function-path` if set, else by `builtin_rollout`.

        Fully asynchronous generation adds the data state if a checkpoint is `saved` after this rollout.
        """
        if self.continuous is not None:
            return await self._continuous_rollout(self.continuous, rollout_id, data_source, saved)
        async with self._lock:
            self._trace.begin()
            data_source.begin_rollout(rollout_id)
            custom = self._config.custom_rollout
            if custom is None:
                return await self.builtin_rollout(rollout_id, data_source)
            returned = await custom(
                rollout_id, data_source, evaluation=False, tokenizer=self._tokenizer, generator=self
            )
        output = self._config.expected.checked(returned)
        await self._sample_generator.score_tokens([sample for group in output.groups for sample in group])
        return output

    async def evaluate(self, rollout_id: int) -> dict[str, EvalResult]:
        """Results of all evaluation sets by name; uses a custom `--eval-function-path` (`--rollout-function-path`)."""
        async with self._lock:
            self._trace.begin()
            custom = self._config.custom_evaluation
            if custom is None:
                return await self.builtin_evaluation(rollout_id)
            returned = await custom(rollout_id, None, evaluation=True, tokenizer=self._tokenizer, generator=self)
        return eval_results(returned, custom.path)

    async def builtin_rollout(self, rollout_id: int, data_source: RolloutDataSource) -> RolloutOutput:
        """A full batch of groups, each generated, scored and accepted.

        With a dynamic sampling filter or `--partial-rollout`, `--over-sampling-batch-size` prompts are submitted at a
        time. Groups that remain when the batch is full go back to the data source (`InflightGroups.abort_and_collect`).
        Otherwise exactly one batch is sampled: taking the first groups to finish would prefer short responses.
        Raises SampleError, HookFailedError, and RuntimeError if the filter drops everything.
        """
        rollout = self._rollout
        target = rollout.rollout_batch_size
        over_samples = self._filter is not None or rollout.partial_rollout
        self._sample_generator.finished, self._expected = 0, target * rollout.n_samples_per_prompt
        self._engine.start()
        sampler = DynamicSampler(self._filter, max(len(data_source), MAX_CONSECUTIVE_DROPS * target))
        samples, sampling = self._config.samples, self._config.sampling
        inflight = InflightGroups(rollout, rollout_id, self._sample_generator, samples, self._engine, sampling)
        try:
            while len(sampler.accepted) < target:
                missing = target - len(sampler.accepted) - len(inflight)
                if missing > 0 and sampler.fill_from_reserve(missing):
                    continue
                if missing > 0:
                    wave = max(missing, rollout.over_sampling_batch_size) if over_samples else missing
                    for group in data_source.get_samples(wave):
                        inflight.submit(group)
                if (finished := await inflight.next()) is not None:
                    sampler.add(finished)
            surplus = sort_by_index(await inflight.abort_and_collect())
        finally:
            await inflight.cancel()
        data_source.add_samples(surplus)
        if isinstance(data_source, RolloutDataSource):
            data_source.prefetch(max(target, rollout.over_sampling_batch_size) if over_samples else target)
        self._run_sample_hooks(sampler.accepted, sampler.dropped, data_source)
        metrics = self._metrics(rollout_id, sampler, surplus) | inflight.failed.take_metrics()
        return RolloutOutput(sort_by_index(sampler.accepted), metrics)

    async def _continuous_rollout(
        self, stream: AsyncRollout, rollout_id: int, data_source: RolloutDataSource, saved: bool
    ) -> RolloutOutput:
        """The next full batch of fully asynchronous generation, with the data state at that moment."""
        self._trace.begin()
        ready = await stream.next_rollout(rollout_id)
        self._run_sample_hooks(ready.groups, ready.filtered.dropped, data_source)
        metrics = {"rollout/staleness/dropped": float(ready.too_old), **stream.take_failures()}
        if self._filter is not None:
            metrics |= dynamic_filter_metrics(ready.filtered.drops, ready.left)
        data_state = None
        if saved:
            # the source may name its files by this number, and has already been sampled for the next rollout
            data_source.begin_rollout(rollout_id)
            data_state = stream.inflight_state().added_to(data_source.state_dict())
        return RolloutOutput(sort_by_index(ready.groups), metrics, data_state, ready.seconds)

    async def builtin_evaluation(self, rollout_id: int) -> dict[str, EvalResult]:
        """Samples and scores every evaluation set; results by name. Raises SampleError."""
        self._sample_generator.finished, self._expected = 0, self._evaluator.num_samples
        self._engine.start()
        return await self._evaluator.evaluate(rollout_id)

    async def end(self) -> None:
        """Stops all groups in flight, then closes."""
        if self.continuous is not None:
            await self.continuous.stop()
        self.close()

    def close(self) -> None:
        """Stops the graders; the caller closes the client."""
        self._trace.begin()
        self._scorer.close()

    def _run_sample_hooks(
        self, accepted: list[list[Sample]], dropped: list[list[Sample]], data_source: RolloutDataSource
    ) -> None:
        """Calls the custom functions on the rollout's groups; they may set `remove_sample`."""
        if self._sample_filter is not None:
            self._sample_filter(sort_by_index(accepted))
        if self._process_all is not None:
            self._process_all(sort_by_index(accepted + dropped), data_source)

    def _metrics(self, rollout_id: int, sampler: DynamicSampler, surplus: list[list[Sample]]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self._filter is not None:
            metrics |= dynamic_filter_metrics(sampler.drops, len(surplus))
        if self._rollout.partial_rollout:
            metrics |= partial_metrics(rollout_id, sampler.accepted, surplus)
        return metrics


@dataclasses.dataclass(frozen=True)
class _Set:
    """A loaded dataset with its sampling and scoring configuration."""

    dataset: EvalDataset
    prompts: PromptSet
    sampling: SamplingConfig
    config: SampleConfig


class Evaluator:
    """Loads all datasets in its constructor, so that a bad file is reported before training starts."""

    def __init__(
        self, datasets: Sequence[EvalDataset], flags: PromptArguments, tokenizer: Any, generator: SampleGenerator
    ) -> None:
        self._generator = generator
        self._skips = flags.skip_failed_samples
        self._sets = [self._load(flags, dataset, tokenizer) for dataset in datasets]

    @property
    def num_samples(self) -> int:
        """Number of samples of one evaluation over all datasets."""
        return sum(len(part.prompts) * part.dataset.n_samples_per_eval_prompt for part in self._sets)

    async def evaluate(self, rollout_id: int) -> dict[str, EvalResult]:
        """Samples and scores every dataset. Raises SampleError at the first failure."""
        results = await gather_or_cancel(self._evaluate(part, rollout_id) for part in self._sets)
        return {result.name: result for result in results}

    def _load(self, flags: PromptArguments, dataset: EvalDataset, tokenizer: Any) -> _Set:
        config = SampleConfig(
            RewardConfig(dataset.custom_rm_path, dataset.rm_type),
            dataset.custom_generate_function_path,
            evaluation=True,
        )
        self._generator.check(config, f"evaluation set {dataset.name!r}")
        prompts = load_prompts(dataset.path, eval_prompt_format(flags, dataset), tokenizer)
        return _Set(dataset, prompts, SamplingConfig.for_evaluation(flags, dataset), config)

    async def _evaluate(self, part: _Set, rollout_id: int) -> EvalResult:
        repeats = part.dataset.n_samples_per_eval_prompt
        work = []
        for row, prompt in enumerate(part.prompts.prompts):
            for repeat in range(repeats):
                sample = prompt.sample(group_index=row, index=row * repeats + repeat)
                sample.metadata.update(part.dataset.metadata_overrides)
                params = part.sampling.params(sample, row, repeat)
                work.append(self._generator.generate_and_score(sample, params, part.config, rollout_id))
        try:
            results = await gather_or_cancel(work)
        except SampleError as error:
            raise self._with_set_name(part.dataset, error) from error
        samples = [_only(samples, part.dataset) for samples in results]
        rewards = [sample.reward_value(part.dataset.reward_key, part.dataset.name) for sample in samples]
        return EvalResult(part.dataset.name, rewards, samples, repeats)

    def _with_set_name(self, dataset: EvalDataset, error: SampleError) -> SampleError:
        text = f"evaluation set {dataset.name!r}: {error}"
        if self._skips and error.by_hook:
            text += (
                "\n--skip-failed-samples does not apply to evaluations, because skipping would change the result: fix"
                " the function"
            )
        return SampleError(text, by_hook=error.by_hook)


def _only(samples: list[Sample], dataset: EvalDataset) -> Sample:
    if len(samples) != 1:
        raise ValueError(
            f"{dataset.custom_generate_function_path} returned {len(samples)} samples in the evaluation of"
            f" {dataset.name!r}: return one sample if `evaluation` is true"
        )
    return samples[0]
