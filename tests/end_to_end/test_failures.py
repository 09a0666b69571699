"""A failure ends the job soon, names its cause, and leaves nothing behind."""

import os
import signal
import time

import pytest

from tests.end_to_end import harness

pytestmark = [pytest.mark.timeout(300)]
SPLIT = {"actor_num_gpus_per_node": 1, "rollout_num_gpus": 1, "num_rollout": 5000}


def test_all_errors_are_reported_together_before_startup(tmp_path):
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
    assert done.left == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "entry", "named"),
    [
        ("slimrl.cluster.training.train_process", "train.py", "train worker rank 0"),
        ("sglang::scheduler", "train.py", "SGLang server"),
        ("sglang.entry router", "train_async.py", "SGLang router"),
        ("ray::RolloutManager", "train.py", "rollout manager"),
    ],
    ids=["rank", "server", "router", "manager"],
)
def test_killed_process_ends_the_job_within_a_minute_by_name(command, entry, named, tiny, tmp_path):
    started = harness.start(entry, tiny.flags(**SPLIT, watchdog_report_seconds=2), tmp_path, "killed", tiny.home)
    started.wait_for_line("step 1 |", 150)
    victim = started.processes(command)[0]
    if "subreaper.py" in " ".join(victim.cmdline()):  # the subreaper above it names the process that it supervises
        victim = victim.children()[0]
    if named == "SGLang server":  # a hung server is named first, whichever process waits for it
        victim.send_signal(signal.SIGSTOP)
        started.wait_for_line(f"has stopped processes: {victim.name()} ({victim.pid}) (SIGSTOP or a debugger", 60)
    victim.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    done = started.finish(60)
    assert time.monotonic() - killed < 60
    assert done.code == 75
    message = done.output.split("ERROR", 1)[1]
    assert named in message
    if named != "rollout manager":  # Ray's own process: Ray detects its end, but not its exit code
        assert "exit code -9" in message and "last lines of" in message
    assert done.summary["status"] == "failed" and named in done.summary["error"]
    assert done.left == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "signals", "codes"),
    [
        ("step 1 |", [signal.SIGINT], {130}),
        ("step 1 |", [signal.SIGTERM], {143}),
        ("step 1 |", [signal.SIGHUP], {129}),
        # Python handles signals between bytecodes: of several pending ones the lowest goes first
        ("train workers and", [signal.SIGTERM, signal.SIGINT], {143, 130}),
    ],
    ids=["interrupted", "terminated", "hung up", "starting"],
)
def test_interrupt_ends_every_process(line, signals, codes, tiny, tmp_path):
    flags = tiny.flags(colocate=True, actor_num_gpus_per_node=1, num_rollout=5000, save=tmp_path / "checkpoints")
    started = harness.start("train.py", flags, tmp_path, "interrupted", tiny.home)
    started.wait_for_line(line, 150)
    for number in signals:
        os.killpg(started.process.pid, number)  # the whole process group, as a terminal and `timeout` do
        time.sleep(0.3)
    done = started.finish(60)
    assert done.code in codes
    assert done.summary["status"] == "interrupted"
    assert done.left == []
