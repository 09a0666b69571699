"""Loads custom functions from their import paths, checks them against their contracts, and wraps their errors.

A path is resolved and its signature checked without calling the function: once while the command line is checked, so
that a wrong hook is reported before anything starts, and again when the hook is used. Exceptions of a custom function
become an error that names the function and its lines. This includes every BaseException, so that a hook cannot end the
process or the event loop: `sys.exit()`, KeyboardInterrupt, GeneratorExit, an unrequested CancelledError.
`contain_tasks` extends this to the asyncio tasks that a hook creates. `plain_number` converts a returned number to a
plain float: numpy and torch scalars cannot be written as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import difflib
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import itertools
import os
import sys
import traceback
import types
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from slimrl.hooks.contracts import CustomDataSource, Hook

SLIME = "slime"
_SLIME_TABLE = "slimrl.compatibility.slime"  # by name: it is in a higher layer, and is loaded on demand

# modules and functions named in scripts written for slime that do not exist here -> what to use instead
_INSTEAD = {
    "fully_async_rollout": (
        "fully asynchronous generation is train_async.py --max-weight-staleness N here: leave --rollout-function-path"
        " out"
    ),
    "train_infer_mismatch_helper": (
        "importance weights and rejection are --use-tis with --tis-level and --tis-mode, and --use-rs, here"
        " (docs/algorithms.md): leave --custom-tis-function-path out"
    ),
    "icepop_function": "IcePop is --use-tis --tis-mode mask here: leave --custom-tis-function-path out",
    "reward_func_route_by_domain": (
        "teachers by domain are --opd-teacher-models NAME ... with --opd-teacher-key domain here, which name frozen"
        " models of --sglang-config (or NAME=FOLDER, on GPUs beside those of --rollout-num-gpus): give these and"
        " --rm-type zero"
    ),
    "slime_plugins": "the layers of every family are slimrl's own: leave --spec out",
}


# modules of slime's examples that slimrl has, unless the current folder has the example itself
_MOVED = {
    "examples.on_policy_distillation.on_policy_distillation.": "slimrl.rollout.on_policy_distillation.",
}


class HookError(ValueError):
    """A hook path that cannot be resolved, or whose object does not fit the contract."""


class HookFailedError(RuntimeError):
    """A hook raised an exception, which is the `__cause__`; the message names the flag and the function."""


class HookExitError(RuntimeError):
    """A task of a hook raised an exception that would end the event loop, as sys.exit() does; it is the `__cause__`."""


def resolve(path: str, contract: type[Hook]) -> Callable[..., Any]:
    """The function at the dotted import path `path`, checked against `contract` (a Protocol of this package).

    Paths that start with `slime.` are looked up under `slimrl.`, which has the same hooks. Modules in the current
    folder can be imported. Raises HookError with the fault and the expected signature.
    """
    path, function = _load(path)
    if not callable(function):
        kind = type(function).__name__
        raise HookError(f"{path} is not a function but a value of type {kind}: {expectation(contract)}")
    _check_call(path, function, contract)
    return function


def resolve_data_source(path: str) -> type[CustomDataSource]:
    """The class at the dotted import path `path`, checked against `CustomDataSource`. Raises HookError."""
    path, found = _load(path)
    expected = "expected a class with __init__(args), get_samples(num_groups), add_samples(groups) and __len__()"
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
            f"{path} cannot save its position in a checkpoint: give it state_dict() and load_state_dict(state), or"
            " save(rollout_id) and load(rollout_id)"
        )
    return found


def own_path(path: str) -> str:
    """slimrl's path for a path of slime; other paths unchanged."""
    for prefix, own in _MOVED.items():
        if path.startswith(prefix) and not Path(*prefix.split(".")[:2]).exists():
            return own + path.removeprefix(prefix)
    return "slimrl." + path.removeprefix("slime.") if path.startswith("slime.") else path


def expectation(contract: type[Hook]) -> str:
    """The contract's signature, for messages and docs: "expected async f(args, sample)"."""
    is_async, call = _call(contract)
    names = [f"{name}=..." if parameter.kind is parameter.KEYWORD_ONLY else name for name, parameter in call.items()]
    kind = "async or ordinary " if contract.either else "async " if is_async else ""
    return f"expected {kind}f({', '.join(names)})"


