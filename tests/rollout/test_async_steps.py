"""Fully asynchronous generation step by step: failures, skipped weight updates, expired and foreign groups."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from slimrl.data.sample import Sample, SampleStatus
from slimrl.engines.protocol import Generation
from slimrl.hooks import HookFailedError
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.generation import inflight_groups
from slimrl.rollout.generation.inflight_groups import FinishedGroup
from slimrl.rollout.generation.sample_generator import SampleError
from tests.rollout.async_helpers import HERE, async_generation, run_loop
from tests.rollout.test_async_rollout import ContinuingEngine, left, scripted


@pytest.fixture
def make(make_args):
    """Arguments of fully asynchronous generation without recording."""
    return lambda **changes: scripted(make_args, **{"rollout_all_samples_process_path": None, **changes})


def numbers(groups: list[list[Sample]]) -> list[int]:
    return [group[0].group_index for group in groups]


def versions(groups: list[list[Sample]]) -> set[str]:
    return {version for group in groups for sample in group for version, _ in sample.version_spans}


def test_after_a_filter_failure_no_checkpointable_rollout_is_returned(make, tokenizer):
    args = make(dynamic_sampling_filter_path=f"{HERE}.raises_at_six")

    async def main():
        async with async_generation(args, tokenizer) as (generator, source, _):
            generator.continuous.set_weight_version(0, 9)
            await run_loop(400)  # a batch of four is ready
            assert generator.progress() == (8, 8)
            with pytest.raises(HookFailedError, match="boom"):
                await generator.generate_rollout(0, source)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("failing", "at", "error"),
    [
        ({"custom_rm_path": f"{HERE}.fails_intermittently"}, 3, SampleError),
        ({"dynamic_sampling_filter_path": f"{HERE}.raises_at_six"}, 6, HookFailedError),
    ],
)
def test_failure_of_the_last_group_in_flight_is_raised_by_the_drain(make, tokenizer, failing, at, error):
    args = make(rollout_batch_size=1, max_weight_staleness=0, **failing)

    async def main():
        async with async_generation(args, tokenizer) as (generator, source, engine):
            for rollout in range(at):
                engine.version = rollout
                generator.continuous.set_weight_version(rollout, 9)
                await generator.generate_rollout(rollout, source)
            engine.version = at
            generator.continuous.set_weight_version(at, 9)
            await run_loop(400)
            with pytest.raises(error, match="mine|boom"):
                await generator.continuous.drain()

    asyncio.run(main())


async def rollouts(args, tokenizer, interval, start, end, *, drained, requests=1000, gpus=1000):
    """Like train_async.py with `--update-weights-interval`: requests the next rollout before it trains on this one."""
    outputs = []
    async with async_generation(args, tokenizer, ContinuingEngine(gpus, 3, 0), requests=requests) as (
        generator,
        source,
        engine,
    ):
        engine.version = start
        generator.continuous.set_weight_version(start, end)
        work = asyncio.create_task(generator.generate_rollout(start, source))
        try:
            for rollout in range(start, end):
                outputs.append(await asyncio.wait_for(work, 10))
                if rollout + 1 < end:
                    work = asyncio.create_task(generator.generate_rollout(rollout + 1, source))
                await run_loop(40)
                if (rollout + 1) % interval == 0 or rollout + 1 == end:
                    if drained:
                        await asyncio.wait_for(generator.continuous.drain(), 10)
                        assert engine.in_flight == 0
                    engine.version = rollout + 1
                    generator.continuous.set_weight_version(rollout + 1, end)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
    return outputs


@pytest.mark.parametrize(("interval", "bound"), [(1, 0), (2, 1), (3, 2), (3, 3), (4, 3)])
@pytest.mark.parametrize(("start", "drained"), [(0, False), (1, True), (5, False), (5, True)])
@pytest.mark.parametrize(("requests", "gpus"), [(1000, 1000), (1, 2)])
def test_staleness_bound_holds_when_weight_updates_are_skipped(
    make, tokenizer, interval, bound, start, drained, requests, gpus
):
    args = make(max_weight_staleness=bound, n_samples_per_prompt=3)
    options = {"drained": drained, "requests": requests, "gpus": gpus}
    outputs = asyncio.run(rollouts(args, tokenizer, interval, start, 12, **options))
    assert len(outputs) == 12 - start
    oldest = [rollout - min(map(int, versions(o.groups))) for rollout, o in enumerate(outputs, start)]
    assert max(oldest) <= bound
    assert max(oldest) >= interval - 1  # between two weight updates there is nothing newer
    assert sum(output.metrics["rollout/staleness/dropped"] for output in outputs) == 0


@pytest.mark.parametrize("drained", [False, True])
def test_groups_with_a_failed_function_are_skipped_counted_and_replaced(make, tokenizer, drained):
    args = make(
        rollout_batch_size=30,
        custom_rm_path=f"{HERE}.fails_intermittently",
        skip_failed_samples=True,
        max_failed_samples=1000,
        max_weight_staleness=1,
    )
    outputs = asyncio.run(rollouts(args, tokenizer, 1, 0, 5, drained=drained))
    trained = [number for output in outputs for number in numbers(output.groups)]
    assert len(trained) == len(set(trained)) == 150 and not any(number % 7 == 3 for number in trained)
    failed = sum(output.metrics["rollout/failed_samples"] for output in outputs)
    in_between = [number for number in range(max(trained)) if number not in trained]
    assert failed == len(in_between) == sum(number % 7 == 3 for number in range(max(trained)))


def carried_over(args, tokenizer, count: int, **changes) -> dict:
    """A data source state with `count` unfinished groups of an earlier run, of two response tokens each."""
    source = RolloutDataSource(args, tokenizer)
    groups = source.get_samples(count)
    for sample in (sample for group in groups for sample in group):
        sample.tokens, sample.response_length = [*sample.tokens, 1, 2], 2
        sample.loss_mask, sample.rollout_log_probs, sample.status = [1, 1], [-1.0, -1.0], SampleStatus.ABORTED
        for name, value in changes.items():
            setattr(sample, name, value)
    source.add_samples(groups)
    return json.loads(json.dumps(source.state_dict()))


@pytest.mark.parametrize(
    ("carried", "dropped"),
    [
        ({"weight_versions": ["1"]}, 0),  # written by a version without spans: regenerated immediately
        ({"weight_versions": ["4"], "version_spans": [["4", 2]]}, 4),  # known to be stale when it is finished
        ({"weight_versions": ["9"], "version_spans": [["9", 2]]}, 0),  # future weights
        ({}, 0),
    ],
)
def test_response_started_by_unknown_or_stale_weights_is_regenerated_from_its_prompt(make, tokenizer, carried, dropped):
    args = make(max_weight_staleness=1)
    state = carried_over(args, tokenizer, 4, **carried)

    async def main():
        async with async_generation(args, tokenizer) as (generator, source, engine):
            engine.version = 6
            generator.continuous.restore(inflight_groups.restore(source, state, keeps_finished=True))
            generator.continuous.set_weight_version(6, 7)
            output = await generator.generate_rollout(6, source)
        assert sorted(numbers(output.groups)) == [0, 1, 2, 3]
        for sample in (sample for group in output.groups for sample in group):
            assert sample.version_spans == [["6", sample.response_length]] and sample.weight_versions == ["6"]
        assert output.metrics["rollout/staleness/dropped"] == dropped

    asyncio.run(main())


def finished(source: RolloutDataSource, count: int, version: int) -> list[FinishedGroup]:
    """Groups as finished by the weights `version`."""
    made = []
    for group in source.get_samples(count):
        done = [
            Sample(**{**vars(sample), "tokens": [*sample.tokens, 5], "response_length": 1, "loss_mask": [1]})
            for sample in group
        ]
        for sample in done:
            sample.rollout_log_probs, sample.version_spans = [-1.0], [[str(version), 1]]
            sample.reward, sample.status = 1.0, SampleStatus.COMPLETED
        made.append(FinishedGroup(done, group, version))
    return made


def test_finished_groups_of_future_weights_are_regenerated(make, tokenizer):
    args = make(max_weight_staleness=1)

    async def main():
        async with async_generation(args, tokenizer) as (generator, source, _):
            generator.continuous.restore(finished(source, 4, 7))
            generator.continuous.set_weight_version(0, 1)  # --start-rollout-id 0
            output = await generator.generate_rollout(0, source)
        assert sorted(numbers(output.groups)) == [0, 1, 2, 3] and versions(output.groups) == {"0"}

    asyncio.run(main())


def test_finished_groups_that_the_next_rollout_cannot_take_are_regenerated_early(make, tokenizer):
    args = make(rollout_batch_size=2, max_weight_staleness=1)

    async def main():
        async with async_generation(args, tokenizer) as (generator, source, engine):
            engine.version = 6
            generator.continuous.restore(finished(source, 6, 5))
            generator.continuous.set_weight_version(6, 9)
            first = await generator.generate_rollout(6, source)
            second = await generator.generate_rollout(7, source)  # without a weight update in between
        assert versions(first.groups) == {"5"} and versions(second.groups) == {"6"}
        assert first.metrics["rollout/staleness/dropped"] + second.metrics["rollout/staleness/dropped"] == 4

    asyncio.run(main())


class Gated(ContinuingEngine):
    """Its requests end when `gate` is set; it does not report its weight version."""

    def __init__(self) -> None:
        super().__init__(1000, 0, 0)
        self.gate = asyncio.Event()

    async def generate(self, input_ids, sampling_params, session_id=None):
        self.in_flight += 1
        try:
            await self.gate.wait()
        finally:
            self.in_flight -= 1
        return Generation([3], [-1.0], "stop", "default")

    async def abort_all(self):
        self.gate.set()


def test_group_staleness_counts_from_its_start_when_engines_report_no_version(make, tokenizer):
    args = make(max_weight_staleness=2)

    async def main():
        async with async_generation(args, tokenizer, Gated()) as (generator, source, engine):
            stream = generator.continuous
            stream.set_weight_version(0, 9)
            await run_loop(5)
            stream.set_weight_version(1, 9)
            engine.gate.set()
            await stream.drain()
            assert Counter(one.oldest for one in stream.inflight_state().finished) == {0: 12, 1: 4}

    asyncio.run(main())


def test_servers_replaced_during_a_drain_do_not_restart_generation(make, tokenizer):
    args = make(max_weight_staleness=2)

    async def main():
        engine = ContinuingEngine(1000, 3, 0)
        async with async_generation(args, tokenizer, engine, requests=2) as (generator, _, _):  # one group at a time
            stream = generator.continuous
            stream.set_weight_version(0, 9)
            await run_loop(5)
            draining = asyncio.create_task(stream.drain())
            await run_loop(5)
            stream.set_weight_version(0, 9)
            await asyncio.wait_for(draining, 10)
            assert engine.in_flight == 0
            assert len(stream.inflight_state().finished) <= 3  # there is capacity for twelve

    asyncio.run(main())


def test_functions_receive_the_rollout_id_at_the_start_of_the_group(make, tokenizer):
    args = make(rollout_sample_hook_path=[f"{HERE}.notes_its_rollout"], max_weight_staleness=0)
    outputs = asyncio.run(rollouts(args, tokenizer, 1, 0, 4, drained=False))
    begun = [{sample.metadata["begun_for"] for group in output.groups for sample in group} for output in outputs]
    assert begun == [{0}, {1}, {2}, {3}]


def test_in_place_changes_by_functions_do_not_change_the_sampled_group(make, tokenizer):
    args = make(custom_generate_function_path=f"{HERE}.changes_in_place", max_weight_staleness=4)

    async def main():
        async with async_generation(args, tokenizer) as (generator, source, engine):
            engine.version = 6
            state = carried_over(
                args, tokenizer, 4, version_spans=[["6", 2]], weight_versions=["6"], metadata={"seen": {"by": []}}
            )
            inflight_groups.restore(source, state, keeps_finished=True)
            generator.continuous.set_weight_version(6, 7)
            await generator.continuous.drain()
            ones = generator.continuous.inflight_state().finished
            assert {sample.tokens[0] for one in ones for sample in one.group} == {77}
            for sample in (sample for one in ones for sample in one.prompts):
                assert sample.tokens == [*tokenizer(sample.prompt, add_special_tokens=False)["input_ids"], 1, 2]
                assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1], [-1.0, -1.0])
                assert (sample.version_spans, sample.weight_versions) == ([["6", 2]], ["6"])
                assert sample.metadata["seen"] == {"by": []}

    asyncio.run(main())


def test_data_position_is_reported_only_when_it_is_saved(make, tokenizer):
    async def main():
        async with async_generation(make(), tokenizer) as (generator, source, engine):
            generator.continuous.set_weight_version(0, 9)
            first = await generator.generate_rollout(0, source, saved=False)
            engine.version = 1
            generator.continuous.set_weight_version(1, 9)
            second = await generator.generate_rollout(1, source)
        assert first.data_state is None
        known = numbers(first.groups) + numbers(second.groups) + left(second.data_state)
        assert sorted(known) == list(range(second.data_state["next_group_index"]))

    asyncio.run(main())
