"""--true-on-policy-mode on GPUs: Triton's kernels, and the operators of training against those of a server's process.

`TRITON_INTERPRET=1` runs them on a machine without a GPU where Triton is installed, which the requirements for CPUs
leave out. The row true-on-policy of scripts/gpu_check.sh compares a whole server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import needs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.slow, needs("triton", gpus=0 if INTERPRETED else 1)]
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
ROOT = Path(__file__).parents[2]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    from slimrl.algorithms.batch_invariant import triton_kernels

    monkeypatch.setattr(triton_kernels, "DTYPE", DTYPE)
    return triton_kernels


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)
    return values if INTERPRETED else values.cuda()


@pytest.mark.parametrize(("depth", "columns"), [(7, 3), (64, 128), (100, 140)])
def test_row_of_a_product_is_the_same_in_every_batch(kernels, depth, columns):
    x, weight = normal(300, depth), normal(columns, depth, seed=1)
    whole = kernels.linear(x, weight, torch.float32)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)
    for rows in (1, 2, 37, 129):
        assert torch.equal(kernels.linear(x[:rows], weight, torch.float32), whole[:rows])
    # numpy, which the interpreter multiplies with, adds in an order that depends on a row's place in a block
    for rows in (128, 256) if INTERPRETED else (1, 5, 128):
        assert torch.equal(kernels.linear(x[rows:], weight, torch.float32), whole[rows:])


def test_norm_and_log_softmax_equal_float64_but_for_rounding(kernels):
    x, weight = normal(9, 2100), normal(2100, seed=1)
    norm = torch.nn.functional.rms_norm(x.double(), (2100,), weight.double(), 1e-6)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6).double(), norm, rtol=2**-8, atol=1e-6)
    logits = normal(7, 3000).float() * 4
    logits[2, 5] = -float("inf")
    found, expected = kernels.log_softmax(logits), logits.double().log_softmax(-1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(kernels.log_softmax(logits[4:5]), found[4:5])


def test_inputs_in_another_precision_are_refused(kernels):
    with pytest.raises(TypeError, match="on GPUs compute in bfloat16, not in torch.float32"):
        kernels.linear(normal(2, 8).float(), normal(3, 8).float())


@needs("triton", "sglang", "megatron", gpus=0 if INTERPRETED else 1)
def test_operators_of_training_and_of_a_server_give_the_same_bits():
    """Other rows, another shape, and one row at a time."""
    job = [sys.executable, "-m", "tests.gpu.true_on_policy_job"]
    done = subprocess.run(job, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(
        ("product", "norm", "rotation", "activation", "log-probs"), 0.0
    )
