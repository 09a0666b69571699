"""Supervised training: the samples are the conversations of the data, and no engine runs."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tests.end_to_end import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FLAGS = {
    "rollout_function_path": "slime.rollout.sft_rollout.generate_rollout",
    "loss_type": "sft_loss",
    "disable_compute_advantages_and_returns": True,
    "calculate_per_token_loss": True,
    "debug_train_only": True,
    "input_key": "messages",
    "n_samples_per_prompt": 1,
    "num_rollout": 20,
    "actor_num_gpus_per_node": 2,
    "rollout_shuffle": False,
} | dict.fromkeys(
    ("rm_type", "label_key", "apply_chat_template", "use_kl_loss", "kl_loss_coef", "kl_loss_type")
    + ("advantage_estimator", "eps_clip", "eps_clip_high")
    + ("rollout_max_response_len", "sglang_enable_deterministic_inference", "sglang_disable_radix_cache")
)


def conversation(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"say {number}"},
        {"role": "assistant", "content": f"{number}" * 3},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": f"{number}"},
    ]


def negative_log_likelihood(folder, conversations) -> float:
    """Mean over the assistant's tokens, from transformers; the tokens are found by rendering turn by turn."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = []
    for messages in conversations:
        ids, trained = [], []
        for message in messages:
            text = f"<|im_start|>{message['role']}\n"
            words = f"{message['content']}<|im_end|>"
            for piece, chosen in ((text, False), (words, message["role"] == "assistant"), ("\n", False)):
                piece_ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
                ids += piece_ids
                trained += [chosen] * len(piece_ids)
        with torch.no_grad():
            log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        losses += [-log_probs[place - 1, ids[place]].item() for place in range(1, len(ids)) if trained[place]]
    return sum(losses) / len(losses)


def test_supervised_training_starts_at_the_transformers_loss_and_learns(tiny, tmp_path):
    conversations = [conversation(number % 10) for number in range(8)]
    data = tmp_path / "conversations.jsonl"
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    saving = {"save": tmp_path / "checkpoints", "save_interval": 5, "save_total_limit": 2, "async_save": True}
    saving |= {"save_hf": tmp_path / "hf_{rollout_id}", "load": tmp_path / "checkpoints"}
    unseen = [conversation(number) for number in range(10, 24)]
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in unseen))
    saving |= {"eval_interval": 10, "eval_prompt_data": ["unseen", held_out], "eval_input_key": "messages"}
    flags = tiny.flags(prompt_data=data, **FLAGS, **saving)
    started = harness.start("train_async.py", flags, tmp_path, "sft", tiny.home)
    done = started.finish(200)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    losses = done.steps("loss")
    assert losses[0] == pytest.approx(negative_log_likelihood(tiny.model, conversations), rel=1e-5)
    assert losses[-1] < losses[0] / 2
    assert done.steps("perplexity") == pytest.approx([math.exp(loss) for loss in losses])
    assert " | ppl " in done.output and " tokens | " in done.output and "reward 0" not in done.output
    assert "weight update" not in done.output and " kl " not in done.output  # nothing of reinforcement learning
    assert "sglang" not in done.output.lower().replace(str(tmp_path).lower(), "")
    assert f"--load {tmp_path}/checkpoints has no checkpoint yet: a fresh start from --ref-load" in done.output
    assert f"saving {tmp_path}/checkpoints/iter_0000014 in the background" in done.output
    kept = ["iter_0000014", "iter_0000019", "latest_checkpointed_iteration.txt"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == kept
    for saved in (4, 9, 14):  # the export made during training has the weights that the next rollout was trained with
        exported = negative_log_likelihood(tmp_path / f"hf_{saved}", conversations)
        assert losses[saved + 1] == pytest.approx(exported, rel=1e-5)
    assert (tmp_path / "hf_19" / "config.json").is_file()
    history = done.summary["eval"]["history"]
    assert [entry["step"] for entry in history] == [0, 10, 20]
    for entry, folder in ((history[0], tiny.model), (history[-1], tmp_path / "hf_19")):
        loss = negative_log_likelihood(folder, unseen)
        expected = {"eval/unseen": math.exp(loss), "eval/unseen-loss": loss}
        assert entry["metrics"] == pytest.approx(expected, rel=1e-5)
    memory = done.summary["steps"][0]
    for kind in ("parameters", "gradients", "optimizer"):  # except step counters and the padding of shards
        assert memory[f"memory_{kind}"] == pytest.approx(memory[f"planned_memory_{kind}"], rel=1e-2)
    assert memory["memory_activations"] > 0
    logs = [path.read_text() for path in (done.run_dir / "logs").rglob("*") if path.is_file()]
    assert sum("memory of rank 0: parameters" in text for text in logs) == 1
