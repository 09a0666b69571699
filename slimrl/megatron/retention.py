"""Which older checkpoints go when a new one is complete: `--save-total-limit` and `--save-retain-interval`.

Promises that the newest complete checkpoint stays, and all that training did not write itself. Called by
`checkpoint_saver` on rank 0.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from pathlib import Path

from slimrl.arguments import Arguments
from slimrl.megatron import checkpoint_folder

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Retention:
    """`newest` checkpoints stay, and those after a multiple of `interval` rollouts; both None: all stay."""

    newest: int | None = None
    interval: int | None = None

    @classmethod
    def from_args(cls, args: Arguments) -> Retention:
        """What the flags ask for."""
        return cls(args.save_total_limit, args.save_retain_interval)

    def surplus(self, iterations: Iterable[int], written: int) -> list[int]:
        """Those of `iterations` that go once `written` is complete, in rising order.

        Iterations above `written`, which an earlier run went on to, are left to be replaced one by one.
        """
        if self.newest is None and self.interval is None:
            return []
        older = sorted(iteration for iteration in set(iterations) if iteration < written)
        kept = (self.newest or 1) - 1
        return [i for i in older[: len(older) - kept] if self.interval is None or (i + 1) % self.interval != 0]

    def apply(self, root: Path, written: int) -> None:
        """Delete what is surplus in `root`; a folder that cannot be deleted is named in the log and stays."""
        if self.newest is None and self.interval is None:
            return
        for iteration in self.surplus(checkpoint_folder.own_iterations(root), written):
            try:
                checkpoint_folder.remove(root, iteration)
            except OSError as error:
                _logger.warning("an old checkpoint could not be deleted: %s", error)
