"""Device memory of a process, as the metric reports it."""

from __future__ import annotations

import pytest
import torch

from slimrl import platform
from tests.gpu.conftest import needs

pytestmark = needs()


def test_device_memory_counts_this_process():
    torch.cuda.init()
    before = platform.device_memory()
    held = torch.ones(64 << 20, device="cuda")  # 256 MiB
    now = platform.device_memory()
    assert now["cuda_allocated_gib"] - before["cuda_allocated_gib"] == pytest.approx(0.25, abs=0.01)
    assert now["cuda_peak_gib"] >= now["cuda_allocated_gib"] and now["cuda_reserved_gib"] >= now["cuda_allocated_gib"]
    assert now["cuda_device_used_gib"] >= now["cuda_reserved_gib"]
    del held
