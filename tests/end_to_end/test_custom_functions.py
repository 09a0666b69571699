"""A run over real engines with a custom function at every extension point."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch
from safetensors.torch import load_file

from slimrl.observability.rollout_dump import read_dump
from tests.end_to_end import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROLLOUTS = 2
FUNCTIONS = {
    "rollout_function_path": "examples.rollouts.counted",
    "rollout_sample_hook_path": "examples.samples.note_final_answer",
    "custom_rm_path": "examples.reward.shortest_wins",
    "group_rm": True,
    "rollout_all_samples_process_path": "examples.samples.write_unsolved",
    "custom_convert_samples_to_train_data_path": "examples.samples.without_truncated",
    "custom_rollout_log_function_path": "examples.logs.rollout",
    "eval_function_path": "examples.rollouts.with_total",
    "custom_eval_rollout_log_function_path": "examples.logs.evaluation",
    "loss_type": "custom_loss",
    "custom_loss_function_path": "examples.losses.high_entropy",
    "custom_advantage_function_path": "examples.advantages.discounted",
    "rollout_data_postprocess_path": "examples.training.leave_out_sure_tokens",
    "spec": ["examples.model", "watched_layers"],
    "custom_megatron_init_path": "examples.training.prepare",
    "custom_megatron_before_log_prob_hook_path": "examples.training.check_weights",
    "custom_megatron_before_train_step_hook_path": "examples.training.rest",
    "custom_update_weight_post_write_path": "examples.training.keep_a_copy",
}


@pytest.fixture(scope="module")
def done(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    own = {"mirror": "mirror", "unsolved": "unsolved.jsonl", "csv": "rewards.csv", "steps_at_rest": 1, "discount": 1.0}
    own |= {"entropy_share": 0.5, "sure": 1.5}
    (folder / "own.yaml").write_text(json.dumps({"custom": {k: _placed(folder, v) for k, v in own.items()}}))
    flags = tiny.flags(
        **FUNCTIONS,
        custom_config_path=folder / "own.yaml",
        actor_num_gpus_per_node=2,
        tensor_model_parallel_size=2,
        rollout_num_gpus=1,
        num_rollout=ROLLOUTS,
        update_weight_transport="disk",
        update_weight_disk_dir=folder / "weights",
        check_weight_update_equal=True,
        eval_interval=ROLLOUTS,
        skip_eval_before_train=True,
        eval_prompt_data=[
            "first",
            f"{tiny.folder / 'eval.jsonl'}@[0:8]",
            "second",
            f"{tiny.folder / 'eval.jsonl'}@[8:16]",
        ],
        save_debug_rollout_data=folder / "dumps/{rollout_id}.jsonl",
    )
    run = harness.start("train.py", flags, folder, "own", tiny.home).finish(250)
    assert run.code == 0, run.output[-6000:]
    assert run.left == []
    run.folder = folder
    return run


def _placed(folder, value):
    return str(folder / value) if isinstance(value, str) else value


def samples_of(done, rollout_id):
    return read_dump(done.folder / f"dumps/{rollout_id}.jsonl").samples


def test_loss_matches_the_recorded_samples(done):
    """In a first step every ratio is 1, so that the loss is the negative mean of the answers' advantages."""
    for rollout_id, loss in enumerate(done.steps("loss")):
        samples = samples_of(done, rollout_id)
        groups = {}
        for sample in samples:
            groups.setdefault(sample.group_index, []).append(sample.reward)
        expected = [
            0.0 if sample.status == "truncated" else sum(groups[sample.group_index]) / 4 - sample.reward
            for sample in samples
        ]
        assert loss == pytest.approx(sum(expected) / len(samples), abs=1e-5)
    assert all(
        entropy > plain for entropy, plain in zip(done.steps("chosen_entropy"), done.steps("entropy"), strict=True)
    )


def test_watched_layers_and_copied_weights_match_the_engines(done):
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-3
    assert done.output.count("equal the trained ones, bit for bit") == 1
    folders = sorted((done.folder / "mirror").iterdir())
    assert [folder.name for folder in folders] == [f"weight_v{version:06d}" for version in range(ROLLOUTS + 1)]
    assert list((done.folder / "weights").iterdir()) == []
    first, rested, last = (
        {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()} for folder in folders
    )
    assert all(torch.equal(first[name], rested[name]) for name in first)  # the first step had no learning rate
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_written_reports_match_the_records(done):
    unsolved, lines = [], []
    for rollout_id in range(ROLLOUTS):
        samples = samples_of(done, rollout_id)
        rewards = [sample.reward for sample in samples]
        assert set(rewards) <= {0.0, 0.5, 1.0}
        assert all(s.metadata["final_answer"] == (s.response.strip().splitlines() or [""])[-1].strip() for s in samples)
        groups = [samples[start : start + 4] for start in range(0, len(samples), 4)]
        missed = [group for group in groups if not any(sample.reward for sample in group)]
        unsolved += [group[0].label for group in missed]
        lines.append([str(rollout_id), "train", sum(rewards) / len(rewards)])
        assert done.steps("reward")[rollout_id] == pytest.approx(sum(rewards) / len(rewards))
    assert [json.loads(line)["label"] for line in (done.folder / "unsolved.jsonl").read_text().splitlines()] == unsolved
    with open(done.folder / "rewards.csv") as file:
        rows = list(csv.reader(file))
    assert [row[:2] for row in rows] == [line[:2] for line in lines] + [
        [str(ROLLOUTS), n] for n in ("first", "second", "total")
    ]
    assert [float(row[2]) for row in rows[:ROLLOUTS]] == pytest.approx([line[2] for line in lines])
    first, second, total = (float(row[2]) for row in rows[ROLLOUTS:])
    assert total == pytest.approx((first + second) / 2) and not math.isnan(total)


def test_every_rank_ran_the_pre_model_hook(done):
    for rank in range(2):
        assert f"rank {rank} of 2 is ready" in (done.run_dir / f"logs/train-rank{rank}.log").read_text()
