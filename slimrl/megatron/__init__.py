"""Training with megatron-core, whose import leaves out what no process of slimrl uses.

Every training rank and every converter imports megatron-core. `install` adds a finder that handles its first import,
wherever it comes from:
- wandb is hidden until the import ends. Only megatron-core's own inference logs to it; the run's log, which has the
  metrics, is written by the driver.
- Without CUDA `megatron.core.jit` is replaced by one whose decorators return the function unchanged. The real one
  decorates with torch.compile, which imports torch's compiler; `cpu_patches` would use the plain functions anyway.

Imports torch only when megatron-core is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import TypeVar

PACKAGE, COMPILER = "megatron.core", "megatron.core.jit"
HIDDEN = "wandb"

Function = TypeVar("Function", bound=Callable[..., object])


class LeanImport(importlib.abc.MetaPathFinder):
    """Wraps the loader of megatron-core; every other module is left to the other finders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of megatron-core with a loader that prepares its import; None for every other module."""
        if name != PACKAGE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _LeanLoader(spec.loader.name, spec.loader.path)
        return spec


class _LeanLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        import torch

        if not torch.cuda.is_available():
            sys.modules.setdefault(COMPILER, uncompiled())
        hidden = HIDDEN not in sys.modules
        if hidden:
            sys.modules[HIDDEN] = None  # type: ignore[assignment]  # `import wandb` raises ImportError
        try:
            super().exec_module(module)
        finally:
            if hidden:
                del sys.modules[HIDDEN]


def uncompiled() -> types.ModuleType:
    """A module with the names of `megatron.core.jit`, whose decorators return the function unchanged."""

    def noop_decorator(function: Function) -> Function:
        return function

    def nothing() -> None:
        return None

    module = types.ModuleType(COMPILER)
    module.__dict__.update(
        jit_fuser=noop_decorator, noop_decorator=noop_decorator, enable_jit_fuser=nothing, disable_jit_fuser=nothing
    )
    return module


def install() -> None:
    """Adds the finder, once per process; without effect on a megatron-core that is imported already."""
    if not any(isinstance(finder, LeanImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, LeanImport())


install()
