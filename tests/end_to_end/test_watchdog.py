"""A rank that hangs is named, with its place and its state, and so is the rank that waits for it."""

from __future__ import annotations

import json
import re
import signal
import time
import uuid
from pathlib import Path

import pytest

from slimrl.processes import stale_resources
from tests.end_to_end import harness
from tests.end_to_end.test_supervised import FLAGS, conversation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_stopped_rank_is_named_and_so_is_the_line_in_which_the_other_waits(tiny, tmp_path):
    data = tmp_path / "conversations.jsonl"
    data.write_text("".join(json.dumps({"messages": conversation(number % 10)}) + "\n" for number in range(8)))
    limits = {"watchdog_report_seconds": 2, "num_rollout": 100000}
    killed = Path("/dev/shm", f"{stale_resources.PREFIX}{uuid.uuid4().hex}")  # what a run left that was killed here
    killed.mkdir()
    stale_resources.own(killed).release()
    secret = "s3ntinel" + "x" * 8
    limits |= {"train_env_vars": json.dumps({"MY_KEY": secret})}
    started = harness.start("train.py", tiny.flags(prompt_data=data, **FLAGS | limits), tmp_path, "hangs", tiny.home)
    started.wait_for_line("step 1 |", 150)
    assert re.search(f"removed what killed runs had left: .*{killed}", started.log.read_text()) and not killed.exists()
    ranks = [
        process for process in started.processes("slimrl.cluster.training.train_process") if not _is_guardian(process)
    ]
    victim = ranks[0]
    # what only the ranks are to know is in their environments alone, and Ray's folder is nobody else's
    assert [process.environ()["MY_KEY"] for process in ranks] == [secret, secret]
    assert harness.places_of(secret, started.temporary, tmp_path) == []
    (ray_folder,) = started.temporary.glob("slimrl-ray-*")
    assert ray_folder.stat().st_mode & 0o777 == 0o700 and list(ray_folder.glob("r/session_latest/logs/*"))
    assert (ray_folder / stale_resources.OWNER).exists() and str(ray_folder) not in stale_resources.sweep(
        started.temporary
    )
    victim.send_signal(signal.SIGSTOP)
    started.wait_for_line("process stopped", 60)
    line = next(line for line in started.log.read_text().splitlines() if "process stopped" in line)
    match = re.search(r"waiting \d+ s for train of rollout \d+: rank (\d) \(pid (\d+) on \S+\) .*; rank (\d)", line)
    assert match, line
    assert int(match[2]) == victim.pid
    assert {match[1], match[3]} == {"0", "1"}
    waiting = line.rsplit("; rank", 1)[1]
    assert "process" not in waiting and "called from" in waiting and "/slimrl/megatron/" in waiting
    assert f"train-rank{match[3]}.log" in waiting
    stacks = (started.run_dir / "logs" / f"train-rank{match[3]}.log").read_text()
    assert "most recent call first" in stacks
    steps = started.log.read_text().count("step ")
    victim.send_signal(signal.SIGCONT)  # nobody was harmed by being asked: the run continues where it was
    while started.log.read_text().count("step ") < steps + 3:
        assert started.process.poll() is None
        time.sleep(0.05)
    started.process.send_signal(signal.SIGINT)
    done = started.finish(60)
    assert done.code == 130
    assert done.left == []


def _is_guardian(process) -> bool:
    return "subreaper.py" in " ".join(process.cmdline())
