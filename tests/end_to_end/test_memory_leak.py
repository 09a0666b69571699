"""No process of a run of many steps has more memory at the end than after its first steps."""

from __future__ import annotations

import statistics

import pytest

from tests.end_to_end import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, WARM_UP = 60, 30
LIMIT_MIB = 8.0  # a batch kept in every step would exceed it; allocators still grow by a few


def test_no_process_grows_from_step_to_step(tiny, tmp_path):
    small = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 4, "num_rollout": STEPS}
    flags = tiny.flags(colocate=True, actor_num_gpus_per_node=1, **small)
    done = harness.start("train.py", flags, tmp_path, "long", tiny.home).finish(250)
    assert done.code == 0, done.output[-4000:]
    assert done.left == []
    memory = done.steps("memory")
    assert len(memory) == STEPS
    names = "driver rollout_manager router server0 server0_actor rank0 rank0_actor"
    assert set(memory[-1]) == {f"{name}_rss_gib" for name in names.split()}
    for name in memory[-1]:
        amounts = [1024 * step[name] for step in memory[WARM_UP:]]
        assert amounts[0] > 50  # megabytes: a Python process, not a subreaper
        half = len(amounts) // 2
        grown = statistics.median(amounts[half:]) - statistics.median(amounts[:half])
        assert grown < LIMIT_MIB, (name, amounts)
