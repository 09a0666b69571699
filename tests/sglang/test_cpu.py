"""The parts of the CPU platform that can be seen without a server."""

from __future__ import annotations

import subprocess
import sys

import torch

from slimrl.engines.sglang.cpu_patches import AbsentPackageFinder, install, murmur_hash32


def murmur3(words: list[int]) -> int:
    """MurmurHash3 x86 32 bit of little-endian words with seed 0, after its public description."""
    state = 0
    for word in words:
        word = word * 0xCC9E2D51 % 2**32
        word = (word * 2**15 + word // 2**17) % 2**32
        state ^= word * 0x1B873593 % 2**32
        state = (state * 2**13 + state // 2**19) % 2**32
        state = (state * 5 + 0xE6546B64) % 2**32
    state ^= 4 * len(words)
    state = (state ^ state // 2**16) * 0x85EBCA6B % 2**32
    state = (state ^ state // 2**13) * 0xC2B2AE35 % 2**32
    return state ^ state // 2**16


def test_the_reference_hash_gives_the_published_value():
    assert murmur3([0]) == 0x2362F9DE  # of four zero bytes


def test_the_seeded_samplers_hash_is_murmur3_of_seed_position_and_column():
    seeds = [0, 1, 2**31, 2**32 + 5, 2**63 - 1]
    positions, columns = [0, 7, 1000, 40959, 3], [0, 1, 151935]
    hashes = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    expected = [
        [murmur3([seed % 2**32, seed >> 32, position, column]) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert hashes.tolist() == expected


def test_nothing_is_touched_where_cuda_is_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = list(sys.meta_path)
    assert install() is False
    assert sys.meta_path == before


def test_the_finder_answers_for_absent_packages_only():
    finder = AbsentPackageFinder()
    assert finder.find_spec("triton.language") is not None and finder.find_spec("torchvision") is not None
    assert finder.find_spec("tritonclient") is None and finder.find_spec("flashinfer") is None


def test_the_stand_in_decorates_names_and_refuses_to_compute():
    program = """
import sys
sys.modules["torch"] = None  # not needed by what follows
from slimrl.engines.sglang.cpu_patches import AbsentPackageFinder, _AbsentModule
kernels, jit = _AbsentModule("sgl_kernel"), _AbsentModule("triton").jit
assert jit(len) is len and jit(num_warps=4)(len) is len
assert _AbsentModule("torchvision").InterpolationMode.BICUBIC == "BICUBIC"
try:
    kernels.rmsnorm(1, 2)
except NotImplementedError as error:
    print(error)
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert output.stdout.startswith("sgl_kernel.rmsnorm is not available"), output.stderr
