"""Bytes and seconds of the changes of bf16 weights after an Adam step, by learning rate, beside those of all weights.

`python benchmarks/delta_updates.py [--elements 4000000]`: weights are normal with a standard deviation of 0.02, as
initialised; gradients share a direction. Every rate takes 20 steps, of which the medians of the last 15 are shown. The
limit is memcpy of the same bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from slimrl.weights.delta_files import changed_elements
from slimrl.weights.update.transport_delta import serialize

RATES = (1e-7, 1e-6, 3e-6, 1e-5, 3e-5)
STEPS, SHOWN = 20, 15
BETAS, EPSILON = (0.9, 0.98), 1e-8


def main() -> None:
    """Prints one line per learning rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=4_000_000)
    elements = parser.parse_args().elements
    torch.set_num_threads(1)
    print("| learning rate | elements changed | bytes sent, of all | time to find and pack them, of memcpy of all |")
    print("| --- | --- | --- | --- |")
    for rate in RATES:
        changed, sent, seconds = zip(*measure(rate, elements), strict=True)
        shown = [statistics.median(values[-SHOWN:]) for values in (changed, sent, seconds)]
        print(f"| {rate:g} | {shown[0]:.2%} | {shown[1]:.3f} | {shown[2]:.1f} |", flush=True)


def measure(rate: float, elements: int) -> list[tuple[float, float, float]]:
    """Per step: the part of the elements that changed, of the bytes that are sent, and the time in those of memcpy."""
    generator = torch.Generator().manual_seed(0)
    weights = 0.02 * torch.randn(elements, generator=generator)
    direction = 3e-4 * torch.randn(elements, generator=generator)
    mean, square = torch.zeros(elements), torch.zeros(elements)
    old, copy, results = weights.bfloat16(), torch.empty(elements, dtype=torch.bfloat16), []
    for step in range(1, STEPS + 1):
        gradient = direction + 1e-3 * torch.randn(elements, generator=generator)
        mean.lerp_(gradient, 1 - BETAS[0])
        square.lerp_(gradient * gradient, 1 - BETAS[1])
        scaled = (square / (1 - BETAS[1] ** step)).sqrt() + EPSILON
        weights -= rate * mean / (1 - BETAS[0] ** step) / scaled
        new = weights.bfloat16()
        begun = time.perf_counter()
        copy.copy_(new)
        copied = time.perf_counter()
        delta = changed_elements("weight", (elements,), old, new)
        payload = serialize([delta])
        ended = time.perf_counter()
        part = float((old.view(torch.int16) != new.view(torch.int16)).double().mean())
        results.append((part, len(payload) / new.nbytes, (ended - copied) / (copied - begun)))
        old = new
    return results


if __name__ == "__main__":
    main()
