"""Loads custom functions from their import paths, checks them against their contracts, and names what they raise.

A path is resolved and its signature checked without calling the function: while the command line is checked, so that a
wrong hook costs one sentence, and again where the hook is used.
What a custom function raises becomes an error that names the function and its lines. Nothing that it raises passes for
the end of a process or of an event loop: not `sys.exit()`, a KeyboardInterrupt, a GeneratorExit, a CancelledError that
nothing asked for, nor any other BaseException. `contain_tasks` extends this to the asyncio tasks that a hook makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import difflib
import functools
import importlib
import inspect
import itertools
import os
import sys
import traceback
import types
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from slimrl.hooks import slime_imports
from slimrl.hooks.base import Hook, HookError, HookExitError, HookFailedError
from slimrl.hooks.rollout_hooks import CustomDataSource

# modules that scripts written for slime name, and what to do where there is no such module
_INSTEAD = {
    "fully_async_rollout": (
        "fully asynchronous generation is train_async.py --max-weight-staleness N here: leave --rollout-function-path"
        " out"
    ),
    "slime_plugins": "the layers of every family are slimrl's own: leave --spec out",
}


def resolve(path: str, contract: type[Hook]) -> Callable[..., Any]:
    """The function at the dotted import path `path`, checked against `contract` (a Protocol of this package).

    Paths that start with `slime.` are looked up under `slimrl.`, where the same hooks live; the current folder is
    importable. Raises HookError saying what is wrong and what is expected.
    """
    path, function = _found(path)
    if not callable(function):
        kind = type(function).__name__
        raise HookError(f"{path} is not a function but a value of type {kind}: {expectation(contract)}")
    _check_call(path, function, contract)
    return function


def resolve_data_source(path: str) -> type[CustomDataSource]:
    """The class at the dotted import path `path`, checked against `CustomDataSource`. Raises HookError as `resolve`."""
    path, found = _found(path)
    expected = "expected is a class with __init__(args), get_samples(num_groups), add_samples(groups) and __len__()"
    if not isinstance(found, type):
        raise HookError(f"{path} is not a class but a value of type {type(found).__name__}: {expected}")
    for name in ("__init__", "get_samples", "add_samples", "__len__"):
        method = getattr(found, name, None)
        if not callable(method):
            raise HookError(f"{path} has no {name}: {expected}")
        wanted = list(inspect.signature(getattr(CustomDataSource, name)).parameters)
        offered = ["tokenizer"] if name == "__init__" and accepts_keyword(method, "tokenizer") else []
        try:
            inspect.signature(method).bind(*wanted, **dict.fromkeys(offered))
        except TypeError as error:
            raise HookError(f"{path}.{name} cannot be called as needed ({error}): {expected}") from error
    pairs = (("state_dict", "load_state_dict"), ("save", "load"))
    if not any(all(callable(getattr(found, name, None)) for name in pair) for pair in pairs):
        raise HookError(
            f"{path} cannot keep its place over a restart: give it state_dict() and load_state_dict(state), or"
            " save(rollout_id) and load(rollout_id)"
        )
    return found


def own_path(path: str) -> str:
    """The path under which slimrl has what slime has at `path`."""
    return "slimrl." + path.removeprefix("slime.") if path.startswith("slime.") else path


def expectation(contract: type[Hook]) -> str:
    """The contract's call in words, for messages and docs: "expected is async f(args, sample)"."""
    is_async, call = _call(contract)
    names = [f"{name}=..." if parameter.kind is parameter.KEYWORD_ONLY else name for name, parameter in call.items()]
    kind = "async or ordinary " if contract.either else "async " if is_async else ""
    return f"expected is {kind}f({', '.join(names)})"


def accepts_keyword(function: Callable[..., Any], keyword: str) -> bool:
    """Whether `function` may be called with this keyword argument."""
    parameters = inspect.signature(function).parameters
    if keyword in parameters:
        return parameters[keyword].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def accepted(function: Callable[..., Any], contract: type[Hook], **values: Any) -> dict[str, Any]:
    """Those of the keyword arguments that `contract` offers which `function` takes. `values` has all of them."""
    return {name: values[name] for name in contract.offered if accepts_keyword(function, name)}


def _found(path: str) -> tuple[str, Any]:
    """The path under slimrl, and what is there."""
    path = own_path(path)
    module_path, _, name = path.rpartition(".")
    if not module_path or not all(part.isidentifier() for part in path.split(".")):
        raise HookError(f"{path!r} is not a dotted import path: write package.module.function")
    return path, _attribute(_import_module(module_path), name)


def _call(contract: type[Hook]) -> tuple[bool, dict[str, inspect.Parameter]]:
    method = contract.__call__
    parameters = dict(inspect.signature(method).parameters)
    del parameters["self"]
    return inspect.iscoroutinefunction(method), parameters


def _import_module(module_path: str) -> types.ModuleType:
    # `python train.py` puts the script's folder on the path, not the folder the user is in
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    slime_imports.offer()
    try:
        return importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_path == error.name or module_path.startswith(error.name + ".")):
            usual = "check the spelling, or start from the folder that holds it"
            fix = next((_INSTEAD[part] for part in module_path.split(".") if part in _INSTEAD), usual)
            raise HookError(f"there is no module {error.name}: {fix}") from error
        raise HookError(f"module {module_path} itself cannot be imported ({error}): install what it needs") from error
    except KeyboardInterrupt:  # of the terminal, while it is imported
        raise
    except BaseException as error:  # user code: importing it may raise anything, and sys.exit() must not end us
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise HookError(f"module {module_path} itself cannot be imported ({text}): fix the module") from error


def _attribute(module: types.ModuleType, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        functions = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
    nearest = difflib.get_close_matches(name, functions, n=1)
    fix = f"did you mean {nearest[0]}?" if nearest else "check the spelling"
    raise HookError(f"module {module.__name__} has no {name}: {fix}")


def _check_call(path: str, function: Callable[..., Any], contract: type[Hook]) -> None:
    is_async, call = _call(contract)
    positional = [name for name, parameter in call.items() if parameter.kind is not parameter.KEYWORD_ONLY]
    try:
        signature = inspect.signature(function)
    except ValueError as error:  # some functions written in C have none
        raise HookError(f"{path} does not say what it can be called with: {expectation(contract)}") from error
    keywords = dict.fromkeys({*call, *accepted(function, contract, **dict.fromkeys(contract.offered))} - {*positional})
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        raise HookError(f"{path}{signature} cannot be called as needed ({error}): {expectation(contract)}") from error
    if not contract.either and _is_async(function) != is_async:
        found = "async" if _is_async(function) else "not async"
        raise HookError(f"{path} is {found}: {expectation(contract)}")


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


_in_hook: contextvars.ContextVar[bool] = contextvars.ContextVar("slimrl_in_hook", default=False)
_ENDS_A_LOOP = (SystemExit, KeyboardInterrupt)  # asyncio lets them through a task, out of the loop


class naming:  # noqa: N801
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
            raise HookFailedError(f"{self._name} raised {described(error)}{user_frames(error)}") from error


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


def user_frames(error: BaseException) -> str:
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

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **keywords: Any) -> asyncio.Task[Any]:
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
