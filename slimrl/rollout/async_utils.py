"""Helpers of the rollout process: asyncio tasks that never outlive their caller, a worker thread, garbage collection.

A cancellation by this module can be distinguished from one that a custom function raises. The worker thread is a
daemon: the process ends without waiting for it.

Garbage collection is tuned for thousands of samples, each with three lists of one entry per token. With Python's
default thresholds it takes more time than all other work on a rollout, and finds nothing: reference counts free the
samples. Cycles (failed tasks, custom objects) are still found: young ones after 50 000 allocations, older ones between
two rollouts at the latest. Fully asynchronous generation always has samples, so that old cycles are left to Python's
thresholds.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from slimrl.hooks import HookFailedError

T = TypeVar("T")

_OURS = "slimrl cancels this task"


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. At the first failure, cancels and awaits the other tasks, then raises the failure."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    if not tasks:
        return []
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done and task.cancelled():
                raise HookFailedError("a custom function cancelled the slimrl task in which it was called")
            if task in done and (error := task.exception()) is not None:
                raise error
        return [task.result() for task in tasks]
    finally:
        await cancel_and_wait(tasks)


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels running tasks and returns when every task has ended; their results are dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel(_OURS)
    await asyncio.gather(*tasks, return_exceptions=True)


def ends_from_outside(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Whether an error raised within `task` comes from ending the task, not from its code.

    That is a cancellation by this module, or the GeneratorExit of a coroutine whose event loop is closed.
    """
    if isinstance(error, GeneratorExit):
        return _running_task() is not task or task is None
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while isinstance(cause, asyncio.CancelledError) and cause not in seen:  # code may re-raise one
        if cause.args == (_OURS,):
            return True
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return False


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no running loop
        return None


class WorkerThread(Generic[T]):
    """Starts `work` in a thread; `result` and `raise_if_failed` raise its errors."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        # a daemon, unlike executor threads: a failed run ends without waiting for it
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def result(self) -> T:
        """Waits for the work and returns its result."""
        return self._future.result()

    def raise_if_failed(self) -> None:
        """Raises the work's error if it has failed already; does not wait."""
        if self._future.done():
            self._future.result()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:  # re-raised by `result`
            self._future.set_exception(error)


_THRESHOLDS = (50_000, 50, 10)  # Python's defaults: 700, 10, 10


def expect_many_samples() -> None:
    """Sets the thresholds and freezes existing objects; call once, after the process has loaded its modules."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def collect_between_rollouts(*, samples_are_held: bool) -> None:
    """Collects all generations, which takes milliseconds without samples; only young ones if samples are held."""
    gc.collect(1 if samples_are_held else 2)
