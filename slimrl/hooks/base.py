"""Base class of hook contracts, hook errors, and conversion of returned numbers to plain floats.

numpy and torch scalars cannot be written as JSON.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol


class RunArguments(Protocol):
    """The flags of the run as attributes, `args.num_rollout`. Hooks receive a `slimrl.arguments.Arguments`."""

    def __getattr__(self, name: str) -> Any: ...


class HookError(ValueError):
    """A hook path that cannot be resolved, or whose object does not fit the contract."""


class HookFailedError(RuntimeError):
    """A hook raised an exception, which is the `__cause__`; the message names the flag and the function."""


class HookExitError(RuntimeError):
    """A task of a hook raised an exception that would end the event loop, as sys.exit() does; it is the `__cause__`."""


class Hook(Protocol):
    """Base of all contracts.

    `offered` are keyword arguments passed to functions that accept them. `either` allows async and ordinary functions.
    """

    offered: ClassVar[tuple[str, ...]] = ()
    either: ClassVar[bool] = False


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
