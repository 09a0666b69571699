"""The placement of the 8-GPU recipes at half its size: four trainer ranks, and two engines of two on their GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.tiny import save_qwen3
from tests.weights import placements
from tests.weights.test_real_servers import SERVER_OPTIONS

pytestmark = pytest.mark.slow


def test_two_engines_of_two_ranks_get_and_serve_the_weights_of_four_ranks(tmp_path: Path):
    folders = [save_qwen3(tmp_path / str(seed), seed=seed) for seed in range(2)]
    placements.check(placements.TWO_ENGINES_COLOCATED, folders, tmp_path, options=SERVER_OPTIONS)
