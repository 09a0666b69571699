"""Graders run in parallel to the caller, never longer than allowed, and leave no process behind."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import slimrl
from slimrl.rollout.rm_hub.grader_pool import GraderFailure, GraderPool, GraderUnavailable

SCRIPT = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "hang":
        time.sleep(1000)
    if request["do"] == "die":
        os._exit(7)
    if request["do"] == "fail":
        print(json.dumps({"error": "ValueError: bad"}), flush=True)
        continue
    time.sleep(request.get("seconds", 0))
    print(json.dumps({"pid": os.getpid(), "long": "x" * request.get("long", 0)}), flush=True)
"""


@pytest.fixture
def pool(tmp_path):
    script = tmp_path / "grader.py"
    script.write_text(SCRIPT)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    made = GraderPool(script, time_limit_s=0.5, size=2)
    yield made
    made.close()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_worker_is_reused(pool):
    async def main():
        return [(await pool.grade({"do": "answer"}))["pid"] for _ in range(5)]

    pids = asyncio.run(main())
    assert len(set(pids)) == 1 and pids[0] != os.getpid()


def test_worker_limit_holds_for_many_requests(pool):
    async def main():
        return await asyncio.gather(*(pool.grade({"do": "answer", "seconds": 0.02}) for _ in range(20)))

    assert len({reply["pid"] for reply in asyncio.run(main())}) <= 2


def test_hung_grader_is_killed_and_replaced(pool):
    async def main():
        first = (await pool.grade({"do": "answer"}))["pid"]
        with pytest.raises(GraderFailure, match=r"took more than 0.5 s grading and was killed"):
            await pool.grade({"do": "hang"})
        assert not psutil.pid_exists(first)
        return first, (await pool.grade({"do": "answer"}))["pid"]

    first, second = asyncio.run(main())
    assert first != second


def test_event_loop_keeps_running_while_a_grader_hangs(pool):
    async def main():
        hanging = asyncio.create_task(pool.grade({"do": "hang"}))
        ticks = 0
        while not hanging.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert isinstance(hanging.exception(), GraderFailure)
        return ticks

    assert asyncio.run(main()) > 10


def test_dead_grader_is_reported_with_its_exit_code(pool):
    with pytest.raises(GraderFailure, match="died grading, exit code 7"):
        asyncio.run(pool.grade({"do": "die"}))


def test_failing_grader_is_quoted_and_keeps_running(pool):
    async def main():
        first = (await pool.grade({"do": "answer"}))["pid"]
        with pytest.raises(GraderFailure, match="the grader failed: ValueError: bad"):
            await pool.grade({"do": "fail"})
        return first, (await pool.grade({"do": "answer"}))["pid"]

    first, second = asyncio.run(main())
    assert first == second


def test_long_replies_arrive_complete(pool):
    assert len(asyncio.run(pool.grade({"do": "answer", "long": 300_000}))["long"]) == 300_000


def test_closing_stops_a_busy_grader_immediately(tmp_path):
    script = tmp_path / "grader.py"
    script.write_text(SCRIPT)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    pool = GraderPool(script, time_limit_s=60.0, size=1)

    async def main():
        await pool.grade({"do": "answer"})
        hanging = asyncio.create_task(pool.grade({"do": "hang"}))
        await asyncio.sleep(0.1)
        pool.close()  # a wait for the grader's own time limit would be reported as that
        with pytest.raises(GraderUnavailable, match="the grader pool was closed"):
            await hanging

    asyncio.run(main())
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


PARENT = """
import asyncio
from slimrl.rollout.rm_hub.grader_pool import GraderPool

def request(answer):
    return {"rule": "math", "boxed": True, "response": f"\\\\boxed{{{answer}}}", "label": "2x"}

async def main():
    pool = GraderPool(time_limit_s=300, size=1)
    print(await pool.grade(request("x+x")), flush=True)
    await pool.grade(request("\\\\int_0^1 x^{x^{x}} \\\\sin(\\\\tan(x^7)) dx"))

asyncio.run(main())
"""


def test_killed_parent_takes_its_busy_math_grader_along():
    root = Path(slimrl.__file__).parents[1]
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=root) as parent:
        try:
            assert b"1.0" in parent.stdout.readline()
            (worker,) = psutil.Process(parent.pid).children()
            time.sleep(0.3)  # the worker is now computing the integral
        finally:
            parent.kill()
    worker.wait(timeout=10)
