"""An event loop in a thread, for ordinary functions that call coroutines; and two small helpers of slime's."""

from __future__ import annotations

import asyncio
import functools
import importlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from slimrl.hooks import own_path

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, waited for; it runs in one event loop of the process, in a thread of its own."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="slimrl-background", daemon=True).start()
    return loop


def load_function(path: str | None) -> Any:
    """What stands at a dotted path; None for None. Raises ImportError or AttributeError where nothing does."""
    if path is None:
        return None
    module, _, name = own_path(path).rpartition(".")
    return getattr(importlib.import_module(module), name)


class SingletonMeta(type):
    """Classes of this metaclass have one instance per process, made by the first call."""

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        if "_only" not in cls.__dict__:
            cls._only = super().__call__(*arguments, **keywords)
        return cls._only
