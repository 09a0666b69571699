"""What functions of the user's raise, made into errors that name the function and its lines.

Promises that nothing which such a function raises passes for the end of a process or of an event loop: `sys.exit()`, a
KeyboardInterrupt, a GeneratorExit, a CancelledError that nobody asked for and every other BaseException become an error
like any other. Used wherever a hook is called; the tasks of asyncio in which several run are `rollout.sample_task`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
import os
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from slimrl.hooks.contract import Hook, HookExitError, HookFailedError
from slimrl.hooks.resolving import resolve

_in_hook: contextvars.ContextVar[bool] = contextvars.ContextVar("slimrl_in_hook", default=False)
_ENDS_A_LOOP = (SystemExit, KeyboardInterrupt)  # asyncio lets them through a task, out of the loop


class naming:
    """Whatever the hook at `path` raises in this block becomes a HookFailedError that names it, and its lines.

    The block must not wait for anything: a cancellation within it is taken for the hook's. What `passes` stays as it
    is.
    No generator with contextlib's decorator, which lets a StopIteration through whatever is made of it.
    """

    def __init__(self, flag: str, path: str, *, passes: Callable[[BaseException], bool] = lambda error: False) -> None:
        self._name = f"{flag} {path}"
        self._passes = passes

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._passes(error):  # it may be anything; nothing is swallowed
            raise HookFailedError(f"{self._name} raised {described(error)}{own_lines(error)}") from error


def named(flag: str, path: str, contract: type[Hook]) -> Callable[..., Any]:
    """The function at `path`, as `resolve` finds it, which raises like a block in `naming`."""
    return naming_calls(flag, path, resolve(path, contract))


def naming_calls(flag: str, path: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which raises like a block in `naming`."""

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with naming(flag, path):
            return function(*arguments, **keywords)

    return call


def described(error: BaseException) -> str:
    """ "KeyError: 'x'"; the type alone where the error says nothing, and of a group of errors the first, too."""
    if isinstance(error, HookExitError) and error.__cause__ is not None:
        return described(error.__cause__)
    text = str(error)
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{said}: {described(error.exceptions[0])}" if isinstance(error, BaseExceptionGroup) else said


def own_lines(error: BaseException) -> str:
    """The traceback from the first line outside of slimrl on, each as "\n  file:line in function: code".

    Empty where the error comes from slimrl alone.
    """
    package = str(Path(__file__).parents[1]) + os.sep
    frames = itertools.dropwhile(
        lambda frame: frame.filename.startswith(package) or frame.filename == contextlib.__file__,
        (frame for frame in _trace(error) if frame.filename != __file__),
    )
    return "".join(f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames)


def _trace(error: BaseException | None) -> Iterator[traceback.FrameSummary]:
    """With the lines of the task that failed, where the error is what came of that."""
    if error is not None:
        yield from traceback.extract_tb(error.__traceback__)
    if isinstance(error, BaseExceptionGroup):
        yield from _trace(error.exceptions[0])
    elif isinstance(error, HookExitError):
        yield from _trace(error.__cause__)


@contextlib.contextmanager
def in_hook() -> Iterator[None]:
    """The tasks that are made in this block, and in tasks made by these, are a hook's: see `contain_tasks`."""
    before = _in_hook.get()
    _in_hook.set(True)
    try:
        yield
    finally:
        _in_hook.set(before)  # no token: a coroutine may be closed in another context


def contain_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """From now on no task that a hook makes in `loop` can end the loop: whoever awaits it finds a HookExitError."""

    def make(
        loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **keywords: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(_Contained(coroutine) if _in_hook.get() else coroutine, loop=loop, **keywords)

    loop.set_task_factory(make)


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine that raises HookExitError in place of what would end the loop.

    No coroutine function around it: one that is cancelled before it began would never await what it is around.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.__name__ = getattr(coroutine, "__name__", type(coroutine).__name__)  # for the repr of its task
        self.__qualname__ = getattr(coroutine, "__qualname__", self.__name__)

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """One step of the coroutine."""
        try:
            return self._coroutine.send(value)
        except _ENDS_A_LOOP as error:
            raise HookExitError(described(error)) from error

    def throw(self, *error: Any) -> Any:
        """Likewise."""
        try:
            return self._coroutine.throw(*error)
        except _ENDS_A_LOOP as left:
            raise HookExitError(described(left)) from left

    def close(self) -> None:
        """Ends it."""
        self._coroutine.close()
