"""Servers and the router are killed and stopped at random moments: every sample is trained once."""

from __future__ import annotations

import json
import re
import signal

import pytest

from slimrl.data.sample import Sample
from tests.end_to_end import faults, harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS, SEED = 30, 3
KINDS = [("server", signal.SIGKILL), ("scheduler", signal.SIGSTOP), ("router", signal.SIGKILL)]


def right(sample: Sample) -> float:
    """1 if the last box of the response is closed and has the sum."""
    _, box, rest = sample.response.rpartition("\\boxed{")
    answer = re.match(r"\s*(\d+)\s*\}", rest) if box else None
    return float(answer is not None and int(answer[1]) == int(sample.label))


# flags of each way of a weight update, and the largest difference of log-probabilities: that of bf16 is due to rounding
WAYS: dict[str, tuple[dict[str, object], float]] = {
    "broadcast": ({}, 1e-3),
    "p2p": ({"update_weight_transfer_mode": "p2p"}, 1e-3),
    "changed files": (
        {
            "bf16": True,
            "sglang_dtype": "bfloat16",
            "update_weight_mode": "delta",
            "update_weight_transport": "disk",
            "update_weight_disk_dir": "updates",
            "update_weight_local_checkpoint_dir": "engine",
        },
        0.3,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_sample_is_trained_once_while_servers_and_router_fail(tiny, tmp_path, way):
    way_flags, limit = WAYS[way]
    dumps = tmp_path / "dumps" / "{rollout_id}.jsonl"
    flags = tiny.flags(
        actor_num_gpus_per_node=1,
        rollout_num_gpus=2,
        num_rollout=STEPS,
        rollout_shuffle=None,
        sglang_max_running_requests=2,
        use_fault_tolerance=True,
        rollout_health_check_interval=0.5,
        rollout_health_check_timeout=10,  # a healthy server is slow when all processes share two cores
        save_debug_rollout_data=dumps,
        **way_flags,
    )
    started = harness.start("train.py", flags, tmp_path, "faults", tiny.home)
    hits = faults.strike(started, faults.plan(SEED, KINDS, range(1, STEPS // 2), 0.3), SEED, 200)
    done = started.finish(200)
    print("\n".join(["", *hits, *faults.fault_lines(done.output)]))
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    assert not [hit for hit in hits if "the run was over" in hit]

    prompts = [
        json.loads(line)["prompt"][0]["content"] for line in (tiny.folder / "train.jsonl").read_text().splitlines()
    ]
    recorded = faults.rollouts(dumps, STEPS)
    assert [len(samples) for samples in recorded] == [32] * STEPS
    faults.assert_accounts(recorded, prompts, group_size=4)
    # a replaced server with its initial weights would give other log-probabilities than training
    for step, samples in enumerate(recorded):
        assert {version for sample in samples for version in sample.weight_versions} == {str(step)}
        assert [sample.reward for sample in samples] == [right(sample) for sample in samples]
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < limit
    rewards = [sum(sample.reward for sample in samples) / 32 for samples in recorded]
    assert done.steps("reward") == pytest.approx(rewards)
    assert 0.1 < sum(rewards) / STEPS < 1.0

    counted = {name: sum(done.steps(f"rollout/faults/{name}")) for name in ("servers_lost", "router_restarts")}
    assert counted["servers_lost"] >= 2 and counted["router_restarts"] >= 1  # a slow machine may lose more
    logs = {path.name for path in (done.run_dir / "logs").iterdir()}
    assert {"router.log", "router.1.log"} <= logs
    assert sum(name.startswith("sglang") for name in logs) >= 4
    assert "died with exit code -9 (log: " in done.output
    assert "has had stopped processes, sglang::scheduler" in done.output
