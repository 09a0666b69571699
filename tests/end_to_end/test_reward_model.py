"""Training on the score of a reward model that the run starts on the GPUs of training and rollout."""

import pytest

from slimrl.observability import rollout_dump
from tests.end_to_end import harness
from tests.reward_models import logits, write_reward_model

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
