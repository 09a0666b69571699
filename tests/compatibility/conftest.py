"""Makes modules in slime's style importable, and provides the tokenizer and arguments of the rollout tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimrl.compatibility import rollout_helpers
from tests.rollout.conftest import make_args, sums, tokenizer, write_rows

__all__ = ["make_args", "sums", "tokenizer", "write_rows"]
STYLE = Path(__file__).with_name("slime_style")
MODULES = ("answer_format", "search_agent", "tool_agent", "mismatch", "own_functions")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(STYLE)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in (*MODULES, "slime")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def own_grader() -> Iterator[None]:
    """The grader pool of slime's functions lives as long as its process; here, as long as the test."""
    yield
    if rollout_helpers._graders.cache_info().currsize:
        rollout_helpers._graders().close()
        rollout_helpers._graders.cache_clear()
