"""Training on the score of a reward model that the run starts on the GPUs of training and rollout."""

import math

import pytest

from slimrl.observability import rollout_dump
from tests.end_to_end import harness
from tests.reward_models import logits, token_logits, write_reward_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def without_end(response: str) -> str:
    return response.removesuffix("<|im_end|>")


def test_every_training_and_eval_reward_is_the_model_logit(tiny, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    reward_model = write_reward_model(tmp_path / "judge", tokenizer, "Qwen3", seed=5)
    template = str(tmp_path / "dump" / "{rollout_id}.jsonl")
    flags = tiny.flags(
        rm_type="reward_model",
        rm_model=reward_model,
        label_key=None,
        actor_num_gpus_per_node=1,
        colocate=True,
        rm_colocate=True,
        rollout_batch_size=4,
        num_rollout=2,
        eval_interval=2,
        skip_eval_before_train=True,
        eval_prompt_data=["sums", f"{tiny.folder / 'eval.jsonl'}@[0:4]"],
        save_debug_rollout_data=template,
    )
    done = harness.start("train.py", flags, tmp_path, "judged", tiny.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    trained = [sample for number in (0, 1) for sample in rollout_dump.load_rollout(template, number).samples]
    evaluated = rollout_dump.load_rollout(template, 2, evaluation=True).samples
    read = [
        tokenizer.apply_chat_template(
            [*sample.metadata["prompt_messages"], {"role": "assistant", "content": without_end(sample.response)}],
            return_dict=False,
        )
        for sample in [*trained, *evaluated]
    ]
    assert any(sample.response.endswith("<|im_end|>") for sample in trained)
    rewards = [sample.reward for sample in [*trained, *evaluated]]
    assert len(trained) == 2 * 4 * 4 and len(evaluated) == 4
    assert rewards == pytest.approx(logits(reward_model, read), abs=1e-4)
    assert len({round(reward, 4) for reward in rewards}) > 5  # it scores
    means = [sum(rewards[first : first + 16]) / 16 for first in (0, 16)]
    assert done.steps("reward") == pytest.approx(means, abs=1e-4)
    # the policy's engine and the reward model have separate logs, and both were released before each training
    for name in ("sglang0.log", "sglang_reward0.log"):
        assert (done.run_dir / "logs" / name).read_text().count("POST /release_memory_occupation") >= 2, name


def test_steps_of_every_training_sample_are_rewarded_by_a_process_reward_model(tiny, tmp_path):
    """Beside the built-in reward at the end; the steps are those before and after the brace of the answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    model = write_reward_model(tmp_path / "prm", tokenizer, "Qwen3", seed=5, head="TokenClassification", labels=2)
    template = str(tmp_path / "dump" / "{rollout_id}.jsonl")
    flags = tiny.flags(
        advantage_estimator="reinforce_plus_plus",
        rm_model=model,
        rm_step_separator="{",
        rm_step_marker="!",
        rm_step_coef=0.25,
        actor_num_gpus_per_node=1,
        rollout_num_gpus=1,
        rollout_batch_size=4,
        num_rollout=1,
        save_debug_rollout_data=template,
    )
    done = harness.start("train.py", flags, tmp_path, "stepwise", tiny.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    samples = rollout_dump.load_rollout(template, 0).samples
    found = []
    for sample in samples:
        steps = [part for part in without_end(sample.response).split("{") if part.strip()]
        row = tokenizer.apply_chat_template(
            sample.metadata["prompt_messages"], add_generation_prompt=True, return_dict=False
        )
        ends = []
        for step in steps:
            row = [*row, *tokenizer(step)["input_ids"], *tokenizer("!")["input_ids"]]
            ends.append(len(row) - 1)
        outputs = token_logits(model, row)
        expected = [1 / (1 + math.exp(outputs[end][0] - outputs[end][1])) for end in ends]
        assert sample.metadata["step_rewards"] == pytest.approx(expected, abs=1e-5)
        assert [one for one in sample.token_rewards if one] == pytest.approx([0.25 * one for one in expected], abs=1e-5)
        assert len(sample.token_rewards) == sample.response_length
        found += expected
    assert max(found) - min(found) > 0.01 and len(found) > len(samples)
    assert done.steps("reward") == pytest.approx([sum(sample.reward for sample in samples) / len(samples)])
