"""Samples cut off when a rollout is full continue in the next one: budget, rewards, hooks, custom functions."""

from __future__ import annotations

import asyncio
import sys

import pytest

from slimrl.data.sample import SampleStatus
from slimrl.engines.protocol import sampling_seed
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.generation.sample_generator import SampleError
from slimrl.rollout.rollout_generator import RolloutGenerator
from tests.rollout.scripted_engine import ScriptedEngine, uninterrupted

LIMIT = 40

HOOKS = """
import asyncio
from slimrl.data.sample import SampleStatus

async def slow_for_some(args, sample):
    args.custom.setdefault("scored", []).append(sample.index)
    if sample.index % 2 and sample.index not in args.custom.setdefault("waited", []):
        args.custom["waited"].append(sample.index)
        await asyncio.sleep(30)
    return 1.0

async def one(args, sample):
    return 1.0

def count(args, sample, *, rollout_id=None, evaluation=False):
    args.custom.setdefault("seen", []).append((sample.index, rollout_id, evaluation))

async def two_turns(args, sample, sampling_params, engine=None, tokenizer=None):
    while sample.response_length < 60:
        answer = await engine.generate(sample.tokens, {**sampling_params, "max_new_tokens": 20})
        await asyncio.sleep(0.002)  # a tool
        sample.tokens = sample.tokens + answer.token_ids
        sample.response_length += len(answer.token_ids)
        sample.loss_mask = (sample.loss_mask or []) + [1] * len(answer.token_ids)
        sample.rollout_log_probs = (sample.rollout_log_probs or []) + answer.log_probs
        if answer.finish_reason == "abort":
            sample.status = SampleStatus.ABORTED
            return sample
    sample.status = SampleStatus.COMPLETED
    return sample

async def gives_up(args, sample, sampling_params, engine=None):
    sample.status = SampleStatus.ABORTED
    return sample
"""


@pytest.fixture
def hooks(tmp_path, monkeypatch):
    (tmp_path / "partial_hooks.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "partial_hooks"
    sys.modules.pop("partial_hooks", None)


class Recorder(ScriptedEngine):
    """Records the requests."""

    def __init__(self):
        super().__init__()
        self.asked = []
        self.generated = 0

    async def generate(self, input_ids, sampling_params, session_id=None):
        self.asked.append((list(input_ids), sampling_params["max_new_tokens"], sampling_params["sampling_seed"]))
        answer = await super().generate(input_ids, sampling_params, session_id)
        self.generated += len(answer.token_ids)
        return answer


def roll(make_args, tokenizer, hooks, rollouts, **changes):
    values = {
        "custom_rm_path": f"{hooks}.one",
        "rm_type": None,
        "partial_rollout": True,
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 6,
        "rollout_max_response_len": LIMIT,
        "sglang_options": {"enable_deterministic_inference": True},
    }
    args = make_args(**{**values, **changes})
    engine, source = Recorder(), RolloutDataSource(args, tokenizer)

    async def main():
        generator = RolloutGenerator.from_args(args, tokenizer, engine)
        outputs = []
        for number in range(rollouts):
            engine.version = number
            outputs.append(await asyncio.wait_for(generator.generate_rollout(number, source), 10))
        assert len(asyncio.all_tasks()) == 1 and engine.in_flight == 0
        generator.close()
        return outputs

    return asyncio.run(main()), engine, source, args


def test_continued_request_has_the_tokens_so_far_and_the_remaining_budget(make_args, tokenizer, hooks):
    outputs, engine, source, _ = roll(make_args, tokenizer, hooks, 6)
    lengths = {tuple(tokenizer(f"{i}+{i}=", add_special_tokens=False)["input_ids"]): i for i in range(12)}
    continued = 0
    for ids, budget, seed in engine.asked:
        prompt = next(prompt for prompt in lengths if tuple(ids[: len(prompt)]) == prompt)
        response, _ = uninterrupted(list(prompt), seed, LIMIT)
        made = len(ids) - len(prompt)
        assert ids[len(prompt) :] == response[:made]
        assert budget == LIMIT - made > 0
        continued += made > 0
    assert continued > 3
    for number, output in enumerate(outputs):
        samples = [sample for group in output.groups for sample in group]
        older = [sample for sample in samples if sample.metadata.get("start_rollout_id", number) < number]
        assert output.metrics["rollout/partial/continued"] == len(older)
        assert all(int(sample.weight_versions[0]) == sample.metadata["start_rollout_id"] for sample in older)
    assert {sampling_seed(42, index) for index in range(8)} <= {seed for _, _, seed in engine.asked}
    trained = [sample.response_length for output in outputs for group in output.groups for sample in group]
    waiting = [sample["response_length"] for group in source.state_dict()["returned"] for sample in group]
    assert engine.generated == sum(trained) + sum(waiting)  # no sampled token was wasted


def test_slow_reward_does_not_delay_a_full_rollout_and_hooks_run_once_per_sample(make_args, tokenizer, hooks):
    outputs, _, source, args = roll(
        make_args,
        tokenizer,
        hooks,
        1,
        custom_rm_path=f"{hooks}.slow_for_some",
        rollout_sample_hook_path=[f"{hooks}.count"],
        n_samples_per_prompt=1,
    )
    left = [group[0] for group in source.get_samples(4)]
    waiting = [sample for sample in left if sample.status is SampleStatus.COMPLETED and sample.reward is None]
    assert {sample.index for sample in waiting} >= set(args.custom["waited"]) > set()
    seen = args.custom["seen"]
    assert len(seen) == len(set(seen)) and {(sample.index, 0, False) for sample in waiting} <= set(seen)
    # they are scored in the next rollout, and no hook receives them again
    source.add_samples([[sample] for sample in left])

    async def main():
        generator = RolloutGenerator.from_args(args, tokenizer, ScriptedEngine())
        done = await asyncio.wait_for(generator.generate_rollout(1, source), 10)
        generator.close()
        return done

    done = asyncio.run(main())
    assert all(sample.reward == 1.0 for group in done.groups for sample in group)
    assert len({index for index, _, _ in args.custom["seen"]}) == len(args.custom["seen"])


def test_custom_generate_function_resumes_where_it_stopped(make_args, tokenizer, hooks):
    outputs, engine, source, _ = roll(
        make_args, tokenizer, hooks, 5, custom_generate_function_path=f"{hooks}.two_turns", n_samples_per_prompt=1
    )
    samples = [sample for output in outputs for group in output.groups for sample in group]
    assert sum(output.metrics["rollout/partial/continued"] for output in outputs) > 0
    for sample in samples:
        versions = [int(-log_prob) for log_prob in sample.rollout_log_probs]
        assert versions == sorted(versions) and 60 <= sample.response_length < 80
    waiting = [sample["response_length"] for group in source.state_dict()["returned"] for sample in group]
    assert engine.generated == sum(sample.response_length for sample in samples) + sum(waiting)
    numbers = [sample.group_index for sample in samples] + [group[0].group_index for group in source.get_samples(4)]
    assert len(set(numbers)) == len(numbers)


def test_function_that_aborts_by_itself_is_an_error(make_args, tokenizer, hooks):
    with pytest.raises(SampleError, match="the sample's status is aborted: it must be completed or truncated"):
        roll(make_args, tokenizer, hooks, 1, custom_generate_function_path=f"{hooks}.gives_up")