def accepts_keyword(function: Callable[..., Any], keyword: str) -> bool:
    """Whether `function` accepts this keyword argument."""
    parameters = inspect.signature(function).parameters
    if keyword in parameters:
        return parameters[keyword].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def accepted(function: Callable[..., Any], contract: type[Hook], **values: Any) -> dict[str, Any]:
    """The entries of `values` that `function` accepts as keyword arguments; `values` has all that `contract` offers."""
    return {name: values[name] for name in contract.offered if accepts_keyword(function, name)}


def _load(path: str) -> tuple[str, Any]:
    """slimrl's path, and the object at it."""
    path = own_path(path)
    module_path, _, name = path.rpartition(".")
    if not module_path or not all(part.isidentifier() for part in path.split(".")):
        raise HookError(f"{path!r} is not a dotted import path: write package.module.function")
    return path, _attribute(_import_module(module_path, name), name)


def _call(contract: type[Hook]) -> tuple[bool, dict[str, inspect.Parameter]]:
    method = contract.__call__
    parameters = dict(inspect.signature(method).parameters)
    del parameters["self"]
    return inspect.iscoroutinefunction(method), parameters


def _import_module(module_path: str, name: str) -> types.ModuleType:
    """The module; `name` is the attribute that is wanted of it."""
    # `python train.py` puts the script's folder on sys.path, not the current folder
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    offer_slime_modules()
    try:
        return importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_path == error.name or module_path.startswith(error.name + ".")):
            usual = "check the spelling, or start from the folder that contains it"
            fix = next((_INSTEAD[part] for part in [*module_path.split("."), name] if part in _INSTEAD), usual)
            raise HookError(f"there is no module {error.name}: {fix}") from error
        raise HookError(f"module {module_path} itself cannot be imported ({error}): install what it needs") from error
    except KeyboardInterrupt:  # Ctrl-C during the import
        raise
    except BaseException as error:  # custom code may raise anything, and its sys.exit() must not end this process
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise HookError(f"module {module_path} itself cannot be imported ({text}): fix the module") from error


