"""Checkpoints of the toy models, and ranks, shared by the slow tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.families.toys import TOYS
from tests.megatron.launch import RankPool


class Pools:
    """Rank pools by size, started on first use."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._pools: dict[int, RankPool] = {}

    def __getitem__(self, ranks: int) -> RankPool:
        if ranks not in self._pools:
            self._pools[ranks] = self._open.enter_context(RankPool(ranks))
        return self._pools[ranks]

    def close(self) -> None:
        """Ends every process."""
        self._open.close()


@pytest.fixture(scope="package")
def pools() -> Iterator[Pools]:
    """Ranks for the tests of this folder."""
    opened = Pools()
    yield opened
    opened.close()


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each toy, in several files."""
    root = tmp_path_factory.mktemp("toys")
    return {name: toy.save(root / name, tokenizer=False) for name, toy in TOYS.items()}
