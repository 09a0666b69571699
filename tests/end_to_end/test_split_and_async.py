"""Training and generation on slots of their own: broadcast weights, and one step ahead."""

import pytest

from tests.end_to_end import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SPLIT = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, "tensor_model_parallel_size": 2}


@pytest.mark.parametrize("entry", ["train.py", "train_async.py"])
def test_a_split_run_ends_cleanly_and_its_log_probs_agree(entry, tiny, tmp_path):
    flags = tiny.flags(**SPLIT, check_weight_update_equal=True, num_rollout=4)
    done = harness.start(entry, flags, tmp_path, "split", tiny.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    steps = done.summary["steps"]
    lag = {"train.py": [0, 1, 2, 3], "train_async.py": [0, 0, 1, 2]}[entry]
    assert [step["weight_version"] for step in steps] == [str(version) for version in lag]
    on_policy = [step for step in steps if int(step["weight_version"]) == step["step"]]
    assert len(on_policy) == {"train.py": 4, "train_async.py": 1}[entry]
    for step in on_policy:
        assert step["train_rollout_logprob_abs_diff_mean"] < 1e-5
        assert step["train_rollout_logprob_abs_diff_max"] < 1e-3
    assert harness.wait_until_gone(done.mark) == []
