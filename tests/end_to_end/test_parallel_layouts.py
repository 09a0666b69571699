"""Full runs with pipeline stages or context parallelism."""

import pytest

from tests.end_to_end import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LAYOUTS = {
    "pipeline stages, colocated": {"colocate": True, "pipeline_model_parallel_size": 2},
    "context parallel GPUs beside the engine": {"rollout_num_gpus": 1, "context_parallel_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_is_on_policy_and_every_weight_update_complete(layout, tiny, tmp_path):
    changes = {"actor_num_gpus_per_node": 2, "num_rollout": 3, "check_weight_update_equal": True, **LAYOUTS[layout]}
    changes["compute_old_log_probs"] = "always"  # so that the ratio compares two forward passes
    folder = tmp_path / "checkpoints"
    done = harness.start("train.py", tiny.flags(save=folder, **changes), tmp_path, "layout", tiny.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    assert done.steps("weight_version") == ["0", "1", "2"]
    for step in done.summary["steps"]:
        assert step["train_rollout_logprob_abs_diff_mean"] < 1e-5
        assert step["train_rollout_logprob_abs_diff_max"] < 1e-3
    first = done.summary["steps"][0]
    assert first["ratio_max_abs_diff"] < 1e-5 and abs(first["kl_loss"]) < 1e-5
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
