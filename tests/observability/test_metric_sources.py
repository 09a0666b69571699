"""Every row of the metric table has a source: a string in the code that produces its names."""

import ast
import functools
import re
from pathlib import Path

import pytest

from slimrl.observability.metrics.registry import METRICS
from tests.observability.test_metrics import spelled_out

ROOT = Path(__file__).resolve().parents[2]
TABLES = [
    f"slimrl/observability/{name}.py"
    for name in ("metrics/registry", "metrics/training_rows", "metrics/__init__", "report")
]
PREFIXES = re.compile(r"^(train|rollout|eval|perf|memory|multi_turn|passrate)/")
TELLING = 5  # characters that identify the name in an f-string; times are identified by their phase


@functools.cache
def texts() -> tuple[set[str], list[re.Pattern[str]]]:
    """Every string in slimrl's source, and a pattern for every specific f-string."""
    plain, patterns = set(), []
    for path in (ROOT / "slimrl").rglob("*.py"):
        if str(path.relative_to(ROOT)) in TABLES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                plain.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
                said = PREFIXES.sub("", "".join(part or "" for part in parts))
                if len(said) >= TELLING and said != "_time":
                    patterns.append(re.compile("".join(".*" if part is None else re.escape(part) for part in parts)))
    return plain, patterns


def is_made(name: str) -> bool:
    """Whether a string or an f-string produces the name, with or without the part before its first slash."""
    plain, patterns = texts()
    bare = PREFIXES.sub("", name)
    # phase times, process memory and the critic's metrics are composed of separate words
    inner = re.sub(r"^(rank1_|critic-)?(memory_|planned_memory_)?", "", bare)
    words = {name, bare, bare.removesuffix("_time"), inner}
    return bool(words & plain) or any(pattern.fullmatch(word) for word in (name, bare, inner) for pattern in patterns)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_source_produces_every_metric_of_the_row(metric):
    missing = [name for name in spelled_out(metric) if not is_made(name)]
    assert metric.name == "eval/<name>" or not missing


def test_metric_without_a_source_is_detected():
    assert not is_made("rollout/a_name_of_nothing")
    assert not is_made("perf/a_name_of_nothing_time")
