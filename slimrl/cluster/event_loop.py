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


class LoopWatch:
    """Made inside the event loop that it watches."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    async def blocked_at(self) -> str:
        """The line that blocks the loop, "" where it turns. Where it does not, all stacks are written to stderr."""
        turn = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(turn), _PATIENCE_S)
        except TimeoutError:
            faulthandler.dump_traceback(file=sys.__stderr__)
            return running_line(sys._current_frames().get(self._thread)) or "an unknown line"
        return ""
