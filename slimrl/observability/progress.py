"""A progress bar for people at a terminal; into a file or a pipe it writes nothing."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import TextIO


class ProgressBar:
    """`with ProgressBar("generate") as bar: bar.update_to(done, total)`; drawn on stderr and gone when left.

    `enabled` is False where the stream is no terminal: then nothing is drawn, and callers can save the polling.
    """

    def __init__(self, title: str, *, unit: str = "sample", stream: TextIO | None = None) -> None:
        self._title = title
        self._unit = unit
        self._stream = sys.stderr if stream is None else stream
        self.enabled = self._stream.isatty()

    def __enter__(self) -> ProgressBar:
        if self.enabled:
            from tqdm import tqdm

            self._bar = tqdm(
                desc=self._title, unit=self._unit, file=self._stream, leave=False, dynamic_ncols=True, mininterval=0.2
            )
        return self

    def update_to(self, done: int, total: int) -> None:
        """Show `done` of `total`; either may change in both directions between calls. `total` 0: not known yet."""
        if not self.enabled:
            return
        self._bar.total = total or None
        self._bar.n = done
        with contextlib.suppress(OSError):  # the terminal is gone
            self._bar.refresh()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            with contextlib.suppress(OSError):
                self._bar.close()
