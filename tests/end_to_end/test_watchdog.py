"""A hung rank is named with its line and state, and so is the rank that waits for it."""

from __future__ import annotations

import json
import re
import signal
import time

import pytest

from slimrl.processes import stale_resources
from tests.end_to_end import harness
from tests.end_to_end.test_supervised import FLAGS, conversation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_stopped_rank_is_named_with_the_line_where_its_peer_waits(tiny, tmp_path):
    data = tmp_path / "conversations.jsonl"
    data.write_text("".join(json.dumps({"messages": conversation(number % 10)}) + "\n" for number in range(8)))
    limits = {"watchdog_report_seconds": 2, "num_rollout": 100000}
    temporary = harness.temporary_folder()  # of this run alone: a test beside this one would remove leftovers elsewhere
    killed = temporary / f"{stale_resources.PREFIX}killed"
    killed.mkdir()
    stale_resources.own(killed).release()
    secret = "s3ntinel" + "x" * 8
    limits |= {"train_env_vars": json.dumps({"MY_KEY": secret})}
    flags = tiny.flags(prompt_data=data, **FLAGS | limits)
    started = harness.start("train.py", flags, tmp_path, "hangs", tiny.home, temporary=temporary)
    started.wait_for_line("step 1 |", 150)
    assert re.search(f"removed leftovers of killed runs: .*{killed}", started.log.read_text()) and not killed.exists()
    ranks = [
        process for process in started.processes("slimrl.cluster.training.train_process") if not _is_subreaper(process)
    ]
    victim = ranks[0]
    # secrets of the ranks are only in their environments, and Ray's folder is private
    assert [process.environ()["MY_KEY"] for process in ranks] == [secret, secret]
    assert harness.places_of(secret, started.temporary, tmp_path) == []
    (ray_folder,) = started.temporary.glob("slimrl-ray-*")
    assert ray_folder.stat().st_mode & 0o777 == 0o700 and list(ray_folder.glob("r/session_latest/logs/*"))
    assert (ray_folder / stale_resources.OWNER).exists() and str(ray_folder) not in stale_resources.remove_stale(
        started.temporary
    )
    victim.send_signal(signal.SIGSTOP)
    started.wait_for_line("process stopped", 60)
    line = next(line for line in started.log.read_text().splitlines() if "process stopped" in line)
    match = re.search(r"waiting \d+ s for training on rollout \d+: rank (\d) \(pid (\d+) on \S+\) .*; rank (\d)", line)
    assert match, line
    assert int(match[2]) == victim.pid
    assert {match[1], match[3]} == {"0", "1"}
    waiting = line.rsplit("; rank", 1)[1]
    assert "process" not in waiting and "called from" in waiting and "/slimrl/megatron/" in waiting
    assert f"train-rank{match[3]}.log" in waiting
    stacks = (started.run_dir / "logs" / f"train-rank{match[3]}.log").read_text()
    assert "most recent call first" in stacks
    steps = started.log.read_text().count("step ")
    victim.send_signal(signal.SIGCONT)  # the query harmed no process: the run continues
    while started.log.read_text().count("step ") < steps + 3:
        assert started.process.poll() is None
        time.sleep(0.05)
    started.process.send_signal(signal.SIGINT)
    done = started.finish(60)
    assert done.code == 130
    assert done.left == []


def _is_subreaper(process) -> bool:
    return "subreaper.py" in " ".join(process.cmdline())
