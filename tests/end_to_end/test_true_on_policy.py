"""Runs with --true-on-policy-mode: log-probabilities of training and engines differ by exactly 0 at every step."""

from __future__ import annotations

import pytest

from tests.end_to_end import harness
from tests.end_to_end.conftest import make_family
from tests.families.toys import TOYS
from tests.true_on_policy.test_equality import widened

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = 5
EXPERTS = {"expert_model_parallel_size": 2, "rollout_num_gpus_per_engine": 1}
HALVES = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "rollout_num_gpus_per_engine": 2}
LAYOUTS = {
    "two servers": {"tensor_model_parallel_size": 1, "rollout_num_gpus_per_engine": 1},
    "tensor 2": {"tensor_model_parallel_size": 2, "rollout_num_gpus_per_engine": 2, "sequence_parallel": True},
    "pipeline 2": {"pipeline_model_parallel_size": 2, "rollout_num_gpus_per_engine": 1},
}


def run(tiny, folder, **changes):
    flags = {
        "true_on_policy_mode": True,
        "colocate": True,
        "actor_num_gpus_per_node": 2,
        "num_rollout": STEPS,
        "num_steps_per_rollout": 2,
        "rollout_temperature": 0.8,
        "lr": 3e-3,
        "check_weight_update_equal": True,
        "sglang-enable-deterministic-inference": None,  # implied
        "sglang-disable-radix-cache": None,  # prefixes that are read from the cache have the same bits
        **changes,
    }
    folder.mkdir(exist_ok=True)
    done = harness.start("train.py", tiny.flags(**flags), folder, "exact", tiny.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    return done


def assert_exact(done):
    assert done.steps("weight_version") == [str(number) for number in range(STEPS)]
    assert done.steps("train_rollout_logprob_abs_diff_max") == [0.0] * STEPS
    assert done.steps("train_rollout_logprob_abs_diff_mean") == [0.0] * STEPS
    assert len(set(done.steps("grad_norm"))) == STEPS  # the weights changed
    assert done.summary["steps"][0]["rollout/kl"] == 0.0  # the reference model has the same operators


@pytest.mark.parametrize("layout", LAYOUTS)
def test_difference_is_zero_at_every_step(layout, tiny, tmp_path):
    assert_exact(run(tiny, tmp_path, **LAYOUTS[layout]))


@pytest.mark.parametrize("layout", [EXPERTS, HALVES | {"sequence_parallel": True}], ids=["expert 2", "tensor 2"])
def test_difference_is_zero_at_every_step_with_experts(layout, tiny, tmp_path):
    """Qwen3-MoE with random weights and rewards."""
    made = make_family(widened(TOYS["qwen3-moe"]), tiny, tmp_path / "qwen3-moe")
    assert_exact(run(made, tmp_path, **layout))


def test_other_batches_in_the_servers_change_no_number(tiny, tmp_path):
    first = run(tiny, tmp_path / "1", **LAYOUTS["two servers"])
    second = run(tiny, tmp_path / "2", **LAYOUTS["two servers"], sglang_server_concurrency=3)
    assert_exact(second)
    for name in ("reward", "loss", "grad_norm", "kl_loss", "ratio_max_abs_diff", "rollout/kl"):
        assert first.steps(name) == second.steps(name)
