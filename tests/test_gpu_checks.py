"""The GPU checks: each states its requirements, and is skipped with the reason when they are missing."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import missing, needs


def reason(*marks: pytest.MarkDecorator) -> str | None:
    """Why a check with these marks is skipped with two GPUs and only Ray installed."""
    return missing([mark.mark for mark in marks], present=2, installed={"ray"}.__contains__)


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([needs()], None),
        ([needs("ray", gpus=2)], None),
        ([needs(gpus=4)], "this check needs 4 GPUs (torch sees 2)"),
        (
            [needs("transformer_engine")],
            "this check needs the package transformer_engine and the package transformer_engine_torch",
        ),
        # of the module, the test and the parameter
        (
            [needs("ray"), needs("deep_ep"), needs("apex", gpus=3)],
            "this check needs 3 GPUs (torch sees 2) and the package apex and the package deep_ep",
        ),
    ],
)
def test_reason_names_everything_missing(marks, expected):
    assert reason(*marks) == expected


def test_required_number_is_named_without_gpus():
    assert missing([needs().mark], present=0, installed=bool) == "this check needs 1 GPU (torch sees none)"


def test_check_without_requirements_is_rejected():
    with pytest.raises(pytest.UsageError, match="does not say what it needs"):
        reason()
