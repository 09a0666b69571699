"""The rollout package imports no engine, trainer or cluster package."""

import subprocess
import sys
from pathlib import Path

import pytest

import slimrl

HEAVY = {"ray", "sglang", "transformers", "megatron"}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("slimrl.rollout.rollout_generator", HEAVY | {"torch", "sympy"}),
        ("slimrl.rollout.filter_hub.dynamic_sampling_filters", HEAVY | {"torch", "sympy", "pyarrow"}),
        ("slimrl.rollout.convert_samples", HEAVY),
    ],
)
def test_importing_a_module_imports_no_heavy_package(module, forbidden):
    program = f"import sys, {module}; print(*(set(sys.modules) & {forbidden!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(slimrl.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
