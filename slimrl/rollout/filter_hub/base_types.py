"""What a dynamic sampling filter may answer."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class DynamicFilterOutput:
    """Whether a group is trained on; `reason` names the drop in `rollout/dynamic_filter/drop_<reason>`."""

    keep: bool
    reason: str | None = None

    @classmethod
    def of(cls, verdict: Any) -> DynamicFilterOutput:
        """From what a filter returned: this class, an object with `keep` and `reason`, a bool or a scalar tensor."""
        keep = getattr(verdict, "keep", verdict)
        return cls(bool(keep), getattr(verdict, "reason", None))
