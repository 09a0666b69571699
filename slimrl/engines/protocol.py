"""The interface to an inference engine (token ids in, token ids and log-probabilities out), and its errors.

`ServiceError` is the base of all failures of engines, graders and reward services. They are never the fault of a custom
function, also where a custom function meets them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from slimrl.data.sample import Span


class ServiceError(RuntimeError):
    """Something failed that slimrl itself runs or asks."""


@dataclasses.dataclass
class Generation:
    """The answer to one request; `token_ids`, `log_probs` are aligned, one entry per new token.

    `version_spans` say which weights drew which of them (`slimrl.data.sample`); empty where it was always
    `weight_version`, which is the last.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str  # "stop" | "length" | "abort"
    weight_version: str
    text: str = ""
    version_spans: list[Span] = dataclasses.field(default_factory=list)
    sent_ns: int = 0  # when the request that was answered was sent, by time.monotonic_ns; 0 where that is not known


class EngineCallError(ServiceError):
    """What an EngineClient raises when a request fails: also within a function of the user's that asks the engine."""


class EngineClient(Protocol):
    """Asynchronous client of a fleet of engines."""

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], session_id: str | None = None
    ) -> Generation:
        """Continue `input_ids`. Raises on an HTTP error, on a lost server (after the retries) and on a time-out."""
        ...

    async def ask(self, path: str, payload: dict[str, Any], session_id: str | None = None) -> Any:
        """The decoded answer to any POST to the fleet ("/generate", "/v1/chat/completions"), as the engine gave it.

        Raises as `generate` does.
        """
        ...

    async def abort_all(self) -> None:
        """Abort every request in flight; each returns with what it has and finish_reason "abort"."""
        ...


class StoppableEngine:
    """An EngineClient that can be told that a rollout is full; whoever asks it later gets nothing more, at once."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.stopped = False

    def start(self) -> None:
        """Lets requests through (again)."""
        self.stopped = False

    async def stop(self) -> None:
        """Aborts what is in flight; from now on every request comes back aborted and empty."""
        self.stopped = True
        await self._client.abort_all()

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], session_id: str | None = None
    ) -> Generation:
        """As the client's; aborted and without tokens once it is stopped."""
        if self.stopped:
            return Generation([], [], "abort", "")
        return await self._client.generate(input_ids, sampling_params, session_id)

    async def ask(self, path: str, payload: dict[str, Any], session_id: str | None = None) -> Any:
        """As the client's; once it is stopped, what a generation answers that was aborted before it began."""
        if self.stopped and (answer := aborted_answer(path)) is not None:
            return answer
        return await self._client.ask(path, payload, session_id)

    async def abort_all(self) -> None:
        """As the client's."""
        await self._client.abort_all()


def aborted_answer(path: str) -> dict[str, Any] | None:
    """What the engine's `path` answers to a request that was aborted without a token; None where it generates none."""
    finish = {"type": "abort", "message": "the rollout is full"}
    if path == "/generate":
        meta = {"id": "", "finish_reason": finish, "prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
        return {"text": "", "output_ids": [], "meta_info": {**meta, "output_token_logprobs": []}}
    if path == "/v1/chat/completions":
        message = {"role": "assistant", "content": "", "tool_calls": None}
        return {"choices": [{"index": 0, "message": message, "logprobs": {"content": []}, "finish_reason": "abort"}]}
    return None


class EngineError(EngineCallError):
    """Any failure of an engine or of a call to one."""


class EngineRequestError(EngineError):
    """The engine refused a request (HTTP 4xx): sending it again would be refused again."""

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"{url} refused the request with HTTP {status}: {body}")
        self.url, self.status, self.body = url, status, body

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        return type(self), (self.url, self.status, self.body)


class EngineResponseError(EngineError):
    """What answered is no engine, or a broken one: the answer has not the form or the values that it must have."""


class EngineUnavailableError(EngineError):
    """No engine answered: the connection failed or broke, or the answer was HTTP 5xx, after all retries."""


class EngineTimeoutError(EngineUnavailableError):
    """An engine did not answer in time."""
