"""The doors for user code: the written contract of every `--...-path` flag, and how a path becomes a function.

Promises that a path is resolved and its signature checked without calling it. Called while the command line is
checked, so that a bad hook costs a sentence, and again where the hook is used.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from slimrl.arguments import Arguments
    from slimrl.data.sample import Sample


class HookError(ValueError):
    """A hook path that leads nowhere, or to something that does not keep its contract."""


class HookFailedError(RuntimeError):
    """A hook raised an exception, which is the cause; the message names the flag and the function."""


class DataSource(Protocol):
    """Where a rollout function takes its prompts from; slimrl's own is `slimrl.rollout.data_source`."""

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """The next `num_groups` groups, each of `--n-samples-per-prompt` samples of one prompt."""
        ...

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Gives groups back, to be handed out again."""
        ...


class OwnDataSource(DataSource, Protocol):
    """`--data-source-path`: a class of data sources. `__init__` is given `tokenizer` too where it takes it.

    Its place is kept with checkpoints, by one of two pairs: `state_dict()` and `load_state_dict(state)`, of plain
    data, or `save(rollout_id)` and `load(rollout_id)`, which keep their own files under `--save`. Both are called
    right after the prompts of a rollout were drawn, and when a run goes on after that rollout. Where the class has
    `begin_rollout(rollout_id)`, it is called before a rollout draws.
    """

    def __init__(self, args: Arguments) -> None: ...

    def __len__(self) -> int:
        """Number of prompts in one epoch, by which `--num-epoch` counts."""
        ...


class Hook(Protocol):
    """What every contract says besides its call.

    `offered` are keyword arguments that a function is given where it takes them; with `either`, it may be async or not.
    """

    offered: ClassVar[tuple[str, ...]] = ()
    either: ClassVar[bool] = False


class CustomReward(Hook, Protocol):
    """`--custom-rm-path`: judges one response."""

    async def __call__(self, args: Arguments, sample: Sample) -> float | dict[str, Any]:
        """The reward; where it is a dict, `--reward-key` names the entry to train on."""
        ...


class GroupReward(Hook, Protocol):
    """`--custom-rm-path` with `--group-rm`: judges all responses to one prompt; in an evaluation one at a time."""

    async def __call__(self, args: Arguments, samples: list[Sample]) -> list[float] | list[dict[str, Any]]:
        """One reward per sample, in the samples' order."""
        ...


class CustomGenerate(Hook, Protocol):
    """`--custom-generate-function-path`: generates one sample.

    `evaluation` tells whether the sample is for evaluation, `engine` is the client of the inference fleet
    (`slimrl.rollout.engine.EngineClient`) and `tokenizer` the run's tokenizer. When the engine answers with the finish
    reason "abort", the rollout is full: return the sample with status ABORTED; where `--partial-rollout` is on, the
    function is called with it again, to continue it.
    """

    offered = ("evaluation", "engine", "tokenizer")

    async def __call__(self, args: Arguments, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
        """The sample with its tokens, response, log-probabilities and status filled in."""
        ...


class SampleHook(Hook, Protocol):
    """`--rollout-sample-hook-path`: sees each finished sample once, before its reward."""

    offered = ("rollout_id", "evaluation")
    either = True

    def __call__(self, args: Arguments, sample: Sample) -> Any:
        """The sample to go on with, or None for the one it was given."""
        ...


class RolloutFunction(Hook, Protocol):
    """`--rollout-function-path`, `--eval-function-path`: makes a whole rollout, or a whole evaluation.

    `generator` is the built-in rollout to build on (see `slimrl.rollout.sglang_rollout`).
    """

    offered = ("generator", "tokenizer")

    def __call__(self, args: Arguments, rollout_id: int, data_source: DataSource, *, evaluation: bool) -> Any:
        """The groups of a rollout with its metrics, or with `evaluation` the results by data set."""
        ...


class DynamicSamplingFilter(Hook, Protocol):
    """`--dynamic-sampling-filter-path`: keeps or drops one finished group."""

    def __call__(self, args: Arguments, samples: list[Sample]) -> Any:
        """True (or an object with `keep` True and a `reason`) to keep the group."""
        ...


class BufferFilter(Hook, Protocol):
    """`--buffer-filter-path`: chooses which of the groups that wait go into the next wave."""

    def __call__(
        self, args: Arguments, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
    ) -> list[list[Sample]]:
        """At most `num_samples` groups, which it removes from `buffer`."""
        ...


class SampleFilter(Hook, Protocol):
    """`--rollout-sample-filter-path`: takes single samples out of training by setting their `remove_sample`."""

    def __call__(self, args: Arguments, groups: list[list[Sample]]) -> None:
        """Called once per rollout with the groups that are trained on."""
        ...


class AllSamplesProcess(Hook, Protocol):
    """`--rollout-all-samples-process-path`: sees every group that a rollout judged, dropped ones too."""

    def __call__(self, args: Arguments, all_groups: list[list[Sample]], data_source: DataSource) -> None:
        """Called once per rollout."""
        ...


class RolloutLog(Hook, Protocol):
    """`--custom-rollout-log-function-path`: reports a rollout."""

    def __call__(
        self,
        rollout_id: int,
        args: Arguments,
        samples: list[Sample],
        extra_metrics: dict[str, float] | None,
        rollout_time: float,
    ) -> Any:
        """True where slimrl is not to report its own metrics of the rollout (the mean reward always is)."""
        ...


class EvalRolloutLog(Hook, Protocol):
    """`--custom-eval-rollout-log-function-path`: reports an evaluation."""

    def __call__(
        self,
        rollout_id: int,
        args: Arguments,
        data: dict[str, dict[str, Any]],
        extra_metrics: dict[str, float] | None,
    ) -> Any:
        """True where slimrl is not to report more than each set's mean reward.

        `data` has `rewards`, `truncated` and `samples` by name of the set.
        """
        ...


class RewardPostProcess(Hook, Protocol):
    """`--custom-reward-post-process-path`: turns the rewards of a rollout into what is trained on."""

    def __call__(self, args: Arguments, samples: list[Sample]) -> tuple[list[float], list[float]]:
        """Raw rewards and training rewards, one of each per sample, in the samples' order."""
        ...


class ConvertSamples(Hook, Protocol):
    """`--custom-convert-samples-to-train-data-path`: makes the training data of a rollout."""

    def __call__(self, args: Arguments, samples: list[Sample]) -> dict[str, Any]:
        """Columns by name, one entry per sample (see `slimrl.rollout.train_data`)."""
        ...


def resolve(path: str, contract: type[Hook]) -> Callable[..., Any]:
    """The function at the dotted import path `path`, checked against `contract` (a Protocol of this file).

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


@contextlib.contextmanager
def naming(flag: str, path: str) -> Iterator[None]:
    """Whatever the hook at `path` raises in this block becomes a HookFailedError that names it."""
    try:
        yield
    except Exception as error:  # user code may raise anything; nothing is swallowed
        raise HookFailedError(f"{flag} {path} raised {type(error).__name__}: {error}") from error


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
    try:
        return importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_path == error.name or module_path.startswith(error.name + ".")):
            raise HookError(
                f"there is no module {error.name}: check the spelling, or start from the folder that holds it"
            ) from error
        raise HookError(f"module {module_path} itself cannot be imported ({error}): install what it needs") from error
    except Exception as error:  # user code: importing it may raise anything
        raise HookError(
            f"module {module_path} itself cannot be imported ({type(error).__name__}: {error}): mend the module"
        ) from error


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
