"""What the rollout manager tells of its servers: how one ended, the events of their recovery, and how many serve."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from slimrl.weights.update.topology import EngineEndpoint


@dataclasses.dataclass(frozen=True)
class ServerExit:
    """How a process of a server ended; `str()` adds the last lines of its log."""

    what: str
    log_path: Path | None = None
    last_lines: str = ""

    def __str__(self) -> str:
        return self.what if self.log_path is None else f"{self.what}; last lines of {self.log_path}:\n{self.last_lines}"


@dataclasses.dataclass(frozen=True)
class RecoveryEvents:
    """The events after those already received; `serial` counts all events so far."""

    serial: int
    lines: list[str]


@dataclasses.dataclass(frozen=True)
class EngineGroupStatus:
    """Servers that have started and wait for weights, and the number of serving ones."""

    waiting: list[EngineEndpoint]
    serving: int
