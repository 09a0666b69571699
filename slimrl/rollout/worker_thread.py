"""One piece of work in a thread of its own that nobody has to wait for when the process ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class WorkerThread(Generic[T]):
    """Starts `work` at once. What it raises is raised by `result`, and by `raise_if_failed` as soon as it is known."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        # a daemon, unlike the threads of an executor: a run that fails ends without it
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def result(self) -> T:
        """What the work returned, once it has."""
        return self._future.result()

    def raise_if_failed(self) -> None:
        """Returns at once, and raises what the work raised, if it did so already."""
        if self._future.done():
            self._future.result()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:  # handed to whoever asks for the result
            self._future.set_exception(error)
