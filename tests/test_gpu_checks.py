"""The checks for GPUs: each says what it needs, and is left out with the reason where that is missing."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import missing, needs


def reason(*marks: pytest.MarkDecorator) -> str | None:
    """Why a check with these marks is skipped beside two GPUs and with Ray alone."""
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
def test_the_reason_names_all_that_is_missing(marks, expected):
    assert reason(*marks) == expected


def test_without_gpus_the_number_that_is_needed_is_named():
    assert missing([needs().mark], present=0, installed=bool) == "this check needs 1 GPU (torch sees none)"


def test_a_check_that_does_not_say_what_it_needs_is_refused():
    with pytest.raises(pytest.UsageError, match="does not say what it needs"):
        reason()
