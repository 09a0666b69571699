"""A progress bar over bytes, on a terminal only, that several threads may move. Used by the converters' programs."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tqdm import tqdm


class ByteBar:
    """A context manager; `start` has the signature that the converters call `on_start`."""

    def __init__(self, title: str, *, shown: bool = True) -> None:
        self._title = title
        # None: tqdm itself stays silent where stderr is no terminal
        self._disable = None if shown else True
        self._bar: tqdm | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> ByteBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def start(self, nbytes: int) -> Callable[[int], object]:
        """Shows the bar for `nbytes` in all; returns the function that moves it by a number of bytes."""
        self._bar = tqdm(desc=self._title, total=nbytes, unit="B", unit_scale=True, disable=self._disable)
        return self._move

    def _move(self, nbytes: int) -> None:
        with self._lock:
            self._bar.update(nbytes)
