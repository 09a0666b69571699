"""A long wait is reported in time with the process that blocks it, and ends at a limit if one is set."""

from __future__ import annotations

import asyncio
import datetime
import http.server
import json
import logging
import threading
import time

import pytest

from slimrl.cluster import watchdog
from slimrl.cluster.watchdog import (
    RankStatus,
    RolloutStatus,
    Wait,
    WaitTarget,
    WatchdogConfig,
    WatchdogTimeoutError,
    format_rank_status,
    format_rollout_status,
)
from slimrl.engines.server_protocol import ServerLoad
from slimrl.engines.sglang.control import ServerControl
from slimrl.rollout.generation.sample_tracker import ActiveSample, LoopMonitor


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances only when it is set."""

    class Clock:
        now = 1000.0

        def monotonic(self) -> float:
            return self.now

    made = Clock()
    monkeypatch.setattr(watchdog, "time", made)
    return made


def test_slow_wait_is_reported_at_doubling_intervals(clock, caplog):
    wait = Wait(
        WatchdogConfig(120.0, None), WaitTarget("training on rollout 7", lambda places: f"{list(places)} are late")
    )
    with caplog.at_level(logging.WARNING, "slimrl"):
        for waited, remaining in ((0, 120), (119, 1), (120, 0), (121, 119), (239, 1), (300, 0), (400, 80)):
            clock.now = 1000.0 + waited
            assert wait.remaining() == remaining
            wait.check([1, 3])
    reports = [record.getMessage() for record in caplog.records]
    assert reports == [f"waiting {n} s for training on rollout 7: [1, 3] are late" for n in (120, 300)]


def test_report_names_the_servers_that_block_the_awaited_processes(clock, caplog):
    said = iter(["SGLang server 1 (http://b:4) does not answer", ""])
    wait = Wait(
        WatchdogConfig(60.0, None),
        WaitTarget("the weight update 3", lambda _: "rank 0 in _update_weights"),
        lambda: next(said),
    )
    with caplog.at_level(logging.WARNING, "slimrl"):
        for waited in (10, 60, 120):
            clock.now = 1000.0 + waited
            wait.check([0])
    assert [record.getMessage() for record in caplog.records] == [
        "waiting 60 s for the weight update 3: rank 0 in _update_weights; SGLang server 1 (http://b:4) does not answer",
        "waiting 120 s for the weight update 3: rank 0 in _update_weights",
    ]


def test_time_limit_ends_the_wait_with_the_report(clock):
    wait = Wait(WatchdogConfig(0.0, 60.0), WaitTarget("save after rollout 3", lambda _: "rank 2 in save"))
    clock.now += 59
    assert wait.remaining() == 1
    wait.check([2])
    clock.now += 1
    with pytest.raises(WatchdogTimeoutError) as failure:
        wait.check([2])
    assert str(failure.value) == (
        "waiting 60 s for save after rollout 3: rank 2 in save; the run ends (--watchdog-limit-seconds 60)"
    )


def test_disabled_watchdog_waits_forever(clock):
    wait = Wait(WatchdogConfig(0.0, None), WaitTarget("anything", lambda _: pytest.fail("no rank is to be asked")))
    assert wait.remaining() is None
    clock.now += 1e9
    wait.check([0])


def rank(number: int, done: int, **changes) -> RankStatus:
    values = dict(
        pid=100 + number,
        node="10.0.0.1",
        method="train",
        micro_batch=done,
        micro_batches=8,
        seconds=118.4,
        state="sleeping",
        frames=[],
        log=f"logs/train-rank{number}.log",
    )
    return RankStatus(rank=number, **(values | changes))


def test_slowest_rank_is_listed_first():
    frames = ["/lib/gloo.py:7 all_reduce", "/home/me/slimrl/megatron/trainer.py:80 train"]
    ranks = [rank(0, 5), rank(1, 5), rank(2, 8, method=None), rank(3, 4, state="stopped"), rank(4, 8, frames=frames)]
    assert format_rank_status([*ranks, None], [0, 1, 3, 4, 5]) == (
        "rank 5 does not answer: no reply from its actor;"
        " rank 3 (pid 103 on 10.0.0.1) in micro-batch 4 of 8 for 118 s, process stopped"
        " (stacks in logs/train-rank3.log);"
        " ranks 0, 1 in micro-batch 5 of 8 for 118 s (stacks in logs/train-rank0.log);"
        " rank 4 (pid 104 on 10.0.0.1) in its last micro-batch, 8 for 118 s, at /lib/gloo.py:7 all_reduce,"
        " called from /home/me/slimrl/megatron/trainer.py:80 train (stacks in logs/train-rank4.log);"
        " rank 2 done"
    )


def test_ranks_of_the_critic_are_named():
    log = "logs/critic-rank0.log"
    assert format_rank_status([rank(0, 3, log=log), None, rank(2, 8, method=None)], [0, 1], "critic rank") == (
        "critic rank 1 does not answer: no reply from its actor;"
        " critic rank 0 (pid 100 on 10.0.0.1) in micro-batch 3 of 8 for 118 s (stacks in logs/critic-rank0.log);"
        " critic rank 2 done"
    )


def generation(**changes) -> RolloutStatus:
    values = dict(doing="", finished=61, expected=64, samples=[], in_flight=0, blocked_line="", servers=[], log="r.log")
    return RolloutStatus(**(values | changes))


def test_unfinished_samples_are_listed_with_what_they_wait_for():
    samples = [
        ActiveSample(12, 3, "generation", 120.0, "client.py:149 _post"),
        ActiveSample(40, 10, "generation", 119.0, "client.py:149 _post"),
        ActiveSample(41, 10, "the reward", 2.0, ""),
    ]
    servers = [ServerLoad("http://a", 2, 0, 0.1), ServerLoad("http://b", 1, 0, 90.0), ServerLoad("http://c")]
    assert format_rollout_status(generation(samples=samples, in_flight=2, servers=servers)) == (
        "3 of 64 samples unfinished; samples 12, 40 in generation for 120 s at client.py:149 _post;"
        " sample 41 in the reward for 2 s; 2 requests in flight; server http://a runs 2 and queues 0,"
        " server http://b runs 1 and queues 0, but its scheduler has been silent for 90 s,"
        " server http://c does not answer"
    )
    assert format_rollout_status(None) == "the rollout manager does not answer: no reply from its actor"


def test_sample_that_blocks_the_loop_is_named():
    samples = [
        ActiveSample(12, 3, "generation", 120.0, "client.py:149 _post"),
        ActiveSample(13, 3, "generation", 119.0, "hooks.py:4 generate"),
    ]
    text = format_rollout_status(generation(samples=samples, blocked_line="hooks.py:4 generate"))
    assert "event loop is blocked at hooks.py:4 generate" in text
    assert "sample 13 in generation" in text and "12" not in text.replace("120", "")


def test_slowest_of_many_stages_are_listed_and_the_rest_counted():
    samples = [ActiveSample(number, 0, f"stage {number // 2}", 9.0, "") for number in range(14)]
    text = format_rollout_status(generation(finished=0, samples=samples))
    assert "samples 8, 9 in stage 4 for 9 s; 4 more elsewhere" in text and "stage 5" not in text


def test_running_loop_is_distinguished_from_a_blocked_one():
    made, block, blocked, go = threading.Event(), threading.Event(), threading.Event(), threading.Event()
    watches = []

    def blocks():
        blocked.set()
        go.wait(60)

    async def loop():
        watches.append(LoopMonitor())
        made.set()
        while not block.is_set():
            await asyncio.sleep(0.001)
        blocks()

    thread = threading.Thread(target=lambda: asyncio.run(loop()), daemon=True)
    thread.start()
    made.wait()
    turning = asyncio.run(watches[0].blocked_line())
    block.set()
    blocked.wait()
    time.sleep(0.1)  # from the first event until the wait for the second
    standing = asyncio.run(watches[0].blocked_line())
    go.set()
    thread.join()
    assert (turning, standing) == ("", f"{__file__}:{blocks.__code__.co_firstlineno + 2} blocks")


def test_server_load_is_the_sum_over_replicas_with_the_oldest_heartbeat():
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    loads = [
        {
            "num_running_reqs": 3,
            "num_waiting_reqs": 0,
            "total_prefill_uncached_tokens": 0,
            "timestamp": now.timestamp() - 0.5,
        },
        {
            "num_running_reqs": 1,
            "num_waiting_reqs": 2,
            "total_prefill_uncached_tokens": 7,
            "timestamp": now.timestamp() - 30,
        },
    ]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"timestamp": now.isoformat(), "loads": loads}).encode()
            self.send_response(200 if self.path == "/v1/loads" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert ServerControl(url, 10.0).load() == ServerLoad(url, 4, 2, 30.0, True)
    assert ServerControl(url, 1.0).load() == ServerLoad(url)


@pytest.mark.parametrize(
    "body", ['{"loads": []}', '{"timestamp": 7, "loads": []}', '{"loads": [{}]}', "a proxy", "[1]", "{"]
)
def test_invalid_load_response_counts_as_none(body):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert ServerControl(url, 10.0).load() == ServerLoad(url)
