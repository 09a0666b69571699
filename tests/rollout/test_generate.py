"""The rollout loop: full batches in order, no lost sample, no leaked task, named failures."""

import asyncio
import json
import random
import sys

import pytest

from slimrl.data.sample import SampleStatus
from slimrl.engines.protocol import Generation, sampling_seed
from slimrl.hooks import HookFailedError
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.generation.multi_turn import stop_tokens
from slimrl.rollout.generation.sample_generator import SampleError
from slimrl.rollout.rollout_generator import RolloutGenerator

FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"

HOOKS = """
import asyncio
import copy
from slimrl.data.sample import Sample, SampleStatus

def answer(sample, text):
    sample.tokens = sample.tokens + [1, 2, 3]
    sample.response_length, sample.response = 3, text
    sample.loss_mask, sample.rollout_log_probs = [1, 0, 1], [-1.0, 0.0, -1.0]
    sample.status = SampleStatus.COMPLETED
    return sample

async def generate(args, sample, sampling_params, evaluation=False):
    sample.metadata["seen"] = [sampling_params["max_new_tokens"], evaluation]
    return answer(sample, "\\\\boxed{0}")

async def fan_out(args, sample, sampling_params):
    return [answer(copy.deepcopy(sample), text) for text in ("\\\\boxed{0}", "\\\\boxed{1}")]

async def forgets_its_log_probs(args, sample, sampling_params):
    answer(sample, "x").rollout_log_probs.pop()
    return sample

async def still_pending(args, sample, sampling_params):
    return sample

async def returns_text(args, sample, sampling_params):
    return "text"

async def failing_reward(args, sample, **kwargs):
    if sample.index == 5:
        raise KeyError("score")
    return 1.0

def reverse_rollout(args, rollout_id, data_source, *, evaluation, generator=None):
    from slimrl.rollout.sglang_rollout import generate_rollout
    output = generate_rollout(args, rollout_id, data_source, evaluation=evaluation, generator=generator)
    return output if evaluation else output.groups[::-1]

def twice(args, rollout_id, data_source, *, evaluation, generator=None):
    return 2 * generator.rollout(rollout_id, data_source).groups

def without_one(args, rollout_id, data_source, *, evaluation, generator=None):
    first, *others = generator.rollout(rollout_id, data_source).groups
    return [first[1:], *others]

def half(args, rollout_id, data_source, *, evaluation, generator=None):
    return generator.rollout(rollout_id, data_source).groups[:2]

def lonely_rollout(args, rollout_id, data_source, *, evaluation):
    from slimrl.rollout.sglang_rollout import generate_rollout
    return generate_rollout(args, rollout_id, data_source, evaluation=evaluation)

def empty_rollout(args, rollout_id, data_source, *, evaluation):
    return []

async def slow_first(args, sample, sampling_params):
    if sample.group_index < 2:
        for changing in (sample.tokens, sample.label, sample.metadata["tags"]):
            changing.append(1)
        await asyncio.sleep(30)
    return answer(sample, "x")

async def one(args, sample):
    return 1.0

def keep(args, samples):
    return True

def drop_odd(args, samples):
    return samples[0].group_index % 2 == 0

def drop_all(args, samples):
    return False
"""


