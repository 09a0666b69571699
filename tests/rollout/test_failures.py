"""A failing custom function is reported with its lines, or its group is skipped and replaced, up to a limit."""

from __future__ import annotations

import asyncio
import sys

import pytest

from slimrl.data.sample import SampleStatus
from slimrl.engines.protocol import EngineUnavailableError
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.generation.sample_generator import SampleError, is_infra_error
from slimrl.rollout.rm_hub.grader_pool import GraderPool, GraderUnavailable
from slimrl.rollout.rm_hub.remote import RemoteReward, RemoteUnreachable
from slimrl.rollout.rollout_generator import RolloutGenerator

FUNCTIONS = """
from slimrl.data.sample import SampleStatus
from slimrl.rollout.rm_hub import async_rm

failed = []

def divide(number):
    return 1 / number

async def reward(args, sample):
    if sample.group_index in (1, 4):
        failed.append(sample)
        divide(0)
    return 1.0

async def always(args, sample):
    raise KeyError("score")

async def generate(args, sample, sampling_params, engine=None):
    answer = await engine.generate(sample.tokens, sampling_params)
    sample.tokens = sample.tokens + answer.token_ids
    sample.response_length, sample.response = len(answer.token_ids), answer.text
    sample.loss_mask, sample.rollout_log_probs = [1] * len(answer.token_ids), answer.log_probs
    sample.status = SampleStatus.COMPLETED
    return sample

async def asks_the_hub(args, sample):
    return await async_rm(args, sample)

def hook(args, sample):
    if sample.index == 3:
        raise ValueError("no tool answered")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "failing_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "failing_functions"
    sys.modules.pop("failing_functions", None)


@pytest.fixture
def roll(make_args, tokenizer, fake_engine):
    """Two rollouts of four groups of two samples."""

    def run(engine=None, **overrides):
        args = make_args(**overrides)
        source = RolloutDataSource(args, tokenizer)

        async def main():
            generator = RolloutGenerator.from_args(args, tokenizer, engine or fake_engine())
            try:
                return [await generator.generate_rollout(number, source) for number in range(2)]
            finally:
                assert len(asyncio.all_tasks()) == 1, "tasks were left running"
                generator.close()

        return asyncio.run(main())

    return run


def test_failing_reward_is_reported_with_its_lines(roll, own, tmp_path):
    with pytest.raises(SampleError) as caught:
        roll(custom_rm_path=f"{own}.reward")
    text = str(caught.value)
    assert "the reward of sample " in text and "(group 1) failed: ZeroDivisionError: division by zero" in text
    first = FUNCTIONS[: FUNCTIONS.index("        divide(0)")].count("\n") + 1
    assert text.endswith(
        f"in --custom-rm-path {own}.reward"
        f"\n  {tmp_path}/failing_functions.py:{first} in reward: divide(0)"
        f"\n  {tmp_path}/failing_functions.py:{first - 5} in divide: return 1 / number"
    )


def test_failed_groups_are_replaced_to_fill_every_batch(roll, own):
    outputs = roll(custom_rm_path=f"{own}.reward", skip_failed_samples=True)
    groups = [[group[0].group_index for group in output.groups] for output in outputs]
    assert groups == [[0, 2, 3, 5], [6, 7, 8, 9]]  # 4 replaced 1, and 5 replaced 4
    assert [output.metrics for output in outputs] == [{"rollout/failed_samples": 2.0}, {"rollout/failed_samples": 0.0}]
    assert all(len(group) == 2 for output in outputs for group in output.groups)
    assert all(sample.status is SampleStatus.FAILED for sample in sys.modules[own].failed)


def test_always_failing_function_ends_the_run_at_the_limit(roll, own):
    with pytest.raises(SampleError, match="this is failure number 4 in this rollout, more than --max-failed-samples 3"):
        roll(custom_rm_path=f"{own}.always", skip_failed_samples=True, max_failed_samples=3)


def test_failing_sample_hook_is_skipped(roll, own):
    first, _ = roll(rollout_sample_hook_path=[f"{own}.hook"], skip_failed_samples=True)
    assert [group[0].group_index for group in first.groups] == [0, 2, 3, 4]
    assert first.metrics == {"rollout/failed_samples": 1.0}


@pytest.mark.parametrize("path", [None, "generate"])
def test_engine_failure_is_never_skipped(roll, own, fake_engine, path):
    def reply(prompt, call):
        raise EngineUnavailableError("no engine is left")

    with pytest.raises(SampleError, match="EngineUnavailableError: no engine is left") as caught:
        roll(
            fake_engine(reply),
            custom_generate_function_path=path and f"{own}.{path}",
            skip_failed_samples=True,
        )
    assert "this is failure number" not in str(caught.value)


@pytest.mark.parametrize("rm_type", ["f1", "remote_rm"])
def test_grader_and_service_failures_in_a_custom_reward_are_never_skipped(roll, own, monkeypatch, rm_type):
    async def closed(pool, request):
        raise GraderUnavailable("graders do not start")

    async def gone(service, body):
        raise RemoteUnreachable("the service is gone")

    monkeypatch.setattr(GraderPool, "grade", closed)
    monkeypatch.setattr(RemoteReward, "ask", gone)
    with pytest.raises(SampleError, match="graders do not start|the service is gone") as caught:
        roll(
            custom_rm_path=f"{own}.asks_the_hub",
            rm_type=rm_type,
            rm_url="http://127.0.0.1:9" if rm_type == "remote_rm" else None,
            skip_failed_samples=True,
        )
    assert "this is failure number" not in str(caught.value)  # the first failure ended it, not the limit


def test_engine_failure_is_found_behind_other_exceptions():
    try:
        try:
            raise EngineUnavailableError("gone")
        except EngineUnavailableError as error:
            raise ValueError("my function's own words") from error
    except ValueError as error:
        assert is_infra_error(error)
    assert not is_infra_error(ValueError("mine alone"))
    assert is_infra_error(MemoryError())


def test_engine_failure_is_found_in_an_exception_group():
    async def fails(error):
        raise error

    async def together(*errors):
        async with asyncio.TaskGroup() as group, asyncio.TaskGroup() as within:
            group.create_task(asyncio.sleep(0))
            for error in errors:
                within.create_task(fails(error))

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(together(KeyError("mine"), EngineUnavailableError("gone")))
    assert is_infra_error(caught.value)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(together(KeyError("mine"), ValueError("mine, too")))
    assert not is_infra_error(caught.value)
