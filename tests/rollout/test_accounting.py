"""Sample accounting of full runs with aborts, filters, crashes and resumes: every prompt counts once per epoch."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slimrl.data.sample import Sample, SampleStatus
from slimrl.engines.protocol import sampling_seed
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.rollout_generator import RolloutGenerator
from tests.rollout.scripted_engine import LIMIT, ScriptedEngine, scripted, uninterrupted

HERE = "tests.rollout.scripted_engine"
FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
PROMPTS = 12


@dataclasses.dataclass
class Run:
    """The trained samples of a run, by rollout, and every scored group."""

    trained: list[list[list[Sample]]]
    scored: list[list[int]]
    source: RolloutDataSource
    metrics: list[dict[str, float]]


def run(args, tokenizer, rollouts: int, crashes: dict[int, int] | None = None, gpus: int = 1000) -> Run:
    """`rollouts` rollouts with a checkpoint after each second one.

    After rollout r of `crashes` the next one is killed after `crashes[r]` iterations of the event loop, and the run
    resumes from its last checkpoint like a new process: from the written state, with a new data source.
    """
    crashes = dict(crashes or {})
    args = dataclasses.replace(args, custom={"scored": []})
    scored = args.custom["scored"]
    fresh = lambda: RolloutDataSource(args, tokenizer)  # noqa: E731
    source, trained, metrics = fresh(), [], []
    saved = (0, json.dumps(source.state_dict()))

    async def main():
        nonlocal source, saved
        engine = ScriptedEngine(gpus)
        generator = RolloutGenerator.from_args(args, tokenizer, engine)
        while len(trained) < rollouts:
            number = engine.version = len(trained)
            work = asyncio.create_task(generator.generate_rollout(number, source))
            if number in crashes:
                for _ in range(crashes.pop(number)):
                    await asyncio.sleep(0)
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                del trained[saved[0] :], scored[saved[0] :], metrics[saved[0] :]
                source = fresh()
                source.load_state_dict(json.loads(saved[1]))
                continue
            output = await work
            trained.append(output.groups)
            metrics.append(output.metrics)
            if len(trained) % 2 == 0:
                saved = (len(trained), json.dumps(source.state_dict()))
            assert len(asyncio.all_tasks()) == 1 and engine.in_flight == 0
        generator.close()

    asyncio.run(main())
    return Run(trained, scored, source, metrics)


def waiting(source: RolloutDataSource) -> list[dict]:
    return [sample for group in source.state_dict()["returned"] for sample in group]


def check_accounting(done: Run, args, tokenizer) -> None:
    """Asserts that each prompt of each epoch was trained once, or dropped once, or is still pending once."""
    size = args.n_samples_per_prompt
    assert all(len(groups) == args.rollout_batch_size for groups in done.trained)
    scored = [number for numbers in done.scored for number in numbers]
    left = {sample["group_index"] for sample in waiting(done.source)}
    sampled = done.source.state_dict()["next_group_index"]
    assert Counter(scored) + Counter(left) == Counter(range(sampled))
    for rollout, groups in enumerate(done.trained):
        numbers = [group[0].group_index for group in groups]
        assert set(numbers) <= set(done.scored[rollout])
        if args.dynamic_sampling_filter_path is None:
            assert numbers == done.scored[rollout]
        for group in groups:
            assert [sample.index for sample in group] == [group[0].group_index * size + place for place in range(size)]
    order = [group[0].prompt for group in RolloutDataSource(args, tokenizer).get_samples(sampled)]
    for sample in (sample for groups in done.trained for group in groups for sample in group):
        assert sample.prompt == order[sample.group_index]
    for epoch in range(sampled // PROMPTS):
        assert len(set(order[epoch * PROMPTS : (epoch + 1) * PROMPTS])) == PROMPTS


def check_samples(done: Run, args, tokenizer) -> None:
    """Asserts that every trained response equals the uninterrupted one; its columns give each token's weights."""
    for rollout, groups in enumerate(done.trained):
        for sample in (sample for group in groups for sample in group):
            prompt = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
            response, ends = uninterrupted(prompt, sampling_seed(args.rollout_seed, sample.index), LIMIT)
            assert sample.tokens == prompt + response
            assert sample.response == tokenizer.decode(response)
            assert sample.response_length == len(response) == len(sample.rollout_log_probs) == len(sample.loss_mask)
            assert sample.status is (SampleStatus.COMPLETED if ends else SampleStatus.TRUNCATED)
            versions = [int(-log_prob) for log_prob in sample.rollout_log_probs]
            assert versions == sorted(versions)
            segments = [int(version) for version in sample.weight_versions]
            assert segments == sorted(set(versions))
            if args.mask_offpolicy_in_partial_rollout:
                assert sample.loss_mask == [int(version == rollout) for version in versions]
            else:
                assert sample.loss_mask == [1] * len(response)
            if segments != [rollout]:
                assert sample.metadata["start_rollout_id"] == segments[0]


def test_run_with_aborts_a_filter_and_a_resume_trains_every_prompt_once_per_epoch(make_args, tokenizer):
    args = scripted(
        make_args,
        partial_rollout=True,
        dynamic_sampling_filter_path=FILTER,
        rollout_batch_size=4,
        over_sampling_batch_size=10,
        n_samples_per_prompt=3,
    )
    done = run(args, tokenizer, rollouts=16, crashes={3: 7, 9: 20})
    check_accounting(done, args, tokenizer)
    check_samples(done, args, tokenizer)
    totals = Counter()
    for metrics in done.metrics:
        totals.update(metrics)
    assert done.source.epoch >= 4
    assert totals["rollout/partial/continued"] > 20 and totals["rollout/partial/unfinished"] > 20
    assert totals["rollout/dynamic_filter/drop_zero_std_0.0"] > 5


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(1, 5),
    surplus=st.integers(0, 9),
    size=st.integers(2, 3),
    partial=st.booleans(),
    mask=st.booleans(),
    discard=st.booleans(),
    filtered=st.booleans(),
    together=st.booleans(),
    crashes=st.dictionaries(st.integers(1, 8), st.integers(0, 40), max_size=3),
    gpus=st.sampled_from([3, 8, 1000]),
    seed=st.integers(0, 1000),
)
def test_sample_accounting_of_any_run_balances(
    make_args, tokenizer, batch, surplus, size, partial, mask, discard, filtered, together, crashes, gpus, seed
):
    args = scripted(
        make_args,
        rollout_batch_size=batch,
        over_sampling_batch_size=batch + surplus,
        n_samples_per_prompt=size,
        partial_rollout=partial,
        mask_offpolicy_in_partial_rollout=partial and mask,
        discard_surplus_groups=discard and not partial,
        dynamic_sampling_filter_path=FILTER if filtered else None,
        group_rm=together,
        custom_rm_path=f"{HERE}.score_group" if together else f"{HERE}.score",
        rollout_seed=seed,
    )
    done = run(args, tokenizer, rollouts=9, crashes=crashes, gpus=gpus)
    check_accounting(done, args, tokenizer)
    check_samples(done, args, tokenizer)
    if discard and not partial:  # every token was sampled by the weights it is trained with
        for rollout, groups in enumerate(done.trained):
            assert {v for group in groups for sample in group for v in sample.weight_versions} == {str(rollout)}
