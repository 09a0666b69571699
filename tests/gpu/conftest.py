"""What each check of this folder needs of a machine; where something is missing, it is skipped and the reason names it.

Every test declares it with `needs`, before any fixture runs. The suite may run anywhere: on a machine without GPUs
these tests are skipped with the reason.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

# packages that need another one
PARTS = {"transformer_engine": ("transformer_engine", "transformer_engine_torch")}


def needs(*packages: str, gpus: int = 1) -> pytest.MarkDecorator:
    """Marks a test, a parameter or a module (`pytestmark`); what marks at several places ask for adds up.

    `packages` are names as in `import`: transformer_engine, sglang, ray, ...
    """
    return pytest.mark.needs(*packages, gpus=gpus)


def missing(marks: Sequence[pytest.Mark], *, present: int, installed: Callable[[str], bool]) -> str | None:
    """What a check with these marks of `needs` lacks when there are `present` GPUs; None if it can run.

    Raises UsageError without any mark: every check must state its requirements.
    """
    if not marks:
        raise pytest.UsageError("a check for GPUs does not say what it needs: mark it with tests.gpu.conftest.needs")
    gpus = max(mark.kwargs["gpus"] for mark in marks)
    packages = sorted({part for mark in marks for name in mark.args for part in PARTS.get(name, (name,))})
    lacking = [] if gpus <= present else [f"{gpus} GPU{'s' * (gpus > 1)} (torch sees {present or 'none'})"]
    lacking += [f"the package {name}" for name in packages if not installed(name)]
    return f"this check needs {' and '.join(lacking)}" if lacking else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the checks of this folder that cannot run here; `items` are all collected tests."""
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    installed = functools.cache(lambda name: importlib.util.find_spec(name) is not None)
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            reason = missing(list(item.iter_markers("needs")), present=present, installed=installed)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
