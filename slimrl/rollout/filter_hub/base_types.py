"""What a dynamic sampling filter may answer."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class DynamicFilterOutput:
    """Whether a group is trained on; `reason` names the drop in `rollout/dynamic_filter/drop_<reason>`.

    A dropped group with `keep_when_insufficient` is trained on after all where the prompts that were sent out do not
    fill the rollout; no more are sent out then. With `--max-weight-staleness` there are always more: it stays dropped.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False

    @classmethod
    def of(cls, verdict: Any) -> DynamicFilterOutput:
        """From what a filter returned: this class, an object with `keep` and `reason`, a bool or a scalar tensor.

        Raises TypeError for anything else, None included.
        """
        keep = getattr(verdict, "keep", verdict)
        if keep is None or isinstance(keep, str | list | tuple | dict):
            raise TypeError(f"it returned {verdict!r}: return a bool, a scalar tensor or DynamicFilterOutput")
        reason = getattr(verdict, "reason", None)
        return cls(bool(keep), reason, bool(getattr(verdict, "keep_when_insufficient", False)))
