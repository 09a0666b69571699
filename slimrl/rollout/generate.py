"""The rollout loop: draws groups, keeps them in flight, and returns a full batch in the order of its indices.

Every sample is one asyncio task; none outlives the call, and the first failure ends it with a named error.
Created and driven by the rollout manager, which owns the engine client.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from typing import Any

from slimrl.arguments import Arguments
from slimrl.arguments.groups.rollout import DEFAULT_ROLLOUT_FUNCTION
from slimrl.data.sample import Sample
from slimrl.hooks import DynamicSamplingFilter, RolloutFunction, own_path, resolve
from slimrl.rollout.data_source import RolloutDataSource
from slimrl.rollout.engine import EngineClient
from slimrl.rollout.evaluate import EvalResult, Evaluator
from slimrl.rollout.filter_hub.base_types import DynamicFilterOutput
from slimrl.rollout.metrics import dynamic_filter_metrics
from slimrl.rollout.output import RolloutOutput
from slimrl.rollout.rm_hub import RewardScorer
from slimrl.rollout.sample_task import SampleMaker, SamplePolicy
from slimrl.rollout.sampling import SamplingPlan
from slimrl.rollout.sglang_rollout import call_rollout_function, eval_results, rollout_output
from slimrl.rollout.tasks import cancel_and_wait, gather_or_cancel

_HOPELESS_BATCHES = 16


@dataclasses.dataclass(eq=False)
class _Flight:
    """One group on its way; `drawn` is the group as the data source gave it, where it may have to go back."""

    task: asyncio.Task[list[Sample]]
    drawn: list[Sample] | None


class RolloutGenerator:
    """Generates rollouts and evaluations, one at a time: a second call waits for the first. Close it when done."""

    def __init__(self, args: Arguments, tokenizer: Any, client: EngineClient) -> None:
        self._args = args
        self._tokenizer = tokenizer
        self._client = client
        self._scorer = RewardScorer(args)
        self._maker = SampleMaker(args, tokenizer, client, self._scorer)
        self._policy = SamplePolicy.for_training(args)
        self._maker.check(self._policy, "--rm-type")
        self._plan = SamplingPlan.for_training(args)
        self._evaluator = Evaluator(args, tokenizer, self._maker)
        path = args.dynamic_sampling_filter_path
        self._filter = None if path is None else resolve(path, DynamicSamplingFilter)
        path = own_path(args.rollout_function_path)
        self._function = None if path == DEFAULT_ROLLOUT_FUNCTION else resolve(path, RolloutFunction)
        self._expected = 0
        self._turn = asyncio.Lock()  # a full batch aborts whatever is in flight, which must be nobody else's

    def progress(self) -> tuple[int, int]:
        """Finished and expected samples of the generation that runs now, or ran last."""
        return self._maker.finished, self._expected

    async def generate_rollout(self, rollout_id: int, data_source: RolloutDataSource) -> RolloutOutput:
        """One rollout, by `--rollout-function-path` where that is the user's own, else `builtin_rollout`."""
        async with self._turn:
            if self._function is None:
                return await self.builtin_rollout(rollout_id, data_source)
            returned = await call_rollout_function(
                self._function,
                self._args,
                rollout_id,
                data_source,
                evaluation=False,
                tokenizer=self._tokenizer,
                generator=self,
            )
        return rollout_output(returned, self._args.rollout_function_path)

    async def evaluate(self, rollout_id: int) -> dict[str, EvalResult]:
        """Every evaluation set by name, by `--rollout-function-path` likewise."""
        async with self._turn:
            if self._function is None:
                return await self.builtin_evaluation(rollout_id)
            returned = await call_rollout_function(
                self._function, self._args, rollout_id, None, evaluation=True, tokenizer=self._tokenizer, generator=self
            )
        return eval_results(returned, self._args.rollout_function_path)

    async def builtin_rollout(self, rollout_id: int, data_source: RolloutDataSource) -> RolloutOutput:
        """A full batch of groups, each generated, judged and accepted.

        With a dynamic sampling filter, `--over-sampling-batch-size` prompts are sent out at a time. What is left when
        the batch is full goes back to the data source: finished groups as they are, the others as new prompts.
        Without a filter exactly the batch is drawn: taking the first to finish would prefer short responses.
        Raises SampleError, and RuntimeError where the filter drops everything.
        """
        target = self._args.rollout_batch_size
        self._maker.finished, self._expected = 0, target * self._args.n_samples_per_prompt
        collector = _Collector(self._args, self._filter, max(len(data_source), _HOPELESS_BATCHES * target))
        finished: asyncio.Queue[_Flight] = asyncio.Queue()
        flights: set[_Flight] = set()
        try:
            while len(collector.accepted) < target:
                missing = target - len(collector.accepted) - len(flights)
                if missing > 0:
                    wave = missing if self._filter is None else max(missing, self._args.over_sampling_batch_size)
                    for group in data_source.get_samples(wave):
                        flights.add(self._launch(group, finished))
                flight = await finished.get()
                flights.discard(flight)
                collector.add(flight.task.result())
            collector.surplus.extend(await self._land(flights))
        finally:
            await cancel_and_wait(flight.task for flight in flights)
        data_source.add_samples(_in_order(collector.surplus))
        return RolloutOutput(_in_order(collector.accepted), collector.metrics())

    async def builtin_evaluation(self, rollout_id: int) -> dict[str, EvalResult]:
        """Every evaluation set by name, sampled and judged. Raises SampleError."""
        self._maker.finished, self._expected = 0, self._evaluator.num_samples
        return await self._evaluator.evaluate()

    def close(self) -> None:
        """Ends the graders; the client is the caller's."""
        self._scorer.close()

    def _launch(self, group: list[Sample], finished: asyncio.Queue[_Flight]) -> _Flight:
        drawn = copy.deepcopy(group) if self._filter is not None else None
        flight = _Flight(asyncio.create_task(self._make_group(group)), drawn)
        flight.task.add_done_callback(lambda _: finished.put_nowait(flight))
        return flight

    async def _make_group(self, group: list[Sample]) -> list[Sample]:
        made = await gather_or_cancel(
            self._maker.make(sample, self._plan.params(sample, sample.index), self._policy) for sample in group
        )
        return [sample for samples in made for sample in samples]

    async def _land(self, flights: set[_Flight]) -> list[list[Sample]]:
        """What to give back of the groups still in flight: finished ones whole, the others as they were drawn."""
        if not flights:
            return []
        ended = [flight for flight in flights if flight.task.done()]
        under_way = [flight for flight in flights if not flight.task.done()]
        await cancel_and_wait(flight.task for flight in under_way)
        await self._client.abort_all()
        return [flight.task.result() for flight in ended] + [flight.drawn for flight in under_way]


