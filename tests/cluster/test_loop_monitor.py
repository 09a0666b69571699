"""A monitor outside the rollout manager's event loop detects that the loop has ended, and does not wait for it."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from slimrl.rollout.generation import sample_tracker
from slimrl.rollout.generation.sample_tracker import LoopMonitor


@pytest.fixture
def loop():
    """An event loop in a thread that ends silently with it, like Ray's."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    if loop.is_running():
        loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def test_loop_ended_by_a_callback_is_distinguished_from_a_running_one(loop, monkeypatch):
    monkeypatch.setattr(sample_tracker, "_POLL_INTERVAL_S", 0.01)

    async def make():
        return LoopMonitor()

    async def main():
        watch = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), loop))
        ended = asyncio.ensure_future(watch.ended())
        await asyncio.sleep(0.05)
        assert not ended.done() and await watch.blocked_line() == ""
        loop.call_soon_threadsafe(sys.exit)
        return await asyncio.wait_for(ended, 10), await watch.blocked_line()

    sentence, blocked = asyncio.run(main())
    assert "the event loop of the rollout manager was ended: a callback in it raised SystemExit" in sentence
    assert blocked == sample_tracker.ENDED
