"""The rollout loop: draws groups, keeps them in flight, and returns a full batch in the order of its indices.

Every sample is one asyncio task; none outlives the call, and the first failure ends it with a named error.
Created and driven by the rollout manager, which owns the engine client.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from slimrl import hooks
from slimrl.arguments import Arguments
from slimrl.arguments.flags.rollout import DEFAULT_ROLLOUT_FUNCTION
from slimrl.data.sample import Sample
from slimrl.engines.protocol import EngineClient, StoppableEngine
from slimrl.rollout.asynchronous.async_rollout import AsyncRollout
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.evaluate import EvalResult, Evaluator
from slimrl.rollout.generation.inflight_groups import MAX_CONSECUTIVE_DROPS, DynamicSampler, InflightGroups, in_order
from slimrl.rollout.generation.sample_generator import SampleConfig, SampleGenerator
from slimrl.rollout.generation.sample_tracker import ActiveSample, SampleTrace
from slimrl.rollout.metrics import dynamic_filter_metrics, partial_metrics
from slimrl.rollout.rm_hub import RewardScorer
from slimrl.rollout.rollout_function import RolloutOutput, call_rollout_function, checked_output, eval_results
from slimrl.rollout.sampling import SamplingConfig


class RolloutGenerator:
    """Generates rollouts and evaluations, one at a time: a second call waits for the first. Close it when done."""

    def __init__(self, args: Arguments, tokenizer: Any, client: EngineClient, trace: SampleTrace | None = None) -> None:
        self._args = args
        self._tokenizer = tokenizer
        self._client = client
        self._engine = StoppableEngine(client)
        self._scorer = RewardScorer(args)
        self._trace = trace if trace is not None else SampleTrace.off()
        self._maker = SampleGenerator(args, tokenizer, self._engine, self._scorer, self._trace)
        self._maker.check(SampleConfig.for_training(args), "--rm-type")
        self._plan = SamplingConfig.for_training(args)
        self._evaluator = Evaluator(args, tokenizer, self._maker)
        self._filter = _hook(args.dynamic_sampling_filter_path, hooks.DynamicSamplingFilter)
        self._sample_filter = _hook(args.rollout_sample_filter_path, hooks.SampleFilter)
        self._process_all = _hook(args.rollout_all_samples_process_path, hooks.AllSamplesProcess)
        self._function = _rollout_function(args.rollout_function_path)
        self._eval_path = args.eval_function_path or args.rollout_function_path
        self._eval_function = _rollout_function(self._eval_path)
        self._expected = 0
        self.continuous: AsyncRollout | None = None
        self._turn = asyncio.Lock()  # a full batch aborts whatever is in flight, which must be nobody else's

    def progress(self) -> tuple[int, int]:
        """Finished and expected samples of the generation that runs now, or ran last."""
        if self.continuous is not None and not self._turn.locked():  # which evaluations take then
            return self.continuous.progress()
        return self._maker.finished, self._expected

    def under_way(self) -> list[ActiveSample]:
        """The samples that somebody works on now, the slowest first; may be called from any thread."""
        return self._maker.under_way.where()

    def generate_on(self, data_source: RolloutDataSource, requests: int) -> None:
        """Groups of `data_source` are always in flight from now on; the engines take `requests` at once."""
        engine = StoppableEngine(self._client)
        maker = SampleGenerator(self._args, self._tokenizer, engine, self._scorer, self._trace)
        maker.under_way = self._maker.under_way
        self.continuous = AsyncRollout(self._args, maker, engine, self._plan, self._filter, data_source, requests)

    async def generate_rollout(
        self, rollout_id: int, data_source: RolloutDataSource, *, saved: bool = True
    ) -> RolloutOutput:
        """One rollout, by `--rollout-function-path` where that is the user's own, else `builtin_rollout`.

        Fully asynchronous generation says where the data stand, if a checkpoint is to be `saved` after this rollout.
        """
        if self.continuous is not None:
            return await self._continuous_rollout(rollout_id, data_source, saved)
        async with self._turn:
            self._trace.begin()
            data_source.begin_rollout(rollout_id)
            if self._function is None:
                return await self.builtin_rollout(rollout_id, data_source)
            returned = await call_rollout_function(
                ("--rollout-function-path", self._args.rollout_function_path),
                self._function,
                self._args,
                rollout_id,
                data_source,
                evaluation=False,
                tokenizer=self._tokenizer,
                generator=self,
            )
        return checked_output(returned, self._args)

    async def evaluate(self, rollout_id: int) -> dict[str, EvalResult]:
        """Every evaluation set by name, by `--eval-function-path` (`--rollout-function-path`) likewise."""
        async with self._turn:
            self._trace.begin()
            if self._eval_function is None:
                return await self.builtin_evaluation(rollout_id)
            flag = "--eval-function-path" if self._args.eval_function_path else "--rollout-function-path"
            returned = await call_rollout_function(
                (flag, self._eval_path),
                self._eval_function,
                self._args,
                rollout_id,
                None,
                evaluation=True,
                tokenizer=self._tokenizer,
                generator=self,
            )
        return eval_results(returned, self._eval_path)

    async def builtin_rollout(self, rollout_id: int, data_source: RolloutDataSource) -> RolloutOutput:
        """A full batch of groups, each generated, judged and accepted.

        With a dynamic sampling filter or `--partial-rollout`, `--over-sampling-batch-size` prompts are sent out at a
        time. What is left when the batch is full goes back to the data source (see `InflightGroups.land`). With
        neither, exactly the batch is drawn: taking the first to finish would prefer short responses.
        Raises SampleError, RuntimeError where the filter drops everything, and HookFailedError.
        """
        args = self._args
        target = args.rollout_batch_size
        over_samples = self._filter is not None or args.partial_rollout
        self._maker.finished, self._expected = 0, target * args.n_samples_per_prompt
        self._engine.start()
        collector = DynamicSampler(args, self._filter, max(len(data_source), MAX_CONSECUTIVE_DROPS * target))
        flights = InflightGroups(args, rollout_id, self._maker, self._engine, self._plan)
        try:
            while len(collector.accepted) < target:
                missing = target - len(collector.accepted) - len(flights)
                if missing > 0 and collector.fill_from_reserve(missing):
                    continue
                if missing > 0:
                    wave = max(missing, args.over_sampling_batch_size) if over_samples else missing
                    for group in data_source.get_samples(wave):
                        flights.launch(group)
                if (group := await flights.next()) is not None:
                    collector.add(group)
            surplus = in_order(await flights.land())
        finally:
            await flights.cancel()
        data_source.add_samples(surplus)
        self._show(collector.accepted, collector.dropped, data_source)
        metrics = self._metrics(rollout_id, collector, surplus) | flights.failed.take_metrics()
        return RolloutOutput(in_order(collector.accepted), metrics)

    async def _continuous_rollout(self, rollout_id: int, data_source: RolloutDataSource, saved: bool) -> RolloutOutput:
        """A full batch of those that are in flight, and where the data are in that very moment."""
        self._trace.begin()
        taken = await self.continuous.take(rollout_id)
        self._show(taken.groups, taken.filtered.dropped, data_source)
        metrics = {"rollout/staleness/dropped": float(taken.too_old), **self.continuous.take_failures()}
        if self._filter is not None:
            metrics |= dynamic_filter_metrics(taken.filtered.drops, taken.left)
        data_state = None
        if saved:
            data_source.begin_rollout(rollout_id)  # it may keep files by this number, and drew for the next one already
            data_state = self.continuous.drawn().added_to(data_source.state_dict())
        return RolloutOutput(in_order(taken.groups), metrics, data_state, taken.seconds)

    async def builtin_evaluation(self, rollout_id: int) -> dict[str, EvalResult]:
        """Every evaluation set by name, sampled and judged. Raises SampleError."""
        self._maker.finished, self._expected = 0, self._evaluator.num_samples
        self._engine.start()
        return await self._evaluator.evaluate(rollout_id)

    async def end(self) -> None:
        """Ends what is in flight, and closes."""
        if self.continuous is not None:
            await self.continuous.stop()
        self.close()

    def close(self) -> None:
        """Ends the graders; the client is the caller's."""
        self._trace.begin()
        self._scorer.close()

    def _show(self, accepted: list[list[Sample]], dropped: list[list[Sample]], data_source: RolloutDataSource) -> None:
        """Lets the user's functions see the rollout; they may set `remove_sample`."""
        args = self._args
        if self._sample_filter is not None:
            with hooks.naming("--rollout-sample-filter-path", args.rollout_sample_filter_path):
                self._sample_filter(args, in_order(accepted))
        if self._process_all is not None:
            with hooks.naming("--rollout-all-samples-process-path", args.rollout_all_samples_process_path):
                self._process_all(args, in_order(accepted + dropped), data_source)

    def _metrics(self, rollout_id: int, collector: DynamicSampler, surplus: list[list[Sample]]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self._filter is not None:
            metrics |= dynamic_filter_metrics(collector.drops, len(surplus))
        if self._args.partial_rollout:
            metrics |= partial_metrics(rollout_id, collector.accepted, surplus)
        return metrics


def _hook(path: str | None, contract: type[hooks.Hook]) -> Any:
    return None if path is None else hooks.resolve(path, contract)


def _rollout_function(path: str) -> hooks.RolloutFunction | None:
    """None where it is the built-in one."""
    if hooks.own_path(path) == DEFAULT_ROLLOUT_FUNCTION:
        return None
    return cast("hooks.RolloutFunction", hooks.resolve(path, hooks.RolloutFunction))