@pytest.fixture
def hooks(tmp_path, monkeypatch):
    (tmp_path / "rollout_hooks.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "rollout_hooks"
    sys.modules.pop("rollout_hooks", None)


@pytest.fixture
def roll(make_args, tokenizer, fake_engine):
    """Runs `rollouts` rollouts; returns their outputs, the engine and the data source, and checks for leaked tasks."""

    def run(engine=None, rollouts=1, source=None, **overrides):
        args = make_args(**overrides)
        engine = engine or fake_engine()
        source = source or RolloutDataSource(args, tokenizer)

        async def main():
            generator = RolloutGenerator.from_args(args, tokenizer, engine)
            try:
                return [await generator.generate_rollout(number, source) for number in range(rollouts)]
            finally:
                assert len(asyncio.all_tasks()) == 1, "tasks were left running"
                assert engine.in_flight == 0
                generator.close()

        return asyncio.run(main()), engine, source

    return run


def test_rollout_is_complete_and_in_order_regardless_of_finish_order(roll, fake_engine, tokenizer):
    delays = random.Random(0)
    engine = fake_engine(delay=lambda prompt, call: delays.random() / 50)
    (output, second), _, _ = roll(engine, rollouts=2)
    assert [[sample.index for sample in group] for group in output.groups] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [[sample.index for sample in group] for group in second.groups] == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert output.metrics == {}
    for group in output.groups:
        for sample in group:
            number = sample.group_index
            response = tokenizer(f"\\boxed{{{2 * number}}}", add_special_tokens=False)["input_ids"]
            assert sample.prompt == f"{number}+{number}="
            assert sample.tokens == tokenizer(sample.prompt, add_special_tokens=False)["input_ids"] + response
            assert sample.response_length == len(response)
            assert sample.response == f"\\boxed{{{2 * number}}}"
            assert sample.loss_mask == [1] * len(response)
            assert sample.rollout_log_probs == [-0.5] * len(response)
            assert sample.weight_versions == ["3"]
            assert sample.status is SampleStatus.COMPLETED
            assert sample.reward == 1.0


def test_prompts_are_sent_as_token_ids_with_one_seed_each(roll, tokenizer):
    _, engine, _ = roll(sglang_options={"enable_deterministic_inference": True})
    seeds = {tuple(ids): set() for ids, _ in engine.requests}
    for ids, params in engine.requests:
        seeds[tuple(ids)].add(params["sampling_seed"])
    first = tuple(tokenizer("0+0=", add_special_tokens=False)["input_ids"])
    assert seeds[first] == {sampling_seed(42, 0), sampling_seed(42, 1)}
    assert len({params["sampling_seed"] for _, params in engine.requests}) == 8


def test_response_at_the_limit_is_truncated(roll):
    (output,), _, _ = roll(rollout_max_response_len=4)
    assert all(sample.status is SampleStatus.TRUNCATED for group in output.groups for sample in group)
    assert all(sample.response == "\\box" and sample.reward == 0.0 for group in output.groups for sample in group)


def test_failing_engine_ends_the_rollout_with_the_sample_and_no_pending_task(roll, fake_engine):
    def reply(prompt, call):
        if prompt == "2+2=":
            raise ConnectionError("server 1 is gone")
        return "\\boxed{0}"

    engine = fake_engine(reply, delay=lambda prompt, call: 0.01 if prompt == "2+2=" else 30.0)
    with pytest.raises(SampleError) as caught:
        roll(engine)
    assert str(caught.value) == (
        "generation of sample 4 (group 2) failed: ConnectionError: server 1 is gone; its prompt: '2+2='"
    )
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_failing_reward_function_reports_sample_prompt_and_cause(roll, hooks):
    with pytest.raises(SampleError, match=r"reward of sample 5 \(group 2\) failed: KeyError: 'score'; its prompt"):
        roll(custom_rm_path=f"{hooks}.failing_reward")


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        (Generation([1, 2], [0.0], "stop", "1"), "2 tokens with 1 log-probs"),
        (Generation([1], [0.0], "tired", "1"), "unknown finish reason 'tired'"),
        (Generation([1], [0.0], "abort", "1"), "the sample's status is aborted"),
    ],
)
def test_invalid_engine_response_is_rejected(roll, fake_engine, generation, message):
    with pytest.raises(SampleError, match=message):
        roll(fake_engine(lambda prompt, call: generation))


def test_response_aborted_after_its_last_token_is_complete(roll, fake_engine, tokenizer):
    ended = Generation([5, tokenizer.eos_token_id], [0.0, 0.0], "abort", "1")
    (output,), _, _ = roll(fake_engine(lambda prompt, call: ended))
    assert {sample.status for group in output.groups for sample in group} == {SampleStatus.COMPLETED}


def test_response_aborted_after_its_stop_string_is_complete(roll, fake_engine, tokenizer):
    ended = Generation(tokenizer("ab<END>", add_special_tokens=False)["input_ids"], [0.0] * 7, "abort", "1")
    (output,), _, _ = roll(fake_engine(lambda prompt, call: ended), rollout_stop=["<END>"])
    assert {sample.status for group in output.groups for sample in group} == {SampleStatus.COMPLETED}


def test_stop_tokens_come_from_tokenizer_and_model(tmp_path, tokenizer):
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert stop_tokens(str(tmp_path), tokenizer) == {7, 9, tokenizer.eos_token_id}
    assert stop_tokens(None, tokenizer) == {tokenizer.eos_token_id}


def test_text_missing_from_the_engine_response_is_decoded(roll, fake_engine):
    (output,), _, _ = roll(fake_engine(lambda prompt, call: Generation([5], [0.0], "stop", "1", text="given")))
    assert output.groups[0][0].response == "given"