def _attribute(module: types.ModuleType, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        functions = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
    nearest = difflib.get_close_matches(name, functions, n=1)
    usual = f"did you mean {nearest[0]}?" if nearest else "check the spelling"
    raise HookError(f"module {module.__name__} has no {name}: {_INSTEAD.get(name, usual)}")


def _check_call(path: str, function: Callable[..., Any], contract: type[Hook]) -> None:
    is_async, call = _call(contract)
    positional = [name for name, parameter in call.items() if parameter.kind is not parameter.KEYWORD_ONLY]
    try:
        signature = inspect.signature(function)
    except ValueError as error:  # some functions written in C have none
        raise HookError(f"{path} has no inspectable signature: {expectation(contract)}") from error
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
    """Turns every exception in the block into a HookFailedError that names flag, `path` and the hook's lines.

    Exceptions for which `passes` returns True stay unchanged. The block must not await: a cancellation within it would
    be attributed to the hook. Not a generator with contextlib's decorator, because that lets a StopIteration through.
    """

    def __init__(self, flag: str, path: str, *, passes: Callable[[BaseException], bool] = lambda error: False) -> None:
        self._name = f"{flag} {path}"
        self._passes = passes

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._passes(error):  # any BaseException; nothing is swallowed
            raise HookFailedError(f"{self._name} raised {described(error)}{user_frames(error)}") from error


def named(flag: str, path: str, contract: type[Hook]) -> Callable[..., Any]:
    """Loads the function at `path` with `resolve`; its errors are wrapped as by `naming`."""
    return naming_calls(flag, path, resolve(path, contract))


def naming_calls(flag: str, path: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its errors wrapped as by `naming`."""

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with naming(flag, path):
            return function(*arguments, **keywords)

    return call


def described(error: BaseException) -> str:
    """ "KeyError: 'x'"; only the type if there is no message; of an exception group, the first exception too."""
    if isinstance(error, HookExitError) and error.__cause__ is not None:
        return described(error.__cause__)
    message = str(error)
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{text}: {described(error.exceptions[0])}" if isinstance(error, BaseExceptionGroup) else text


def user_frames(error: BaseException) -> str:
    """The traceback from the first line outside slimrl, each as "\n  file:line in function: code".

    Empty if all lines are in slimrl.
    """
    package = str(Path(__file__).parents[1]) + os.sep
    frames = itertools.dropwhile(
        lambda frame: frame.filename.startswith(package) or frame.filename == contextlib.__file__,
        (frame for frame in _trace(error) if frame.filename != __file__),
    )
    return "".join(f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames)


def _trace(error: BaseException | None) -> Iterator[traceback.FrameSummary]:
    """The frames of the error, followed by those of the failed task that caused it."""
    if error is not None:
        yield from traceback.extract_tb(error.__traceback__)
    if isinstance(error, BaseExceptionGroup):
        yield from _trace(error.exceptions[0])
    elif isinstance(error, HookExitError):
        yield from _trace(error.__cause__)


@contextlib.contextmanager
def in_hook() -> Iterator[None]:
    """Marks the tasks created in this block, directly or by such tasks, as a hook's: see `contain_tasks`."""
    before = _in_hook.get()
    _in_hook.set(True)
    try:
        yield
    finally:
        _in_hook.set(before)  # no token: a coroutine may be closed in another context


def contain_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Prevents tasks that a hook creates from ending `loop`: awaiting such a task raises HookExitError instead."""

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **keywords: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_Contained(coroutine) if _in_hook.get() else coroutine, loop=loop, **keywords)

    loop.set_task_factory(make)


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine that raises HookExitError instead of an exception that would end the loop.

    Not a wrapping coroutine function: if that is cancelled before it starts, it never awaits the inner coroutine.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.__name__ = getattr(coroutine, "__name__", type(coroutine).__name__)  # for the repr of its task
        self.__qualname__ = getattr(coroutine, "__qualname__", self.__name__)

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """See `Coroutine.send`."""
        try:
            return self._coroutine.send(value)
        except _ENDS_A_LOOP as error:
            raise HookExitError(described(error)) from error

    def throw(self, *error: Any) -> Any:
        """See `Coroutine.throw`."""
        try:
            return self._coroutine.throw(*error)
        except _ENDS_A_LOOP as raised:
            raise HookExitError(described(raised)) from raised

    def close(self) -> None:
        """See `Coroutine.close`."""
        self._coroutine.close()


def offer_slime_modules() -> None:
    """Makes `import slime...` in custom modules find slimrl's counterparts if slime is not installed.

    Once per process. An installed slime takes precedence: the finder is last on `sys.meta_path`.
    """
    if not any(isinstance(finder, SlimeFinder) for finder in sys.meta_path):
        sys.meta_path.append(SlimeFinder())


class SlimeFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the modules of slime that `slimrl.compatibility.slime` lists."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None for other packages, and for modules of an installed slime, which has a file.

        Raises ImportError for a module of slime that the table lacks.
        """
        package, _, rest = name.partition(".")
        if package != SLIME or (rest and getattr(sys.modules.get(SLIME), "__file__", None) is not None):
            return None
        table = importlib.import_module(_SLIME_TABLE)
        if not table.is_module(name):
            raise ImportError(table.refusal(name), name=name)
        return importlib.machinery.ModuleSpec(name, self, is_package=table.is_package(name))

    def exec_module(self, module: types.ModuleType) -> None:
        """Sets up lookup of names on access, so that heavy modules are loaded only if used."""
        table = importlib.import_module(_SLIME_TABLE)
        module.__doc__ = f"Counterparts of {module.__name__} in slimrl: see docs/coming-from-slime.md."
        vars(module)["__all__"] = table.names(module.__name__)

        def look_up(name: str) -> Any:
            if name.startswith("__") or table.is_module(f"{module.__name__}.{name}"):
                raise AttributeError(f"module {module.__name__} has no attribute {name}")
            value = table.load(module.__name__, name)
            setattr(module, name, value)
            return value

        vars(module)["__getattr__"] = look_up


def plain_number(value: Any) -> float:
    """A number, or a numpy or torch scalar, as a float. Raises TypeError for anything else, including text."""
    if isinstance(value, str | bytes | None):
        raise TypeError(f"{value!r} is not a number")
    try:
        return float(value)
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ) as error:  # RuntimeError: tensor with several elements
        raise TypeError(f"{value!r} is not a number") from error
