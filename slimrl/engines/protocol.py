"""The interface to an inference engine (token ids in, token ids and log-probabilities out), and its errors.

`ServiceError` is the base of all failures of engines, graders and reward services. Such an error is never attributed to
a custom function, even if it is raised inside one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol

from slimrl.data.packed import PackedFields
from slimrl.data.sample import Span
from slimrl.engines.request_stats import RequestStats

RETRY_TIMEOUT_S = 16.0  # of a request that no server accepts, without --use-fault-tolerance


class ServiceError(RuntimeError):
    """A service that slimrl runs or calls failed."""


@dataclasses.dataclass
class Generation(PackedFields):
    """The response to one request; `token_ids` and `log_probs` are aligned, one entry per new token.

    `version_spans` give the weight version that sampled each token (`slimrl.data.sample`); empty if all tokens are from
    `weight_version`, the last version.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str  # "stop" | "length" | "abort"
    weight_version: str
    text: str = ""
    version_spans: list[Span] = dataclasses.field(default_factory=list)
    sent_ns: int = 0  # time.monotonic_ns when the successful attempt was sent; 0 if unknown

    PACKABLE: ClassVar[frozenset[str]] = frozenset({"token_ids", "log_probs"})

    @property
    def new_tokens(self) -> int:
        """Number of new tokens."""
        return len(self.column("token_ids"))


class EngineCallError(ServiceError):
    """A request of an EngineClient failed, also one that a custom function made."""


class EngineClient(Protocol):
    """Asynchronous client of a group of engines."""

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], session_id: str | None = None
    ) -> Generation:
        """Continue `input_ids`. Raises on an HTTP error, on a lost server (after the retries) and on a timeout."""
        ...

    async def ask(self, path: str, payload: dict[str, Any], session_id: str | None = None) -> Any:
        """The engine's decoded response to any POST ("/generate", "/v1/chat/completions"), unchanged.

        Raises as `generate` does.
        """
        ...

    async def abort_all(self) -> None:
        """Abort every request in flight; each returns its tokens so far and finish_reason "abort"."""
        ...


class EngineGroupClient(EngineClient, Protocol):
    """The client that the rollout manager opens (`async with`) and closes at the end."""

    server_urls: list[str]  # for aborts, which the router does not forward; assign when the servers change
    resent: int  # number of resent requests
    requests: RequestStats

    @property
    def in_flight(self) -> int:
        """Number of requests that were sent and not yet answered."""

    async def __aenter__(self) -> EngineGroupClient:
        """Opens its connections."""
        ...

    async def close(self) -> None:
        """Drops every connection; requests in flight are cancelled and not resent."""


class StoppableEngine:
    """An EngineClient that can be stopped when a rollout is full; later requests return empty at once."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.stopped = False

    def start(self) -> None:
        """Lets requests pass (again)."""
        self.stopped = False

    async def stop(self) -> None:
        """Aborts the requests in flight; every later request returns aborted and empty."""
        self.stopped = True
        await self._client.abort_all()

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], session_id: str | None = None
    ) -> Generation:
        """The client's `generate`; aborted and without tokens once stopped."""
        if self.stopped:
            return Generation([], [], "abort", "")
        return await self._client.generate(input_ids, sampling_params, session_id)

    async def ask(self, path: str, payload: dict[str, Any], session_id: str | None = None) -> Any:
        """The client's `ask`; once stopped, the response of a generation that was aborted before it began."""
        if self.stopped and (answer := aborted_answer(path)) is not None:
            return answer
        return await self._client.ask(path, payload, session_id)

    async def abort_all(self) -> None:
        """The client's `abort_all`."""
        await self._client.abort_all()


def aborted_answer(path: str) -> dict[str, Any] | None:
    """The engine's response on `path` to a request aborted without a token; None if `path` does not generate."""
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
    """The engine rejected a request (HTTP 4xx); a retry would be rejected, too."""

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"{url} rejected the request with HTTP {status}: {body}")
        self.url, self.status, self.body = url, status, body

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        return type(self), (self.url, self.status, self.body)


class EngineResponseError(EngineError):
    """The response is malformed or has impossible values: the server is broken or not an engine."""


class EngineUnavailableError(EngineError):
    """No engine responded after all retries: the connection failed or broke, or the response was HTTP 5xx."""


class EngineTimeoutError(EngineUnavailableError):
    """An engine did not respond in time."""
