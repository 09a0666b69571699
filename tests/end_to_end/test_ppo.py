"""PPO with a critic: real engines, offloading, a kill, and the critic that continues with the policy."""

from __future__ import annotations

import pytest

from slimrl.observability.metrics import metric_of
from slimrl.observability.metrics.registry import METRICS
from tests.end_to_end import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROLLOUTS = 4


def flags_of(tiny, folder):
    return tiny.flags(
        advantage_estimator="ppo",
        gamma=1.0,
        lambd=0.95,
        critic_lr=3e-3,
        num_critic_only_steps=1,
        normalize_reward=True,
        normalize_values=True,
        colocate=True,
        actor_num_gpus_per_node=2,
        tensor_model_parallel_size=2,
        num_rollout=ROLLOUTS,
        save=folder / "checkpoints",
        load=folder / "checkpoints",
        save_interval=1,
        save_total_limit=2,
    )


def test_critic_trains_beside_the_policy_and_resumes_with_it(tiny, tmp_path):
    flags = flags_of(tiny, tmp_path)
    killed = harness.start("train.py", flags, tmp_path, "killed", tiny.home)
    killed.wait_for_line("iter_0000001", 150)
    killed.kill_everything()
    done = harness.start("examples/flow.py", flags, tmp_path, "killed", tiny.home).finish(150)  # a user's own loop
    assert done.code == 0, done.output[-6000:]
    assert done.left == []

    assert f"resuming from {tmp_path}/checkpoints/iter_000000" in done.output
    assert done.steps("step") == list(range(ROLLOUTS))
    first, *others = done.summary["steps"]
    assert "grad_norm" not in first and first["critic-grad_norm"] > 0  # only the critic took its step
    assert all(step["grad_norm"] > 0 and step["critic-grad_norm"] > 0 for step in others)
    assert first["rollout/values"] == 0 and done.steps("rollout/values")[-1] != 0
    assert done.steps("rollout/log_probs")[0] < -0.01  # of the pass that runs because no step of the policy follows
    means = done.steps("reward")  # rollouts of one size: the run's mean is the mean of theirs
    running = [sum(means[: number + 1]) / (number + 1) for number in range(ROLLOUTS)]
    assert done.steps("rollout/running_reward/mean") == pytest.approx(running, abs=1e-6)
    unknown = [name for name in first if "/" in name and metric_of(name, METRICS) is None]
    unknown += [name for name in others[0] if "critic-" in name and metric_of(f"train/{name}", METRICS) is None]
    assert unknown == []
    kept = ["iter_0000002", "iter_0000003", "latest_checkpointed_iteration.txt"]
    for folder in ("checkpoints", "checkpoints/critic"):
        assert sorted({path.name for path in (tmp_path / folder).iterdir()} - {"critic"}) == kept
