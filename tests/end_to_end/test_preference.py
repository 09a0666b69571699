"""Training on pairs: margins grow, and the preference holds for pairs that the run never saw."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch

from tests.end_to_end import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS, PAIRS = 16, 16
KTO_STEPS = 24  # after 16, the accuracy is 0.88 to 0.97 by machine and seed
FLAGS = {
    "rollout_function_path": "slimrl.rollout.preference_rollout.generate_rollout",
    "loss_type": "preference_loss",
    "debug_train_only": True,
    "rollout_batch_size": PAIRS,
    "n_samples_per_prompt": 2,
    "num_rollout": STEPS,
    "actor_num_gpus_per_node": 2,
    "lr": 2e-3,
} | dict.fromkeys(
    ("rm_type", "label_key", "apply_chat_template", "use_kl_loss", "kl_loss_coef", "kl_loss_type", "eps_clip")
    + ("advantage_estimator", "eps_clip_high", "rollout_max_response_len")
    + ("sglang_enable_deterministic_inference", "sglang_disable_radix_cache")
)


def pair(draw: random.Random) -> dict[str, object]:
    """An answer of even digits is preferred to one of odd digits."""

    def digits(choices: str) -> str:
        return "".join(draw.choices(choices, k=draw.randint(1, 4)))

    prompt = [{"role": "user", "content": f"say {draw.randrange(1000)}"}]
    return {"prompt": prompt, "chosen": digits("02468"), "rejected": digits("13579")}


def log_probs(folder: Path, rows: list[dict[str, object]]) -> list[tuple[float, float]]:
    """Of both answers with their end token, from transformers; tokens are found by tokenizing piece by piece."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = []
    for row in rows:
        (message,) = row["prompt"]
        start = f"<|im_start|>user\n{message['content']}<|im_end|>\n<|im_start|>assistant\n"
        values = []
        for side in ("chosen", "rejected"):
            pieces = (start, f"{row[side]}<|im_end|>", "\n")
            before, answer, after = (tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces)
            with torch.no_grad():
                scores = model(torch.tensor([[*before, *answer, *after]])).logits[0].log_softmax(-1)
            values.append(sum(scores[len(before) + place - 1, token].item() for place, token in enumerate(answer)))
        found.append((values[0], values[1]))
    return found


def test_preference_of_unseen_pairs_is_learned(tiny, tmp_path):
    gaps = held_out_gaps(tiny, tmp_path, seed=1)
    assert len(gaps) > 200 and sum(gap > 0 for gap in gaps) / len(gaps) >= 0.95


