"""The base of every hook's contract, the errors of hooks, and numbers that custom functions return as plain floats.

Scalars of numpy and torch cannot be written as JSON.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol


class RunArguments(Protocol):
    """The flags of the run as attributes, `args.num_rollout`; `slimrl.arguments.Arguments` is what hooks are given."""

    def __getattr__(self, name: str) -> Any: ...


class HookError(ValueError):
    """A hook path that leads nowhere, or to something that does not keep its contract."""


class HookFailedError(RuntimeError):
    """A hook raised an exception, which is the cause; the message names the flag and the function."""


class HookExitError(RuntimeError):
    """A task that a hook made raised what would have ended the event loop, as sys.exit() does; that is the cause."""


class Hook(Protocol):
    """What every contract says besides its call.

    `offered` are keyword arguments that a function is given where it takes them; with `either`, it may be async or not.
    """

    offered: ClassVar[tuple[str, ...]] = ()
    either: ClassVar[bool] = False


def plain_number(value: Any) -> float:
    """A number, or a scalar of numpy or torch, as a float. Raises TypeError for anything else, texts too."""
    if isinstance(value, str | bytes | None):
        raise TypeError(f"{value!r} is not a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last for a tensor of several
        raise TypeError(f"{value!r} is not a number") from error
