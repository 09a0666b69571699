"""Makes `import slime...` in a user's module find slimrl's counterparts, where no slime is installed.

Promises that an installed slime wins: the finder stands last on `sys.meta_path` and answers only where nobody else
knows a module `slime`. What it offers is the table of `slimrl.compatibility.slime`, which is read when a module asks
for it and not before.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

ROOT = "slime"
_TABLE = "slimrl.compatibility.slime"  # by name: it is on a higher floor, and is only read where it is needed


def offer() -> None:
    """Puts the finder on `sys.meta_path`, once per process."""
    if not any(isinstance(finder, SlimeFinder) for finder in sys.meta_path):
        sys.meta_path.append(SlimeFinder())


class SlimeFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the table and loads them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None for other packages, and for modules of a slime that is installed, which has a file.

        Raises ImportError for a module that is not offered.
        """
        package, _, rest = name.partition(".")
        if package != ROOT or (rest and getattr(sys.modules.get(ROOT), "__file__", None) is not None):
            return None
        table = importlib.import_module(_TABLE)
        if not table.is_module(name):
            raise ImportError(table.refusal(name), name=name)
        return importlib.machinery.ModuleSpec(name, self, is_package=table.is_package(name))

    def exec_module(self, module: types.ModuleType) -> None:
        """Names are looked up when they are asked for, so that what is heavy is only loaded where it is used."""
        table = importlib.import_module(_TABLE)
        module.__doc__ = f"Counterparts of {module.__name__} in slimrl: see docs/coming-from-slime.md."
        vars(module)["__all__"] = table.names(module.__name__)

        def look_up(name: str) -> Any:
            if name.startswith("__") or table.is_module(f"{module.__name__}.{name}"):
                raise AttributeError(f"module {module.__name__} has no attribute {name}")
            value = table.load(module.__name__, name)
            setattr(module, name, value)
            return value

        vars(module)["__getattr__"] = look_up
