"""What goes wrong ends the job soon, by name, and leaves nothing."""

import signal
import time

import pytest

from tests.end_to_end import harness

pytestmark = [pytest.mark.timeout(300)]
SPLIT = {"actor_num_gpus_per_node": 1, "rollout_num_gpus": 2, "num_rollout": 500}


def test_every_mistake_is_reported_at_once_before_anything_starts(tmp_path):
    (tmp_path / "model").mkdir()
    flags = ["--rollout-batch-sise", "8", "--prompt-data", str(tmp_path / "absent.jsonl")]
    flags += ["--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--global-batch-size", "24"]
    flags += ["--custom-rm-path", "no_such_package.reward"]
    done = harness.start("train.py", flags, tmp_path, "refused", tmp_path).finish(20)
    assert done.code == 2
    assert done.seconds < 3
    for part in ("--rollout-batch-sise", "--rollout-batch-size", "absent.jsonl", "32", "24", "no_such_package"):
        assert part in done.output
    assert not done.run_dir.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "named"),
    [("slimrl.cluster.rank_process", "train worker rank 0"), ("slimrl.sglang", "SGLang server")],
)
def test_a_killed_process_ends_the_job_within_a_minute_by_name(victim, named, tiny, tmp_path):
    started = harness.start("train.py", tiny.flags(**SPLIT), tmp_path, "killed", tiny.home)
    started.wait_for_line("step 1 |", 150)
    process = next(p for p in started.processes() if victim in " ".join(p.cmdline()))
    process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    done = started.finish(60)
    assert time.monotonic() - killed < 60
    assert done.code == 1
    assert named in done.output
    assert "exit code -9" in done.output
    assert harness.wait_until_gone(done.mark) == []
