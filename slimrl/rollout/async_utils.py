"""Helpers of the rollout process: asyncio tasks that never outlive their caller, a worker thread, garbage collection.

A cancellation by this module can be told from one that a custom function raises. The worker thread is a daemon: the
process ends without waiting for it.

Garbage collection is tuned for thousands of samples, each with three lists of one entry per token. With Python's own
thresholds it takes more time than all other work on a rollout, and finds nothing: reference counts free the samples.
Cycles (failed tasks, custom objects) are still found: young ones after 50 000 allocations, older ones at the latest
between two rollouts. Fully asynchronous generation always holds samples, so that old cycles are left to Python's own
count.
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

_OURS = "slimrl ends this task"


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. At the first failure the others are cancelled and awaited, then it is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    if not tasks:
        return []
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done and task.cancelled():
                raise HookFailedError("a function of the user's cancelled a task of slimrl's, in which it was called")
            if task in done and (error := task.exception()) is not None:
                raise error
        return [task.result() for task in tasks]
    finally:
        await cancel_and_wait(tasks)


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels what still runs and returns when every task has ended; their outcomes are dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel(_OURS)
    await asyncio.gather(*tasks, return_exceptions=True)


def ends_from_outside(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Whether an error that code within `task` raised is the end of that task, which somebody else wants.

    That is a cancellation by this module, and the GeneratorExit of a coroutine whose event loop is gone.
    """
    if isinstance(error, GeneratorExit):
        return _running_task() is not task or task is None
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while isinstance(cause, asyncio.CancelledError) and cause not in seen:  # code may raise one again
        if cause.args == (_OURS,):
            return True
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return False


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return None


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


_THRESHOLDS = (50_000, 50, 10)  # Python's own: 700, 10, 10


def expect_many_samples() -> None:
    """To be called once, when the process has loaded what it needs: that is never walked through again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def collect_between_rollouts(*, samples_are_held: bool) -> None:
    """Collects everything, a few milliseconds where no samples are held; else what is young."""
    gc.collect(1 if samples_are_held else 2)
