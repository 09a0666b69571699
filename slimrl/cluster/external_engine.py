"""A server of the user's, used as an engine (`--rollout-external-engine-addrs`): given weights, never started or ended.

Promises to notice that it stops answering, and that it was started anew, with weights that are not the run's. A server
that only works for long, as in a push, answers: whether its scheduler is stuck is for `HealthMonitor` to tell. It has
the methods of `engine.Engine`, with which the fleet works. Made by the fleet.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from slimrl.arguments import Arguments
from slimrl.cluster.engine_actor import ServerEnd
from slimrl.sglang.access import key_of
from slimrl.sglang.calls import answers
from slimrl.sglang.errors import EngineError
from slimrl.sglang.external import ExternalServer, inspect
from slimrl.weights.roles import EngineEndpoint

LOOK_INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 5.0
SIGN_OF_LIFE = "/v1/loads"  # answered whatever the scheduler does; a server's /health waits for it to make a token


async def silence_of(url: str, path: str, limit_s: float, key: str | None = None) -> str:
    """Pending while somebody answers a GET of `path` at `url`, at least once in `limit_s`; then a sentence."""
    last_answer = time.monotonic()
    while time.monotonic() - last_answer < limit_s:
        await asyncio.sleep(min(LOOK_INTERVAL_S, limit_s / 4))
        if await asyncio.to_thread(answers, f"{url}{path}", min(ANSWER_TIMEOUT_S, limit_s), key):
            last_answer = time.monotonic()
    return f"{url} has not answered for {limit_s:g} s (--rollout-health-check-timeout)"


class ExternalEngine:
    """One running server; `life` counts how often it went away and came back."""

    what_follows, arrived = "it is left out until it is back", "is back"  # as of `Engine`; nobody starts another

    def __init__(self, address: str, index: int, args: Arguments, life: int = 0) -> None:
        self.address, self.index, self.life = address, index, life
        self._args = args
        self.key = key_of(args)  # what the server asks for
        self._server: ExternalServer | None = None

    @property
    def name(self) -> str:
        """As `Engine.name`."""
        return f"{self.index}.{self.life}" if self.life else f"{self.index}"

    @property
    def url(self) -> str:
        """Its address for requests."""
        return f"http://{self.address}"

    @property
    def endpoint(self) -> EngineEndpoint:
        """Where weights are sent to, once it has started: it lies on slots of its own."""
        size = self._server.tensor_parallel_size
        return EngineEndpoint(self.url, slots=[], tensor_parallel_size=size, life=self.life, key=self.key)

    def successor(self) -> ExternalEngine:
        """The same server after it went away."""
        return ExternalEngine(self.address, self.index, self._args, self.life + 1)

    async def start(self, timeout_s: float) -> None:
        """Looks whether the server can be used, in its first life at once, later for up to `timeout_s`.

        Raises EngineError with a sentence for everything that is wrong with it.
        """
        deadline = asyncio.get_running_loop().time() + (timeout_s if self.life else 0.0)
        while True:
            try:
                self._server = await asyncio.to_thread(
                    inspect,
                    self.address,
                    self._args.hf_checkpoint,
                    weights_come=not self._args.debug_rollout_only,
                    key=self.key,
                )
                return
            except EngineError:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def watch(self) -> ServerEnd:
        """Pending while it answers and is the one that was started."""
        limit_s = self._args.rollout_health_check_timeout
        silence = asyncio.ensure_future(silence_of(self.url, SIGN_OF_LIFE, limit_s, self.key))
        try:
            while not silence.done():
                await asyncio.wait([silence], timeout=LOOK_INTERVAL_S)
                if not silence.done() and await asyncio.to_thread(self._server.was_replaced):
                    return ServerEnd(f"SGLang server {self.name} ({self.url}) was started anew by its owner")
            return ServerEnd(f"SGLang server {self.name} of --rollout-external-engine-addrs: {silence.result()}")
        finally:
            silence.cancel()

    async def stopped(self) -> list[str]:
        """Nothing: its processes are not ours to see."""
        return []

    async def last_log_lines(self) -> tuple[Path | None, str]:
        """None: its log is with whoever started it."""
        return None, ""

    async def memory(self) -> dict[str, float]:
        """Nothing, likewise."""
        return {}

    async def kill(self) -> None:
        """Nothing: it is its owner's."""

    async def close(self) -> None:
        """Nothing, likewise."""
