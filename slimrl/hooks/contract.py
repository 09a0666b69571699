"""What every contract of a hook has besides its call, and what is raised where one is not kept."""

from __future__ import annotations

from typing import ClassVar, Protocol


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
