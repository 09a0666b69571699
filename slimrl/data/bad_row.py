"""What stands in the place of a row that cannot be used, and how such rows are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

_MAX_LISTED = 20


@dataclasses.dataclass(frozen=True)
class BadRow:
    """A row that cannot be read; `reason` completes "<file>:<line>: ..."."""

    reason: str


Row = dict[str, Any] | BadRow


class BadRowsError(ValueError):
    """More rows of a data set are bad than are allowed."""


def bad_rows_error(source: str, bad: Sequence[str], allowed: int, mend: str) -> BadRowsError:
    """The error over `bad`, one `<file>:<line>: <reason>` each, the first twenty in full."""
    more = [f"and {len(bad) - _MAX_LISTED} more"] if len(bad) > _MAX_LISTED else []
    count = "1 bad row" if len(bad) == 1 else f"{len(bad)} bad rows"
    limit = f" ({allowed} allowed)" if allowed else ""
    return BadRowsError("\n  ".join([f"{count} in {source}{limit}: {mend}", *bad[:_MAX_LISTED], *more]))
