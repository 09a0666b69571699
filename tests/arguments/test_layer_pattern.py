"""Layer patterns: which layers have experts, as users write it."""

from __future__ import annotations

import pytest

from slimrl.arguments.flag import layer_pattern


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("1", 1),
        ("[0]*3+[1]*45", [0] * 3 + [1] * 45),
        ("([0]*1+[1]*2)*2", [0, 1, 1, 0, 1, 1]),
        ("[0, 1] * 2", [0, 1, 0, 1]),
        ("[1]", [1]),
    ],
)
def test_pattern_evaluates_as_python_would(text: str, pattern: int | list[int]):
    assert layer_pattern(text) == pattern


@pytest.mark.parametrize("text", ["0", "[]", "[2]*3", "__import__('os')", "[1]*99999999999", "[0]*3+", "1.5", "-1"])
def test_other_expressions_are_rejected_and_never_evaluated(text: str):
    with pytest.raises(ValueError, match="is |describes"):
        layer_pattern(text)
