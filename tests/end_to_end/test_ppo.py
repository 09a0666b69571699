"""PPO with a critic: real engines, offloading, kills, and the critic that continues with the policy."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch

from slimrl.data.sample import Sample, SampleStatus
from slimrl.observability.metrics import metric_of
from slimrl.observability.metrics.registry import METRICS
from slimrl.observability.rollout_dump import save_rollout
from tests.end_to_end import checkpoints, harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROLLOUTS = 4


PLACES = {
    "in the policy's ranks": {"actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2},
    "on a GPU of its own": {"actor_num_gpus_per_node": 1, "critic_num_gpus_per_node": 1},
}


def flags_of(tiny, folder, place):
    return tiny.flags(
        **PLACES[place],
        advantage_estimator="ppo",
        gamma=1.0,
        lambd=0.95,
        critic_lr=3e-3,
        num_critic_only_steps=1,
        normalize_reward=True,
        normalize_values=True,
        colocate=True,
        num_rollout=ROLLOUTS,
        save=folder / "checkpoints",
        load=folder / "checkpoints",
        save_interval=1,
        save_total_limit=2,
    )


def killed_and_resumed(tiny, folder, place):
    """A run that was killed after its second save, and continued by a user's own loop."""
    flags = flags_of(tiny, folder, place)
    killed = harness.start("train.py", flags, folder, "killed", tiny.home)
    killed.wait_for_line("iter_0000001", 150)
    killed.kill_everything()
    done = harness.start("examples/flow.py", flags, folder, "killed", tiny.home).finish(150)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    return done


@pytest.mark.parametrize("place", PLACES)
def test_critic_trains_beside_the_policy_and_resumes_with_it(place, tiny, tmp_path):
    done = killed_and_resumed(tiny, tmp_path, place)
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


@pytest.mark.timeout(400)
def test_killed_run_with_a_critic_ends_bit_for_bit_like_an_undisturbed_one(tiny, tmp_path):
    place = "in the policy's ranks"
    undisturbed, disturbed = (tmp_path / name for name in ("undisturbed", "disturbed"))
    for folder in (undisturbed, disturbed):
        folder.mkdir()
    flags = flags_of(tiny, undisturbed, place)
    expected = harness.start("train.py", flags, undisturbed, "run", tiny.home).finish(150)
    assert expected.code == 0, expected.output[-6000:]
    done = killed_and_resumed(tiny, disturbed, place)
    begun = re.search(r"resuming from \S+/iter_(\d+)", done.output)
    assert begun is not None and 1 <= int(begun[1]) < ROLLOUTS - 1

    # the servers' own log-probabilities depend on which requests they compute together (docs/reproducibility.md)
    of_servers = {name for name in metrics_of_training(expected) if "rollout_log" in name}
    names = metrics_of_training(expected) - of_servers
    difference = "train_rollout_logprob_abs_diff"
    assert of_servers == {"rollout/rollout_log_probs", f"{difference}_max", f"{difference}_mean"}
    assert {"reward", "loss", "grad_norm", "critic-value_loss", "critic-grad_norm", "rollout/values"} <= names
    for one, other in zip(done.summary["steps"], expected.summary["steps"], strict=True):
        assert {name: one.get(name) for name in names} == {name: other.get(name) for name in names}
    for part in ("iter_0000003", "critic/iter_0000003"):
        folders = [root / "checkpoints" / part for root in (undisturbed, disturbed)]
        found = checkpoints.differences(*map(checkpoints.read, folders))
        assert [place for place in found if "saved_with" not in place] == []  # each pair has a name of its own


def record_rollouts(folder):
    """Random samples as dumps of rollouts; returns the template of their paths."""
    generator = torch.Generator().manual_seed(5)
    template = str(folder / "{rollout_id}.jsonl")

    def integers(low, high, count=1):
        return torch.randint(low, high, (count,), generator=generator).tolist()

    for rollout_id in range(ROLLOUTS):
        samples = []
        for place in range(32):
            prompt, response = integers(3, 9)[0], integers(1, 13)[0]
            samples.append(
                Sample(
                    prompt="recorded",
                    group_index=rollout_id * 8 + place // 4,
                    index=rollout_id * 32 + place,
                    tokens=integers(0, 20, prompt + response),
                    response_length=response,
                    rollout_log_probs=(-3 * torch.rand(response, generator=generator)).tolist(),
                    reward=float(integers(0, 2)[0]),
                    status=SampleStatus.COMPLETED,
                )
            )
        save_rollout(template, rollout_id, samples)
    return template


def replay(tiny, folder, template, critic_only=1, **changes):
    """PPO on recorded rollouts, without engines, two optimizer steps of each."""
    without = {"sglang_enable_deterministic_inference": None, "sglang_disable_radix_cache": None}
    return tiny.flags(
        **without,
        advantage_estimator="ppo",
        lambd=0.95,
        critic_lr=3e-3,
        num_critic_only_steps=critic_only,
        normalize_values=True,
        use_kl_loss=None,
        kl_loss_coef=None,
        kl_coef=0.05,
        num_steps_per_rollout=2,
        load_debug_rollout_data=template,
        actor_num_gpus_per_node=1,
        num_rollout=ROLLOUTS,
        save=folder / "checkpoints",
        load=folder / "checkpoints",
        save_interval=1,
        **changes,
    )


GATE = """
import time
from pathlib import Path


def hold(rollout_id, args, samples, extra_metrics, rollout_time):
    while Path(f"hold-{rollout_id}").exists():
        time.sleep(0.01)
    return False
"""
WAITS = {"critic": "the wait for the critic's values", "train": "the wait for the policy's advantages"}


