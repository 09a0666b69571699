"""Sample accounting of fully asynchronous runs, with samples in flight, updates, expiry, crashes and resumes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections import Counter
from itertools import groupby

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slimrl.engines.protocol import Generation, sampling_seed
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.generation import inflight_groups
from slimrl.rollout.rollout_generator import RolloutGenerator
from tests.rollout import scripted_engine
from tests.rollout.scripted_engine import END_IN, LIMIT, ScriptedEngine, draw, uninterrupted

HERE = "tests.rollout.scripted_engine"
FILTER = "slimrl.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
PROMPTS = 12


class ContinuingEngine(ScriptedEngine):
    """Its requests continue when the version changes; each token takes up to `slowest` iterations of the event loop."""

    def __init__(self, gpus: int, slowest: int, seed: int) -> None:
        super().__init__(gpus)
        self._slowest = slowest
        self._random = random.Random(seed)
        self.most = 0

    async def generate(self, input_ids, sampling_params, session_id=None):
        tokens, new, versions, log_probs = list(input_ids), [], [], []
        aborts = self._aborts
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            async with self._gpus:
                finish = "length"
                while len(new) < sampling_params["max_new_tokens"]:
                    for _ in range(self._random.randint(0, self._slowest)):
                        await asyncio.sleep(0)
                    if self._aborts != aborts:
                        finish = "abort"
                        break
                    number = draw(tokens, sampling_params.get("sampling_seed", 1))
                    tokens.append(number % 256)
                    new.append(number % 256)
                    versions.append(str(self.version))
                    log_probs.append(-(self.version + number % 1000 / 1100))
                    if number % END_IN == 0:
                        finish = "stop"
                        break
            spans = [[version, len(list(run))] for version, run in groupby(versions)]
            return Generation(new, log_probs, finish, versions[-1] if new else "", version_spans=spans)
        finally:
            self.in_flight -= 1


@dataclasses.dataclass
class Run:
    """The trained samples of a run, by rollout, every scored group, and the final data state."""

    trained: list
    scored: list
    metrics: list
    bounds: list
    state: dict
    updated_under_requests: int
    most: int


def run(
    args,
    tokenizer,
    rollouts,
    *,
    slowest=2,
    gpus=1000,
    concurrency=1000,
    crashes=None,
    drained=False,
    seed=0,
    evaluate_at=(),
    end=None,
):
    """As train_async.py: the next rollout is asked for before this one trains; a checkpoint after each second one.

    After rollout r of `crashes` = {r: (iterations, bound)} the run is killed that many iterations of the event loop
    later and resumes from its last checkpoint with another staleness bound, like a new process.
    """
    crashes, chance = dict(crashes or {}), random.Random(seed)
    args = dataclasses.replace(args, custom={"scored": []})
    scored, trained, metrics, bounds = args.custom["scored"], [], [], []
    saved, last_state, under_requests, most = (0, None), {}, 0, 0

    async def life(bound):
        """One launch, from its start to the end or to a crash."""
        nonlocal saved, last_state, under_requests, most
        begin = saved[0]
        own = dataclasses.replace(args, max_weight_staleness=bound, update_weights_in_flight=not drained)
        engine, source = ContinuingEngine(gpus, slowest, seed), RolloutDataSource(own, tokenizer)
        engine.version = begin
        generator = RolloutGenerator.from_args(own, tokenizer, engine)
        generator.start_async(source, lambda: concurrency)
        stream = generator.continuous
        if saved[1] is not None:
            stream.restore(inflight_groups.restore(source, json.loads(saved[1]), keeps_finished=True))
        stream.set_weight_version(begin, end or rollouts)
        work = asyncio.create_task(generator.generate_rollout(begin, source))
        try:
            for rollout in range(begin, rollouts):
                output = await work
                trained.append(output.groups)
                metrics.append(output.metrics)
                bounds.append(bound)
                last_state = output.data_state
                if rollout + 1 < rollouts:
                    work = asyncio.create_task(generator.generate_rollout(rollout + 1, source))
                state = json.dumps(output.data_state)
                turns, next_bound = crashes.pop(rollout, (None, None))
                for _ in range(chance.randint(0, 60) if turns is None else turns):
                    await asyncio.sleep(0)
                if turns is not None:
                    return next_bound
                if (rollout + 1) % 2 == 0:
                    saved = (rollout + 1, state)
                if drained:
                    await stream.drain()
                    assert engine.in_flight == 0
                under_requests += engine.in_flight > 0
                engine.version = rollout + 1
                stream.set_weight_version(rollout + 1, end or rollouts)
                if rollout in evaluate_at:
                    await evaluate(generator, rollout)
            return None
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await stream.stop()
            generator.close()
            most = max(most, engine.most)
            assert len(asyncio.all_tasks()) == 1 and engine.in_flight == 0

    async def main():
        bound = args.max_weight_staleness
        while (next_bound := await life(bound)) is not None:
            bound = next_bound
            for kept in (trained, scored, metrics, bounds):
                del kept[saved[0] :]

    asyncio.run(main())
    return Run(trained, scored, metrics, bounds, last_state, under_requests, most)


async def evaluate(generator, rollout):
    before = generator.progress()
    results = await generator.evaluate(rollout)
    assert all(len(result.samples) == PROMPTS for result in results.values())
    assert generator.progress()[1] == before[1]


def left(state: dict) -> list[int]:
    """Indices of the groups that a checkpoint has as sampled and not trained."""
    waiting = [group[0] for group in state["returned"]]
    waiting += [one["group"][0] for one in state["inflight_groups"]["finished"]]
    waiting += [group[0] for group in state["inflight_groups"]["unfinished"]]
    return [sample["group_index"] for sample in waiting]


def check(done: Run, args, tokenizer) -> None:
    """Each prompt once per epoch; each token sampled by the weights of its span; none beyond the staleness bound."""
    size = args.n_samples_per_prompt
    total = done.state["next_group_index"]
    scored = [number for numbers in done.scored for number in numbers]
    assert Counter(scored) + Counter(left(done.state)) == Counter(range(total))
    order = [group[0].prompt for group in RolloutDataSource(args, tokenizer).get_samples(total)]
    for epoch in range(total // PROMPTS):
        assert len(set(order[epoch * PROMPTS : (epoch + 1) * PROMPTS])) == PROMPTS
    for rollout, (groups, bound) in enumerate(zip(done.trained, done.bounds, strict=True)):
        assert len(groups) == args.rollout_batch_size
        numbers = [group[0].group_index for group in groups]
        assert set(numbers) <= set(done.scored[rollout])
        if args.dynamic_sampling_filter_path is None:
            assert sorted(numbers) == sorted(done.scored[rollout])
        for group in groups:
            assert [sample.index for sample in group] == [group[0].group_index * size + place for place in range(size)]
            for sample in group:
                check_sample(sample, rollout, bound, order[sample.group_index], args, tokenizer)


def check_sample(sample, rollout, bound, prompt, args, tokenizer) -> None:
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    response, _ = uninterrupted(ids, sampling_seed(args.rollout_seed, sample.index), LIMIT)
    assert sample.tokens == ids + response and sample.response == tokenizer.decode(response)
    versions = [int(-log_prob) for log_prob in sample.rollout_log_probs]
    assert sample.version_spans == [[str(version), len(list(run))] for version, run in groupby(versions)]
    assert versions == sorted(versions) and versions[-1] <= rollout
    assert rollout - versions[0] <= bound


def scripted(make_args, **changes):
    return scripted_engine.scripted(make_args, **{"max_weight_staleness": 2, **changes})


def test_requests_stay_in_flight_during_weight_updates_within_the_staleness_bound(make_args, tokenizer):
    args = scripted(make_args, rollout_batch_size=4, n_samples_per_prompt=3)
    done = run(args, tokenizer, 14, slowest=6)
    check(done, args, tokenizer)
    assert done.updated_under_requests >= 6
    samples = [sample for groups in done.trained for group in groups for sample in group]
    assert sum(len(sample.version_spans) > 1 for sample in samples) > 20
    assert sum(metrics["rollout/staleness/dropped"] for metrics in done.metrics) == 0
    assert left(done.state) == []  # groups that could not be trained any more were never started


def test_zero_staleness_is_synchronous(make_args, tokenizer):
    args = scripted(make_args, max_weight_staleness=0)
    done = run(args, tokenizer, 8, slowest=4)
    check(done, args, tokenizer)
    assert done.updated_under_requests == 0
    for rollout, groups in enumerate(done.trained):
        assert {tuple(map(tuple, s.version_spans)) for g in groups for s in g} == {
            ((str(rollout), s.response_length),) for g in groups for s in g
        }
        # exactly the batch was started, as in train.py: short prompts are not preferred
        assert sorted(g[0].group_index for g in groups) == list(range(4 * rollout, 4 * rollout + 4))


def test_drained_weight_update_gives_every_sample_one_version(make_args, tokenizer):
    args = scripted(make_args)
    done = run(args, tokenizer, 8, slowest=4, drained=True)
    check(done, args, tokenizer)
    assert all(len(s.version_spans) == 1 for groups in done.trained for group in groups for s in group)


def test_resumed_run_regenerates_expired_samples(make_args, tokenizer):
    args = scripted(make_args, rollout_batch_size=2, n_samples_per_prompt=3, max_weight_staleness=4)
    done = run(args, tokenizer, 16, slowest=8, crashes={5: (90, 0), 11: (4, 3)})
    check(done, args, tokenizer)
    assert sum(metrics["rollout/staleness/dropped"] for metrics in done.metrics) > 0


def test_requests_do_not_exceed_the_server_capacity(make_args, tokenizer):
    args = scripted(make_args, n_samples_per_prompt=3)
    done = run(args, tokenizer, 8, slowest=4, concurrency=12)
    check(done, args, tokenizer)
    assert 12 <= done.most < 12 + 3  # full groups, while there is capacity


def test_evaluation_does_not_disturb_requests_in_flight(make_args, make_eval_dataset, tokenizer):
    dataset = make_eval_dataset(custom_rm_path=f"{HERE}.score", rm_type=None)
    args = scripted(make_args, eval_datasets=[dataset])
    done = run(args, tokenizer, 10, slowest=4, evaluate_at=(1, 4, 5))
    check(done, args, tokenizer)
    assert done.updated_under_requests > 0


def test_ready_rollout_counts_the_time_since_the_previous_one(make_args, tokenizer):
    async def main():
        args = scripted(make_args, rollout_all_samples_process_path=None)
        source = RolloutDataSource(args, tokenizer)
        generator = RolloutGenerator.from_args(args, tokenizer, ContinuingEngine(1000, 2, 0))
        generator.start_async(source, lambda: 1000)
        times = []
        began = time.perf_counter()
        try:
            for rollout in (0, 1):
                generator.continuous.set_weight_version(rollout, 9)
                await asyncio.sleep(0.2)  # training, while groups finish
                output = await generator.generate_rollout(rollout, source)
                times.append(output.seconds)
        finally:
            await generator.continuous.stop()
            generator.close()
        return times, time.perf_counter() - began

    times, passed = asyncio.run(main())
    assert min(times) > 0.19 and sum(times) <= passed


def test_out_of_order_rollout_is_rejected(make_args, tokenizer):
    async def main():
        args = scripted(make_args)
        source = RolloutDataSource(args, tokenizer)
        generator = RolloutGenerator.from_args(args, tokenizer, ContinuingEngine(9, 1, 0))
        generator.start_async(source, lambda: 100)
        generator.continuous.set_weight_version(3, 9)
        try:
            with pytest.raises(ValueError, match="rollout 4 was requested, but 3 is next"):
                await generator.generate_rollout(4, source)
        finally:
            await generator.continuous.stop()
            generator.close()

    asyncio.run(main())


def test_failure_in_flight_is_raised_with_the_next_rollout_and_while_draining(make_args, tokenizer):
    class Failing(ContinuingEngine):
        async def generate(self, *arguments, **options):
            await asyncio.sleep(0.01)
            raise ConnectionError("no server")

    async def main(ask):
        args = scripted(make_args)
        source = RolloutDataSource(args, tokenizer)
        generator = RolloutGenerator.from_args(args, tokenizer, Failing(9, 1, 0))
        generator.start_async(source, lambda: 100)
        generator.continuous.set_weight_version(0, 9)
        try:
            with pytest.raises(RuntimeError, match=r"generation of sample \d+ .* failed: ConnectionError: no server"):
                await asyncio.wait_for(ask(generator, source), 10)
        finally:
            await generator.continuous.stop()
            generator.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main(lambda generator, source: generator.generate_rollout(0, source)))
    asyncio.run(main(lambda generator, source: generator.continuous.drain()))


def test_fully_async_checkpoint_is_resumed_by_any_other_mode(make_args, tokenizer):
    args = scripted(make_args, rollout_batch_size=3, max_weight_staleness=4)
    done = run(args, tokenizer, 5, slowest=20, end=9)
    waiting = left(done.state)
    assert done.state["inflight_groups"]["finished"] and done.state["inflight_groups"]["unfinished"]
    source = RolloutDataSource(args, tokenizer)
    assert inflight_groups.restore(source, json.loads(json.dumps(done.state)), keeps_finished=False) == []
    again = [group[0].group_index for group in source.get_samples(len(waiting) + 2)]
    scored = [number for numbers in done.scored for number in numbers]
    assert again[:-2] == waiting
    assert sorted(scored + again) == list(range(done.state["next_group_index"] + 2))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(1, 5),
    size=st.integers(2, 3),
    bound=st.integers(0, 4),
    slowest=st.integers(0, 8),
    filtered=st.booleans(),
    together=st.booleans(),
    drained=st.booleans(),
    crashes=st.dictionaries(st.integers(0, 8), st.tuples(st.integers(0, 120), st.integers(0, 3)), max_size=3),
    gpus=st.sampled_from([3, 8, 1000]),
    concurrency=st.sampled_from([4, 512]),
    seed=st.integers(0, 1000),
)
def test_sample_accounting_of_any_fully_async_run_balances(
    make_args, tokenizer, batch, size, bound, slowest, filtered, together, drained, crashes, gpus, concurrency, seed
):
    args = scripted(
        make_args,
        rollout_batch_size=batch,
        n_samples_per_prompt=size,
        max_weight_staleness=bound,
        dynamic_sampling_filter_path=FILTER if filtered else None,
        group_rm=together,
        custom_rm_path=f"{HERE}.score_group" if together else f"{HERE}.score",
        rollout_seed=seed,
    )
    done = run(
        args,
        tokenizer,
        9,
        slowest=slowest,
        gpus=gpus,
        crashes=crashes,
        drained=drained,
        seed=seed,
        concurrency=concurrency,
    )
    check(done, args, tokenizer)
    if not crashes:
        assert sum(metrics["rollout/staleness/dropped"] for metrics in done.metrics) == 0
