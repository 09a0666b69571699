"""Comparisons with independent references whose differences are recorded: docs/algorithms.md, "Measured accuracy".

`python benchmarks/accuracy.py` runs the tests and prints the worst of each row.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Literal

import pytest
from torch import Tensor

FILE = "SLIMRL_TEST_ACCURACY"  # environment: where `benchmarks/accuracy.py` wants the differences, a JSON line each
SMALL = 1e-3  # smaller true values have no relative difference: they are sums of terms that cancel

# loss: any metric of a step; weights: or values computed with them; output: of a server, absolute
Quantity = Literal["loss", "weights", "gradients", "output"]


def near(
    quantity: Quantity,
    actual: Sequence[float] | Mapping[str, float],
    expected: Sequence[float] | Mapping[str, float],
    *,
    rel: float,
    abs: float = 0.0,
) -> None:
    """Asserts that all are equal within `rel` or `abs`; records their largest relative difference."""
    assert actual == pytest.approx(expected, rel=rel, abs=abs)
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        pairs = [(actual[name], expected[name]) for name in expected]
    else:
        pairs = list(zip(actual, expected, strict=True))
    record(quantity, max((_relative(*pair) for pair in pairs if math.fabs(pair[1]) > SMALL), default=0.0))


def near_values(actual: Tensor, expected: Tensor, *, rtol: float, atol: float) -> None:
    """Asserts that the values of samples are equal within the limits; records |actual - expected| / |expected|."""
    wrong = (actual.double() - expected).abs()
    assert bool((wrong <= atol + rtol * expected.abs()).all()), float(wrong.max())
    record("weights", float((actual.double() - expected).norm() / expected.norm()))


def near_outputs(actual: Sequence[float], expected: Sequence[float], *, abs: float) -> None:
    """Asserts that a server's numbers are equal within `abs`, and records the largest difference."""
    assert actual == pytest.approx(expected, abs=abs)
    record("output", max(math.fabs(one - other) for one, other in zip(actual, expected, strict=True)))


def below(quantity: Quantity, difference: float, limit: float) -> None:
    """Asserts that a relative difference is below the limit, and records it."""
    record(quantity, difference)
    assert difference < limit, quantity


def record(quantity: Quantity, difference: float) -> None:
    """Appends the difference to the file that the environment names."""
    if path := os.environ.get(FILE):
        row = {"test": os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0], "quantity": quantity, "value": difference}
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def _relative(actual: float, expected: float) -> float:
    return math.fabs(actual / expected - 1)