def test_cancelling_a_rollout_leaves_no_task(make_args, tokenizer, fake_engine):
    args = make_args()
    engine = fake_engine(delay=lambda prompt, call: 30.0)

    async def main():
        generator = RolloutGenerator.from_args(args, tokenizer, engine)
        work = asyncio.create_task(generator.generate_rollout(0, RolloutDataSource(args, tokenizer)))
        await asyncio.sleep(0.05)
        assert engine.in_flight == 8
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        generator.close()
        assert len(asyncio.all_tasks()) == 1 and engine.in_flight == 0

    asyncio.run(main())


def test_progress_counts_samples(make_args, tokenizer, fake_engine):
    args = make_args()

    async def main():
        generator = RolloutGenerator.from_args(args, tokenizer, fake_engine())
        assert generator.progress() == (0, 0)
        await generator.generate_rollout(0, RolloutDataSource(args, tokenizer))
        assert generator.progress() == (8, 8)
        generator.close()

    asyncio.run(main())


def test_second_generation_waits_for_the_first(make_args, make_eval_dataset, tokenizer, fake_engine):
    args = make_args(eval_datasets=[make_eval_dataset()])
    engine = fake_engine(delay=lambda prompt, call: 0.02)

    async def main():
        generator = RolloutGenerator.from_args(args, tokenizer, engine)
        rollout = asyncio.create_task(generator.generate_rollout(0, RolloutDataSource(args, tokenizer)))
        evaluation = asyncio.create_task(generator.evaluate(0))
        await rollout
        assert len(engine.requests) == 8
        assert len((await evaluation)["sums"].samples) == 12
        generator.close()

    asyncio.run(main())


def test_custom_generate_function_replaces_the_engine(roll, hooks):
    (output,), engine, _ = roll(custom_generate_function_path=f"{hooks}.generate")
    assert engine.requests == []
    sample = output.groups[0][0]
    assert sample.metadata["seen"] == [64, False]
    assert sample.loss_mask == [1, 0, 1] and sample.reward == 1.0
    # it may be a conversation, whose requests go to one server
    assert [one.session_id for one in output.groups[1]] == ["sample-2", "sample-3"]


def test_custom_generate_function_may_fan_out_with_a_custom_training_data_function(roll, hooks):
    convert = "examples.samples.without_truncated"
    fan_out = {"custom_generate_function_path": f"{hooks}.fan_out"}
    (output,), _, _ = roll(**fan_out, custom_convert_samples_to_train_data_path=convert)
    assert [len(group) for group in output.groups] == [4, 4, 4, 4]
    assert [sample.reward for sample in output.groups[0]] == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("forgets_its_log_probs", "rollout_log_probs has 2 entries but the response has 3 tokens"),
        ("still_pending", "the sample's status is pending: it must be completed or truncated"),
        ("returns_text", "must return a Sample .* or a list of them, not builtins.str: \\['text'\\]"),
        (
            "fan_out",
            "fan_out returned 2 samples for one, but a rollout has --rollout-batch-size x --n-samples-per-prom",
        ),
    ],
)
def test_custom_generate_function_contract_is_checked(roll, hooks, name, message):
    with pytest.raises(SampleError, match=message):
        roll(custom_generate_function_path=f"{hooks}.{name}")


def test_custom_rollout_function_may_use_the_built_in_one(roll, hooks):
    (output,), _, _ = roll(rollout_function_path=f"{hooks}.reverse_rollout")
    assert [group[0].group_index for group in output.groups] == [3, 2, 1, 0]


def test_custom_rollout_function_contract_is_checked(roll, hooks):
    with pytest.raises(TypeError, match="rollout_hooks.empty_rollout returned list: return RolloutOutput"):
        roll(rollout_function_path=f"{hooks}.empty_rollout")
    with pytest.raises(
        HookFailedError, match="lonely_rollout raised ValueError: .*accept the keyword argument `generator`"
    ):
        roll(rollout_function_path=f"{hooks}.lonely_rollout")


@pytest.mark.parametrize(("name", "count"), [("twice", 16), ("without_one", 7)])
def test_custom_rollout_function_with_another_number_of_steps_is_named(roll, hooks, name, count):
    with pytest.raises(
        HookFailedError, match=f"{name} returned {count} samples, but a rollout has at most 8 .*in steps"
    ):
        roll(rollout_function_path=f"{hooks}.{name}", global_batch_size=4)
    convert = "examples.samples.without_truncated"
    roll(
        rollout_function_path=f"{hooks}.{name}",
        global_batch_size=4,
        custom_convert_samples_to_train_data_path=convert,
    )


