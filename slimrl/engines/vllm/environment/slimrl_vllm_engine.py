"""The state that slimrl's calls share in a vLLM server: running requests, the pause, the version of the weights.

Runs in vLLM's environment. `Engine` wraps vLLM's `AsyncLLM`; `sampling_params` translates the parameters of a request.
Every token is attributed to the weight version at its arrival: a pause returns when the scheduler is idle and its
outputs have arrived, and the version changes only after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from typing import Any

PING_INTERVAL_S = 1.0
DRAIN_TIMEOUT_S = 30.0  # for aborted requests to return
# slimrl's name (that of SGLang's server) -> vLLM's
_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
    "logit_bias": "logit_bias",
}


class UnknownParameterError(ValueError):
    """A request has a sampling parameter that vLLM has no counterpart of."""


class RefusedError(Exception):
    """The call is not possible in the server's state; it would be refused again."""


@dataclasses.dataclass
class Answer:
    """Tokens of one request so far; `spans` are (version, start, end)."""

    request_id: str
    token_ids: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    spans: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: str = "abort"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0

    def add(self, output: Any, version: str) -> None:
        """Appends the new tokens of an output."""
        completion = output.outputs[0]
        start = len(self.token_ids)
        self.token_ids += completion.token_ids
        if completion.token_ids:  # the last output of an aborted request has no tokens, and all earlier entries again
            new = zip(completion.token_ids, completion.logprobs, strict=True)
            self.log_probs += [entry[token].logprob for token, entry in new]
        self.text += completion.text
        self.cached_tokens = output.num_cached_tokens or self.cached_tokens
        end = len(self.token_ids)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], end)
        elif end > start:
            self.spans.append((version, start, end))
        if output.finished:
            self.finish_reason = completion.finish_reason or "abort"


class Engine:
    """The calls of slimrl on one vLLM engine; all methods run in its event loop."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.version = "default"
        self.started_at = time.time()
        self.prefilled = False
        self._ids = itertools.count()
        self._running: dict[str, Answer] = {}
        self._waiting = 0
        self._paused: str | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._aborts = 0  # number of aborts, so that a held request notices one
        self.updating = False
        self.answered_at = time.time()

    async def generate(self, input_ids: list[int], given: dict[str, Any]) -> Answer:
        """Continues `input_ids`; an aborted request returns its tokens so far. Raises ValueError for a bad request."""
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = sampling_params(given, RequestOutputKind.DELTA)
        answer = Answer(f"slimrl-{next(self._ids)}", prompt_tokens=len(input_ids))
        began = time.monotonic()
        if not await self._admitted():
            return answer
        self._running[answer.request_id] = answer
        try:
            prompt = TokensPrompt(prompt_token_ids=input_ids)
            async for output in self.client.generate(prompt, params, answer.request_id):
                answer.add(output, self.version)
                self.prefilled = True
        finally:
            del self._running[answer.request_id]
        answer.seconds = time.monotonic() - began
        return answer

    async def _admitted(self) -> bool:
        """Waits for the end of a pause; False if the request was aborted meanwhile."""
        aborts = self._aborts
        self._waiting += 1
        try:
            while not self._open.is_set() and aborts == self._aborts:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._open.wait(), 0.1)
        finally:
            self._waiting -= 1
        return aborts == self._aborts

    async def abort_all(self) -> None:
        """Returns every request with its tokens so far."""
        self._aborts += 1
        if self._running:
            await self.client.abort(list(self._running))

    async def pause(self, mode: str) -> None:
        """Stops generation: "abort" returns running requests, "retract" keeps them without their KV cache."""
        if mode not in ("abort", "retract"):
            raise RefusedError(f"the mode of a pause is {mode!r}: give abort or retract")
        self._open.clear()
        self._paused = mode
        if mode == "abort":
            await self.client.abort(list(self._running))
        await self.client.pause_generation(mode="abort" if mode == "abort" else "keep", clear_cache=True)
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while mode == "abort" and self._running and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    async def resume(self) -> None:
        """Ends the pause."""
        await self.client.resume_generation()
        self._paused = None
        self._open.set()

    async def flush_cache(self) -> None:
        """Empties the KV cache. Raises RefusedError while requests run, unless a pause holds them."""
        if self._running and self._paused != "retract":
            raise RefusedError(f"{len(self._running)} requests run: the KV cache cannot be emptied")
        if not await self.client.reset_prefix_cache(reset_running_requests=self._paused == "retract"):
            raise RefusedError("the KV cache is in use and cannot be emptied")

    async def on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of the worker extension on every rank."""
        return await self.client.collective_rpc(method, args=arguments)

    async def begin_update(self) -> None:
        """Opens an update. Raises RefusedError if one is open."""
        if self.updating:
            raise RefusedError("a weight update is open: end it first")
        await self.on_workers("slimrl_begin")
        self.updating = True

    async def end_update(self) -> None:
        """Closes the update. Raises RefusedError if none is open."""
        if not self.updating:
            raise RefusedError("no weight update is open")
        self.updating = False
        await self.on_workers("slimrl_end")

    async def load(self, method: str, *arguments: Any) -> None:
        """Loads tensors within the open update. Raises RefusedError if none is open."""
        if not self.updating:
            raise RefusedError("no weight update is open: POST /begin_weight_update first")
        await self.on_workers(method, *arguments)

    async def set_version(self, version: str) -> None:
        """Names the loaded weights, in vLLM too."""
        await self.client.update_weight_version(version)
        self.version = version

    async def ping(self) -> None:
        """Returns when the engine's own process has answered."""
        await self.client.is_paused()
        self.answered_at = time.time()

    async def watch(self) -> None:
        """Asks the engine's process every second; `answered_at` is the time of its last answer."""
        while True:
            with contextlib.suppress(Exception):  # a dead engine ends the server by itself
                await self.ping()
            await asyncio.sleep(PING_INTERVAL_S)

    def counts(self) -> tuple[int, int]:
        """The numbers of running and waiting requests."""
        running = sum(bool(answer.token_ids) for answer in self._running.values())
        return running, len(self._running) - running + self._waiting


def sampling_params(given: dict[str, Any], output_kind: Any) -> Any:
    """The `SamplingParams` of a request, with the log-probability of every sampled token.

    Raises UnknownParameterError, which names the parameter, and ValueError for a value that vLLM rejects.
    """
    from vllm import SamplingParams

    if unknown := sorted(given.keys() - _NAMES.keys()):
        raise UnknownParameterError(f"sampling_params has {', '.join(unknown)}, which vLLM's server does not take here")
    values = {_NAMES[name]: value for name, value in given.items() if value is not None}
    return SamplingParams(**values, logprobs=0, detokenize=True, output_kind=output_kind)
