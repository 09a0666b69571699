"""What every check of this folder needs: GPUs, counted. Without one each check is skipped before any fixture runs.

The whole suite may run anywhere: a machine without GPUs leaves these out by itself and prints why.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

NO_GPU = "torch.cuda.is_available() is false: this check needs a GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the checks of this folder; `items` are those of the whole run."""
    if not torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.fixture(scope="session")
def gpus() -> int:
    """How many GPUs this machine has, at least one."""
    return torch.cuda.device_count()


@pytest.fixture
def need_gpus(gpus: int) -> Callable[[int], None]:
    """`need_gpus(4)` skips the test where the machine has fewer than four."""

    def need(count: int) -> None:
        if gpus < count:
            pytest.skip(f"this check needs {count} GPUs and the machine has {gpus}")

    return need