def test_custom_rollout_function_may_return_fewer_full_steps(roll, hooks):
    (output,), _, _ = roll(rollout_function_path=f"{hooks}.half", global_batch_size=4)
    assert len(output.groups) == 2


def test_built_in_rollout_function_is_the_default_under_both_names(roll):
    (output,), _, _ = roll(rollout_function_path="slime.rollout.sglang_rollout.generate_rollout")
    assert len(output.groups) == 4


# Dynamic sampling ----------------------------------------------------------------------------------------------------


def mixed(prompt, call):
    """Even sums are answered correctly by every second sample only, the others always correctly."""
    number = int(prompt.split("+")[0])
    return f"\\boxed{{{2 * number if number % 2 or call % 2 else -1}}}"


def test_filter_drops_groups_without_spread_and_the_batch_is_filled(roll, fake_engine):
    (output,), engine, source = roll(fake_engine(mixed), dynamic_sampling_filter_path=FILTER)
    assert [group[0].prompt for group in output.groups] == ["0+0=", "2+2=", "4+4=", "6+6="]
    assert output.metrics["rollout/dynamic_filter/drop_zero_std_1.0"] == 3.0
    assert output.metrics["rollout/dynamic_filter/carried_over"] == len(source.state_dict()["returned"])


def test_surplus_groups_are_returned_and_every_prompt_is_used_once(roll, fake_engine, hooks):
    # The slow prompts of the first wave are in progress when the batch is full: they must be returned unchanged.
    slow = {"1+1=", "6+6="}
    engine = fake_engine(delay=lambda prompt, call: 5.0 if prompt in slow and call < 16 else 0.0)
    outputs, engine, source = roll(
        engine,
        rollouts=3,
        over_sampling_batch_size=8,
        dynamic_sampling_filter_path=f"{hooks}.drop_odd",
        rollout_batch_size=2,
    )
    prompts = [group[0].prompt for output in outputs for group in output.groups]
    assert len(prompts) == len(set(prompts)) == 6
    assert sorted(prompts, key=lambda text: int(text.split("+")[0])) == [f"{i}+{i}=" for i in range(0, 12, 2)]
    assert engine.aborts >= 1
    for output in outputs:
        for group in output.groups:
            assert [sample.index for sample in group] == [2 * group[0].group_index, 2 * group[0].group_index + 1]
            assert all(sample.response_length == len(sample.rollout_log_probs) > 0 for sample in group)


def test_carried_over_groups_survive_a_checkpoint(roll, fake_engine, make_args, tokenizer, hooks):
    settings = {"over_sampling_batch_size": 12, "dynamic_sampling_filter_path": f"{hooks}.drop_odd"}
    _, _, source = roll(fake_engine(), rollout_batch_size=2, **settings)
    resumed = RolloutDataSource(make_args(), tokenizer)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    carried = source.get_samples(3)
    assert resumed.get_samples(3) == carried
    assert any(sample.status is SampleStatus.COMPLETED for group in carried for sample in group)


def test_filter_that_drops_everything_is_one_error(roll, hooks):
    with pytest.raises(RuntimeError, match=r"drop_all dropped 64 groups in a row \(\{'unnamed': 64\}\): the data is"):
        roll(dynamic_sampling_filter_path=f"{hooks}.drop_all")


def test_over_sampling_without_a_filter_samples_only_the_batch(roll):
    (output,), engine, source = roll(over_sampling_batch_size=12)
    assert len(engine.requests) == 8
    assert source.get_samples(1)[0][0].prompt == "4+4="


def test_regenerated_group_shares_nothing_with_its_former_samples(
    roll, fake_engine, hooks, make_args, tokenizer, write_rows
):
    rows = [{"prompt": f"{i}+{i}=", "label": [i], "metadata": {"tags": [i]}} for i in range(12)]
    data = {"prompt_data": write_rows(rows, "tagged.jsonl"), "custom_generate_function_path": f"{hooks}.slow_first"}
    settings = {"dynamic_sampling_filter_path": f"{hooks}.keep", "custom_rm_path": f"{hooks}.one"}
    _, _, source = roll(rollout_batch_size=2, over_sampling_batch_size=4, **data, **settings)
    returned = source.get_samples(2)
    assert [group[0].group_index for group in returned] == [0, 1]
    assert returned == RolloutDataSource(make_args(**data), tokenizer).get_samples(2)
