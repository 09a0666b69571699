"""How a path becomes a function that keeps its contract.

Promises that a path is resolved and its signature checked without calling it. Called while the command line is
checked, so that a bad hook costs a sentence, and again where the hook is used.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slimrl.hooks import slime_names
from slimrl.hooks.contract import Hook, HookError
from slimrl.hooks.of_rollouts import OwnDataSource

# modules that scripts written for slime name, and what to do where there is no such module
_INSTEAD = {
    "fully_async_rollout": (
        "generation without end is train_async.py --max-weight-staleness N here: leave --rollout-function-path out"
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


def resolve_data_source(path: str) -> type[OwnDataSource]:
    """The class at the dotted import path `path`, checked against `OwnDataSource`. Raises HookError as `resolve`."""
    path, found = _found(path)
    expected = "expected is a class with __init__(args), get_samples(num_groups), add_samples(groups) and __len__()"
    if not isinstance(found, type):
        raise HookError(f"{path} is not a class but a value of type {type(found).__name__}: {expected}")
    for name in ("__init__", "get_samples", "add_samples", "__len__"):
        method = getattr(found, name, None)
        if not callable(method):
            raise HookError(f"{path} has no {name}: {expected}")
        wanted = list(inspect.signature(getattr(OwnDataSource, name)).parameters)
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
    # `python train.py` puts the script's folder on the path, not the folder the user stands in
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    slime_names.offer()
    try:
        return importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_path == error.name or module_path.startswith(error.name + ".")):
            usual = "check the spelling, or start from the folder that holds it"
            mend = next((_INSTEAD[part] for part in module_path.split(".") if part in _INSTEAD), usual)
            raise HookError(f"there is no module {error.name}: {mend}") from error
        raise HookError(f"module {module_path} itself cannot be imported ({error}): install what it needs") from error
    except KeyboardInterrupt:  # of the terminal, while it is imported
        raise
    except BaseException as error:  # user code: importing it may raise anything, and sys.exit() must not end us
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise HookError(f"module {module_path} itself cannot be imported ({text}): mend the module") from error


def _attribute(module: types.ModuleType, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        functions = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
    nearest = difflib.get_close_matches(name, functions, n=1)
    mend = f"did you mean {nearest[0]}?" if nearest else "check the spelling"
    raise HookError(f"module {module.__name__} has no {name}: {mend}")


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