def kill_rank_that_the_other_group_waits_for(role, rollout_id, flags, folder, home):
    """Holds a rollout back until the rank of `role` is stopped, and kills it when the other group waits for it."""
    gate = folder / f"hold-{rollout_id}"
    gate.touch()
    started = harness.start("train.py", flags, folder, "run", home)
    started.wait_for_line("its event loop is blocked at", 150)
    log = str(started.run_dir / f"logs/{role}-rank0.log")
    of_ranks = started.processes("slimrl.cluster.training.train_process")
    logging = [process for process in of_ranks if os.readlink(f"/proc/{process.pid}/fd/1") == log]
    (victim,) = [process for process in logging if "subreaper.py" not in " ".join(process.cmdline())]
    victim.send_signal(signal.SIGSTOP)
    gate.unlink()
    started.wait_for_line(WAITS[role], 60)
    victim.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    done = started.finish(60)
    assert time.monotonic() - killed < 30
    assert done.code == 75
    message = done.output.split("ERROR", 1)[1]
    assert f"{role} worker rank 0 (pid " in message
    assert f"died with exit code -9; last lines of {log}:" in message
    assert done.summary["status"] == "failed" and f"{role} worker rank 0" in done.summary["error"]
    assert done.left == []


@pytest.mark.timeout(400)
def test_critic_on_gpus_of_its_own_gives_the_numbers_of_the_policys_ranks_after_the_death_of_either(tiny, tmp_path):
    dumps, together, apart = (tmp_path / name for name in ("dumps", "together", "apart"))
    for folder in (dumps, together, apart):
        folder.mkdir()
    template = record_rollouts(dumps)
    expected = harness.start("train.py", replay(tiny, together, template), together, "run", tiny.home).finish(150)
    assert expected.code == 0, expected.output[-6000:]
    (apart / "gate.py").write_text(GATE)
    own = {"custom_rollout_log_function_path": "gate.hold", "watchdog_report_seconds": 1}
    flags = replay(tiny, apart, template, critic_num_gpus_per_node=1, async_save=True, **own)
    kill_rank_that_the_other_group_waits_for("critic", 2, flags, apart, tiny.home)
    kill_rank_that_the_other_group_waits_for("train", 3, flags, apart, tiny.home)
    done = harness.start("train.py", flags, apart, "run", tiny.home).finish(150)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    assert f"resuming from {apart}/checkpoints/iter_000000" in done.output
    assert "starting 1 train workers, 1 critic workers and 0 rollout GPUs" in done.output

    assert done.steps("step") == list(range(ROLLOUTS))
    names = [name for name in expected.summary["steps"][-1] if name in metrics_of_training(expected)]
    assert {"critic-value_loss", "loss", "rollout/values", "rollout/returns"} <= set(names)
    for one, other in zip(done.summary["steps"], expected.summary["steps"], strict=True):
        assert {name: one.get(name) for name in names} == {name: other.get(name) for name in names}
    assert done.steps("perf/critic_train_time") and done.steps("perf/values_time")
    assert "critic_rank0_rss_gib" in done.summary["steps"][-1]["memory"]
    for part in ("iter_0000003", "critic/iter_0000003"):
        folders = [root / "checkpoints" / part for root in (together, apart)]
        found = checkpoints.differences(*map(checkpoints.read, folders))
        # a policy without a critic draws fewer random numbers when it is built; each pair has a name of its own
        assert [place for place in found if not place.startswith("/rng_state") and "saved_with" not in place] == []
    log = (done.run_dir / "logs/critic-rank0.log").read_text()
    assert f"{apart}/checkpoints/critic/iter_0000003 is complete" in log


def moved_weights(folder):
    """Tensors of weights that differ between the first and the last checkpoint."""
    both = [checkpoints.read(folder / f"iter_000000{number}") for number in (0, ROLLOUTS - 1)]
    places = checkpoints.differences(*both)
    return [place for place in places if "weight" in place and not place.startswith("/common")]


def test_critic_that_was_trained_alone_starts_a_run(tiny, tmp_path):
    """Value pre-training: a run whose policy never moves, then one with its critic by --critic-load."""
    dumps, alone, second = (tmp_path / name for name in ("dumps", "alone", "second"))
    for folder in (dumps, alone, second):
        folder.mkdir()
    template = record_rollouts(dumps)
    flags = replay(tiny, alone, template, critic_only=ROLLOUTS, critic_lambd=1)
    done = harness.start("train.py", flags, alone, "run", tiny.home).finish(150)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    assert not any("grad_norm" in step for step in done.summary["steps"])
    assert all(norm > 0 for norm in done.steps("critic-grad_norm"))
    assert moved_weights(alone / "checkpoints") == []
    assert moved_weights(alone / "checkpoints/critic") != []

    flags = replay(tiny, second, template, critic_only=0, critic_load=alone / "checkpoints/critic")
    done = harness.start("train.py", flags, second, "run", tiny.home).finish(150)
    assert done.code == 0, done.output[-6000:]
    assert all(norm > 0 for norm in [*done.steps("grad_norm"), *done.steps("critic-grad_norm")])
    assert done.steps("rollout/values")[0] != 0  # a new head gives 0


def metrics_of_training(run):
    """Names of the numbers that do not depend on time or memory."""
    names = {name for step in run.summary["steps"] for name, value in step.items() if isinstance(value, float | int)}
    return {name for name in names if not name.startswith(("perf/", "memory_", "planned_memory_", "timing"))}