class _Collector:
    """Sorts finished groups into accepted and dropped ones and counts the drops."""

    def __init__(self, args: Arguments, keep: DynamicSamplingFilter | None, hopeless: int) -> None:
        self._args = args
        self._keep = keep
        self._hopeless = hopeless
        self._dropped_in_a_row = 0
        self._drops: dict[str, int] = {}
        self.accepted: list[list[Sample]] = []
        self.surplus: list[list[Sample]] = []

    def add(self, group: list[Sample]) -> None:
        """Accepts or drops a finished group. Raises RuntimeError after `hopeless` drops without a keep between."""
        verdict = DynamicFilterOutput(True) if self._keep is None else self._judge(self._keep, group)
        if verdict.keep:
            self._dropped_in_a_row = 0
            self.accepted.append(group)
            return
        reason = verdict.reason or "unnamed"
        self._drops[reason] = self._drops.get(reason, 0) + 1
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= self._hopeless:
            raise RuntimeError(
                f"--dynamic-sampling-filter-path {self._args.dynamic_sampling_filter_path} dropped"
                f" {self._dropped_in_a_row} groups in a row ({self._drops}): the data is too easy, too hard or wrongly"
                " judged for this model; change the data, the reward or the filter"
            )

    def metrics(self) -> dict[str, float]:
        """Counts of this rollout; none without a filter."""
        return {} if self._keep is None else dynamic_filter_metrics(self._drops, len(self.surplus))

    def _judge(self, keep: DynamicSamplingFilter, group: list[Sample]) -> DynamicFilterOutput:
        return DynamicFilterOutput.of(keep(self._args, group))


def _in_order(groups: list[list[Sample]]) -> list[list[Sample]]:
    """Groups and the samples within them by index, whatever order they finished in."""
    ordered = [sorted(group, key=lambda sample: sample.index) for group in groups]
    return sorted(ordered, key=lambda group: group[0].index)
