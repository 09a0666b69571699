"""A reward model is trained from comparisons, converted, and served to a run that trains on its rewards."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from slimrl.observability import rollout_dump
from tests import accuracy
from tests.end_to_end import harness
from tests.end_to_end.harness import ROOT
from tests.end_to_end.test_preference import FLAGS
from tests.reward_models import logits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS, GROUPS, REJECTED = 28, 16, 2
TRAINING = FLAGS | {
    "loss_type": "reward_model_loss",
    "n_samples_per_prompt": 1 + REJECTED,
    "margin_key": "margin",
    "rollout_batch_size": GROUPS,
    "num_rollout": STEPS,
    "input_key": "prompt",
}


def comparison(draw: random.Random) -> dict[str, object]:
    """An answer of even digits is preferred to answers of odd digits."""

    def digits(choices: str) -> str:
        return "".join(draw.choices(choices, k=draw.randint(1, 4)))

    rejected: list[str] = []
    while len(set(rejected)) < REJECTED:
        rejected = [digits("13579") for _ in range(REJECTED)]
    prompt = [{"role": "user", "content": f"say {draw.randrange(1000)}"}]
    return {"prompt": prompt, "chosen": digits("02468"), "rejected": rejected, "margin": draw.choice([0.0, 0.5])}


def token_ids(tokenizer, row: dict[str, object]) -> list[list[int]]:
    """The conversations with each answer, the preferred one first."""
    answers = [row["chosen"], *row["rejected"]]
    talks = [[*row["prompt"], {"role": "assistant", "content": answer}] for answer in answers]
    return [tokenizer.apply_chat_template(talk, return_dict=False) for talk in talks]


def trained(tiny, tmp_path: Path, seed: int) -> tuple[Path, float]:
    """Trains, checks the numbers of held-out comparisons, and converts: the folder, and the held-out accuracy."""
    from transformers import AutoTokenizer

    draw = random.Random(seed)
    rows = [comparison(draw) for _ in range(STEPS * GROUPS)]
    seen = {row["prompt"][0]["content"] for row in rows}
    unseen = [row for row in (comparison(draw) for _ in range(200)) if row["prompt"][0]["content"] not in seen]
    files = {"train": rows, "held-out": unseen}
    for name, those in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in those))
    saving = {"eval_interval": STEPS, "eval_prompt_data": ["unseen", tmp_path / "held-out.jsonl"]}
    saving |= {"eval_input_key": "prompt", "save": tmp_path / "checkpoints", "rollout_shuffle": False}
    saving |= {"save_hf": tmp_path / "hf_{rollout_id}"}
    flags = tiny.flags(prompt_data=tmp_path / "train.jsonl", **TRAINING, **saving)
    done = harness.start("train.py", flags, tmp_path, "rm", tiny.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    # the head begins with zeros, so every reward is 0 and a margin m costs log(1 + exp(m))
    margins = [row["margin"] for row in rows[:GROUPS]]
    expected = sum(math.log1p(math.exp(margin)) for margin in margins) / GROUPS
    assert done.summary["steps"][0]["loss"] == pytest.approx(expected, rel=1e-6)
    assert "reward 0" not in done.output and " | accuracy " in done.output

    folder = tmp_path / "reward-model"
    tool = [sys.executable, "tools/convert_torch_dist_to_hf.py", "--origin-hf-dir", str(tiny.model)]
    tool += ["--input-dir", str(tmp_path / f"checkpoints/iter_{STEPS - 1:07}"), "--output-dir", str(folder)]
    subprocess.run(tool, cwd=ROOT, check=True, capture_output=True, timeout=100)
    exported = tmp_path / f"hf_{STEPS - 1}"
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rewards = [logits(folder, token_ids(tokenizer, row)) for row in unseen]
    last = done.summary["eval"]["history"][-1]["metrics"]
    gaps = [[one[0] - other for other in one[1:]] for one in rewards]
    losses = [
        sum(math.log1p(math.exp(row["margin"] - gap)) for gap in of_row) / REJECTED
        for row, of_row in zip(unseen, gaps, strict=True)
    ]
    accuracy = sum(gap > 0 for of_row in gaps for gap in of_row) / sum(map(len, gaps))
    assert last["eval/unseen"] == pytest.approx(accuracy)
    assert last["eval/unseen-loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    margin = sum(map(sum, gaps)) / sum(map(len, gaps))
    assert last["eval/unseen-reward_margin"] == pytest.approx(margin, rel=1e-5)
    return folder, accuracy


@pytest.fixture(scope="module")
def reward_model(tiny, tmp_path_factory) -> tuple[Path, float]:
    """A trained reward model in Hugging Face's format, and its accuracy on unseen comparisons."""
    return trained(tiny, tmp_path_factory.mktemp("reward-model"), seed=1)


def test_trained_reward_model_prefers_unseen_answers(reward_model):
    folder, accuracy = reward_model
    assert accuracy >= 0.95
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and config["num_labels"] == 1


@pytest.mark.parametrize("seed", [2, 3])
def test_reward_model_of_other_data_prefers_unseen_answers(tiny, tmp_path, seed: int):
    _, accuracy = trained(tiny, tmp_path, seed)
    assert accuracy >= 0.95


def test_trained_reward_model_scores_the_samples_of_a_run(reward_model, tiny, tmp_path):
    from transformers import AutoTokenizer

    folder, _ = reward_model
    template = str(tmp_path / "dump" / "{rollout_id}.jsonl")
    flags = tiny.flags(
        rm_type="reward_model",
        rm_model=folder,
        label_key=None,
        actor_num_gpus_per_node=1,
        rollout_num_gpus=1,
        rollout_batch_size=4,
        num_rollout=1,
        save_debug_rollout_data=template,
    )
    done = harness.start("train.py", flags, tmp_path, "scored", tiny.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = rollout_dump.load_rollout(template, 0).samples
    read = [
        tokenizer.apply_chat_template(
            [
                *sample.metadata["prompt_messages"],
                {"role": "assistant", "content": sample.response.removesuffix("<|im_end|>")},
            ],
            return_dict=False,
        )
        for sample in samples
    ]
    accuracy.near_outputs([sample.reward for sample in samples], logits(folder, read), abs=1e-5)
