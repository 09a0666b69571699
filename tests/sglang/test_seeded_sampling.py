"""Which tokens a restricted request may get, and that the others of its batch are sampled as without it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from slimrl.engines.sglang.operators.seeded_sampling import by_token, kept

# what SGLang's processes on a GPU run first
STARTED = """
import runpy, sys
from slimrl.engines.sglang.cpu_patches import install
install()
from sglang.srt.layers import sampler
runpy.run_module("slimrl.engines.sglang.entry", run_name="__mp_main__")
print(sampler.top_k_top_p_min_p_sampling_from_probs_torch.__module__)
"""
PROBS = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
ALL = 1 << 30  # the top-k of a request that restricts nothing


@pytest.mark.parametrize(
    ("top_k", "top_p", "tokens"),
    [
        (ALL, 1.0, [0, 1, 2, 3]),
        (1, 1.0, [1]),
        (3, 1.0, [1, 2, 3]),
        (ALL, 0.39, [1]),
        (ALL, 0.5, [1, 3]),  # 0.4 alone is less
        (ALL, 0.75, [1, 2, 3]),
        (2, 0.75, [1, 3]),
    ],
)
def test_tokens_of_top_k_and_top_p_keep_their_probabilities(top_k, top_p, tokens):
    found = kept(PROBS, torch.tensor([top_k]), torch.tensor([top_p]))
    expected = [value if token in tokens else 0.0 for token, value in enumerate(PROBS[0].tolist())]
    assert found.tolist() == [expected]


def test_row_that_restricts_nothing_is_kept_bit_for_bit():
    probs = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert (probs.sort(-1, descending=True).values.cumsum(-1) > 1).any()  # sums are rounded
    limits = torch.tensor([ALL, 5] * 32), torch.tensor([1.0, 0.9] * 32)
    found = kept(probs, *limits)
    assert torch.equal(found[::2], probs[::2])
    assert ((found[1::2] > 0).sum(-1) <= 5).all()


def test_min_p_drops_tokens_below_its_part_of_the_largest_probability():
    limits = torch.tensor([ALL, ALL, 3]), torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.0, 0.6, 0.1])
    found = kept(PROBS.repeat(3, 1), *limits) > 0
    assert found.tolist() == [[True] * 4, [False, True, False, True], [False, True, True, True]]


def test_requests_without_seeds_are_sampled_by_sglang():
    seeds, positions = torch.tensor([7]), torch.tensor([3])
    asked = []

    def own(*given, **named):
        asked.append((given, named))
        return "own"

    def sample(probs, seed, position):
        assert (seed, position) == (seeds, positions)
        return probs.argmax(-1)

    function = by_token(own, sample)
    limits = torch.tensor([1]), torch.tensor([1.0]), torch.tensor([0.0])
    assert function(PROBS, *limits, False, seeds, positions).tolist() == [1]
    assert asked == []
    for seed, filtered in ((None, False), (seeds, True)):
        assert function(PROBS, *limits, False, seed, positions, return_filtered_probs=filtered) == "own"
        assert asked.pop() == ((PROBS, *limits, False, seed, positions), {"return_filtered_probs": filtered})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "module"),
    [
        (["--enable-deterministic-inference"], "slimrl.engines.sglang.operators.seeded_sampling"),
        ([], "sglang.srt.layers.sampler"),
    ],
)
def test_processes_of_a_server_on_a_gpu_sample_by_token_if_requests_have_seeds(flags, module):
    done = subprocess.run([sys.executable, "-c", STARTED, *flags], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1:] == [module], done.stderr
