"""What generation needs from an inference engine: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol


@dataclasses.dataclass
class Generation:
    """The answer to one request; `token_ids`, `log_probs` are aligned, one entry per new token."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str  # "stop" | "length" | "abort"
    weight_version: str
    text: str = ""


class EngineClient(Protocol):
    """Asynchronous client of a fleet of engines."""

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], session_id: str | None = None
    ) -> Generation:
        """Continue `input_ids`. Raises on an HTTP error, on a lost server (after the retries) and on a time-out."""
        ...

    async def abort_all(self) -> None:
        """Abort every request in flight; each returns with what it has and finish_reason "abort"."""
        ...
