"""Runs one after the other: supervised training then DPO, a reward model then PPO on its rewards, as the guides say.

With tasks of their own, and as the recipes that docs/recipes.md names, line by line.
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
from pathlib import Path

import pytest
import torch

from slimrl.observability import rollout_dump
from tests.end_to_end import harness, test_preference, test_supervised
from tests.end_to_end.test_reward_model_training import trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
EVEN, ODD = "02468", "13579"
PROMPTS = [[{"role": "user", "content": f"say {number}"}] for number in range(40)]


def even_share(folder: Path) -> float:
    """Mean over the prompts of the probability that an answer's first digit is even, of all digits; by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    even, odd = ([tokenizer.convert_tokens_to_ids(digit) for digit in digits] for digits in (EVEN, ODD))
    shares = []
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            likely = model(torch.tensor([ids])).logits[0, -1].softmax(-1)
        shares.append(float(likely[even].sum() / likely[even + odd].sum()))
    return sum(shares) / len(shares)


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_dpo_starts_from_the_supervised_model_and_moves_its_answers_to_the_preferred_ones(tiny, tmp_path):
    draw = random.Random(1)
    digits = [(prompt, draw.choice(EVEN + ODD)) for prompt in PROMPTS for _ in range(4)]
    talks = [{"messages": [*prompt, {"role": "assistant", "content": digit}]} for prompt, digit in digits]
    pairs = [
        {"prompt": prompt, "chosen": draw.choice(EVEN), "rejected": draw.choice(ODD)}
        for prompt in PROMPTS
        for _ in range(8)
    ]
    supervised, preferred = tmp_path / "sft-{rollout_id}", tmp_path / "dpo-{rollout_id}"
    stages = {
        "sft": {
            **test_supervised.FLAGS,
            "prompt_data": write_rows(tmp_path / "talks.jsonl", talks),
            "rollout_batch_size": 16,
            "num_rollout": 20,
            "lr": 4e-3,
            "save_hf": supervised,
        },
        "dpo": {
            **test_preference.FLAGS,
            "prompt_data": write_rows(tmp_path / "pairs.jsonl", pairs),
            "hf_checkpoint": tmp_path / "sft-19",
            "ref_load": tmp_path / "sft-19",
            "save_hf": preferred,
        },
    }
    ends = {}
    for name, flags in stages.items():
        line = tiny.flags(save=tmp_path / f"{name}-checkpoints", **flags)
        ends[name] = harness.start("train.py", line, tmp_path, name, tiny.home).finish(250)
        assert ends[name].code == 0, ends[name].output[-6000:]
        assert ends[name].left == []
    losses = ends["sft"].steps("loss")
    assert losses[-1] < 0.5 * losses[0]
    # policy and reference of the second run are the first run's model
    assert ends["dpo"].steps("pair_accuracy")[0] == 0.0 and ends["dpo"].steps("reward_margin")[0] == 0.0
    before, after = even_share(tmp_path / "sft-19"), even_share(tmp_path / f"dpo-{test_preference.STEPS - 1}")
    assert 0.3 < before < 0.7 and after > 0.95, (before, after)


def test_ppo_learns_what_the_trained_reward_model_prefers(tiny, tmp_path):
    rewarding, _ = trained(tiny, tmp_path, seed=1)
    dumps = str(tmp_path / "dump" / "{rollout_id}.jsonl")
    flags = tiny.flags(
        prompt_data=write_rows(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS]),
        label_key=None,
        rm_type="reward_model",
        rm_model=rewarding,
        advantage_estimator="ppo",
        critic_load=rewarding,
        critic_lr=2e-3,
        lr=2e-3,
        normalize_advantages=True,
        use_kl_loss=None,
        kl_loss_coef=None,
        actor_num_gpus_per_node=1,
        rollout_num_gpus=1,
        rollout_batch_size=16,
        rollout_max_response_len=6,
        num_rollout=12,
        save_debug_rollout_data=dumps,
    )
    done = harness.start("train.py", flags, tmp_path, "ppo", tiny.home).finish(350)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    shares, rewards = [], []
    for number in range(12):
        samples = rollout_dump.load_rollout(dumps, number).samples
        digits = [letter for sample in samples for letter in sample.response if letter in EVEN + ODD]
        shares.append(sum(digit in EVEN for digit in digits) / len(digits))
        rewards.append(sum(sample.reward for sample in samples) / len(samples))
    # the toy starts near one half of even digits: 0.5 to 0.75 in a rollout of 16 prompts
    assert rewards[-1] > rewards[0] + 1 and shares[-1] > 0.9 and shares[-1] > shares[0] + 0.2, (rewards, shares)


def documented(title: str) -> list[str]:
    """The two command lines of a pipeline in docs/recipes.md."""
    section = (harness.ROOT / "docs/recipes.md").read_text().partition("## From one recipe to the next")[2]
    (block,) = re.findall(rf"\*\*{title}\*\*.*?```bash\n(.*?)```", section, re.DOTALL)
    lines = block.replace("\\\n", " ").strip().splitlines()
    assert len(lines) == 2 and all(line.startswith("bash scripts/run-") for line in lines)
    return lines


def checkout(folder: Path) -> Path:
    """A copy of this checkout by links, in which recipes leave their results."""
    folder.mkdir()
    for path in harness.ROOT.iterdir():
        if path.name not in ("runs", ".git"):
            (folder / path.name).symlink_to(path)
    return folder


def run_line(line: str, folder: Path, home: Path) -> harness.Finished:
    """Runs a documented command line in a shell, as a user pastes it."""
    (recipe,) = re.findall(r"scripts/(run-[\w.-]+)\.sh --tiny", line)
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    place = {"log": home / f"{recipe}.out", "run_dir": folder / f"runs/{recipe}-tiny", "cwd": folder, "path": path}
    done = harness.launch(["bash", "-c", line], **place, home=home).finish(280)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    return done


def test_documented_recipe_of_ppo_trains_on_the_rewards_of_the_documented_reward_model(tmp_path):
    folder = checkout(tmp_path / "checkout")
    rewarding, following = documented("Reward model, then PPO with it.")
    done = run_line(rewarding, folder, tmp_path)
    first, *_, last = (entry["metrics"] for entry in done.summary["eval"]["history"])
    assert first["eval/held-out"] == 0 and last["eval/held-out"] > 0.8  # of 128 unseen pairs
    config = json.loads((folder / "rm_59/config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    done = run_line(following, folder, tmp_path)
    assert [step["weight_version"] for step in done.summary["steps"]] == ["0", "1"]
    assert all(map(math.isfinite, done.steps("critic-value_loss"))) and min(done.steps("critic-grad_norm")) > 0
    # the rewards are those of the served model: numbers of any size, where a rule gives 0 or 1
    rewards = [sample.reward for sample in rollout_dump.read_dump(done.run_dir / "rollouts/1.jsonl").samples]
    assert len(rewards) == 64 and len(set(rewards)) > 2


def test_documented_recipe_of_dpo_starts_from_the_documented_supervised_model(tmp_path):
    folder = checkout(tmp_path / "checkout")
    supervised, preferring = documented("Supervised training, then DPO.")
    done = run_line(supervised, folder, tmp_path)
    losses = done.steps("loss")
    assert losses[-1] < losses[0]
    done = run_line(preferring, folder, tmp_path)
    assert done.steps("reward_margin")[0] == 0.0  # policy and reference are the same model
    assert done.steps("reward_margin")[-1] > 0
    assert f"{folder}/sft" in done.output
