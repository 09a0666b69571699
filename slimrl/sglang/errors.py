"""What can go wrong between slimrl and its engines."""

from __future__ import annotations

from slimrl.rollout.engine import EngineCallError


class EngineError(EngineCallError):
    """Any failure of an engine or of a call to one."""


class EngineRequestError(EngineError):
    """The engine refused a request (HTTP 4xx): sending it again would be refused again."""

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"{url} refused the request with HTTP {status}: {body}")
        self.url, self.status, self.body = url, status, body

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        return type(self), (self.url, self.status, self.body)


class EngineAnswerError(EngineError):
    """What answered is no engine, or a broken one: the answer has not the form or the values that it must have."""


class EngineUnavailableError(EngineError):
    """No engine answered: the connection failed or broke, or the answer was HTTP 5xx, after all retries."""


class EngineTimeoutError(EngineUnavailableError):
    """An engine did not answer in time."""
