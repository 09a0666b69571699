"""Tells an event loop that is merely busy from one that a function blocks, and names the function's line.

Asked from another thread than the loop's. Used by the rollout manager, in which functions of the user's run.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import threading

from slimrl.rollout.under_way import running_line

_PATIENCE_S = 2.0
_LOOK_INTERVAL_S = 1.0

ENDED = "no line, it was ended"


class LoopWatch:
    """Made inside the event loop that it watches."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    async def ended(self) -> str:
        """Pending while the loop runs; then what ended it, as far as that can be known."""
        while self._loop.is_running():
            await asyncio.sleep(_LOOK_INTERVAL_S)
        return (
            "the event loop of the rollout manager was ended: a callback in it raised SystemExit or KeyboardInterrupt,"
            " as sys.exit() does; in functions of your own raise an Exception instead"
        )

    async def blocked_at(self) -> str:
        """The line that blocks the loop, "" where it turns. Where it does not, all stacks are written to stderr."""
        if not self._loop.is_running():
            return ENDED
        turn = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(turn), _PATIENCE_S)
        except TimeoutError:
            faulthandler.dump_traceback(file=sys.__stderr__)
            return running_line(sys._current_frames().get(self._thread)) or "an unknown line"
        return ""
