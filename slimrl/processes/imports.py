"""Imports of large packages without garbage collection.

An import creates objects that stay: the collector would scan all of them again and again and free next to nothing,
which is a fifth of the time that a server needs for its 5000 modules.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """The garbage collector is off in this block, and afterwards as it was before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
