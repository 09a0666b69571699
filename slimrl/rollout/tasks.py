"""Running asyncio tasks so that none outlives the call that started it, whatever happens.

Promises that the cancellation of a task by this module can be told from one that a function of the user's raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

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
    while isinstance(cause, asyncio.CancelledError) and cause not in seen:  # code may raise one anew
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