def held_out_gaps(tiny, tmp_path, seed: int) -> list[float]:
    """Runs train.py on pairs, checks its numbers, and returns the margins of pairs that it never saw, without beta."""
    draw = random.Random(seed)
    rows = [pair(draw) for _ in range(STEPS * PAIRS)]
    seen = {row["prompt"][0]["content"] for row in rows}
    unseen = [row for row in (pair(draw) for _ in range(400)) if row["prompt"][0]["content"] not in seen]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in unseen))
    saving = {"eval_interval": 8, "eval_prompt_data": ["unseen", held_out], "eval_input_key": "prompt"}
    saving |= {"save": tmp_path / "checkpoints", "save_hf": tmp_path / "hf_{rollout_id}", "rollout_shuffle": False}
    flags = tiny.flags(prompt_data=data, **FLAGS, **saving)
    done = harness.start("train.py", flags, tmp_path, "pairs", tiny.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []

    first, last = done.summary["steps"][0], done.summary["steps"][-1]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert (first["reward_margin"], first["pair_accuracy"]) == (0.0, 0.0)  # policy and reference are equal
    scores = log_probs(tiny.model, rows[:PAIRS])
    for place, name in enumerate(("chosen_log_probs", "rejected_log_probs")):
        assert first[name] == pytest.approx(sum(score[place] for score in scores) / PAIRS, rel=1e-5)
    margins = done.steps("reward_margin")
    assert last["loss"] < 0.3 and sum(margins[-4:]) > sum(margins[4:8]) > sum(margins[:4])
    assert "reward 0" not in done.output and " | accuracy " in done.output

    before, after = (log_probs(folder, unseen) for folder in (tiny.model, tmp_path / f"hf_{STEPS - 1}"))
    gaps = [(own[0] - old[0]) - (own[1] - old[1]) for own, old in zip(after, before, strict=True)]
    history = done.summary["eval"]["history"]
    assert [entry["step"] for entry in history] == [0, STEPS // 2, STEPS]
    assert history[0]["metrics"]["eval/unseen-loss"] == pytest.approx(math.log(2), rel=1e-6)
    expected = {
        "eval/unseen": sum(gap > 0 for gap in gaps) / len(gaps),
        "eval/unseen-loss": sum(math.log1p(math.exp(-0.1 * gap)) for gap in gaps) / len(gaps),
        "eval/unseen-reward_margin": 0.1 * sum(gaps) / len(gaps),
    }
    assert history[-1]["metrics"] == pytest.approx(expected, rel=1e-4)
    assert 0.0 < history[1]["scores"]["unseen"] <= history[-1]["scores"]["unseen"]
    return gaps


def test_label_of_unseen_answers_is_learned_with_kto(tiny, tmp_path):
    """Runs train.py on answers with labels, and compares its last evaluation with the formulas on transformers."""
    draw = random.Random(2)
    rows = [labelled(draw) for _ in range(KTO_STEPS * PAIRS * 2)]
    unseen = [labelled(draw) for _ in range(200)]
    files = {"labelled.jsonl": rows, "held-out.jsonl": unseen}
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in lines))
    changes = {"preference_loss": "kto", "n_samples_per_prompt": 1, "rollout_batch_size": 2 * PAIRS}
    changes |= {
        "num_rollout": KTO_STEPS,
        "eval_interval": KTO_STEPS,
        "eval_prompt_data": ["unseen", tmp_path / "held-out.jsonl"],
    }
    changes |= {"eval_input_key": "prompt", "save_hf": tmp_path / "hf_{rollout_id}", "save": tmp_path / "checkpoints"}
    flags = tiny.flags(prompt_data=tmp_path / "labelled.jsonl", **{**FLAGS, **changes})
    done = harness.start("train.py", flags, tmp_path, "kto", tiny.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []

    first = done.summary["steps"][0]
    assert (first["loss"], first["kto_kl"], first["label_accuracy"]) == (
        0.5,
        0.0,
        0.0,
    )  # policy and reference are equal
    asked = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": unseen[place - 1]["completion"]}
        for place, row in enumerate(unseen)
    ]
    before, after = (log_probs(folder, asked) for folder in (tiny.model, tmp_path / f"hf_{KTO_STEPS - 1}"))
    gaps = [own[0] - old[0] for own, old in zip(after, before, strict=True)]
    kl = max(0.0, sum(own[1] - old[1] for own, old in zip(after, before, strict=True)) / len(unseen))
    signs = [1 if row["label"] else -1 for row in unseen]
    losses = [1 / (1 + math.exp(0.1 * sign * (gap - kl))) for sign, gap in zip(signs, gaps, strict=True)]
    means = [
        sum(gap for gap, own in zip(gaps, signs, strict=True) if own == sign) / signs.count(sign) for sign in (1, -1)
    ]
    last = done.summary["eval"]["history"][-1]["metrics"]
    accuracy = sum(sign * (gap - kl) > 0 for sign, gap in zip(signs, gaps, strict=True)) / len(unseen)
    expected = {"eval/unseen": accuracy, "eval/unseen-loss": sum(losses) / len(losses)}
    assert last == pytest.approx(expected | {"eval/unseen-reward_margin": 0.1 * (means[0] - means[1])}, rel=1e-4)
    assert accuracy >= 0.9


def labelled(draw: random.Random) -> dict[str, object]:
    """One answer of a pair, with its label."""
    both, label = pair(draw), draw.random() < 0.5
    return {"prompt": both["prompt"], "completion": both["chosen" if label else "rejected"], "label": label}
