"""Time of generalised advantages over ragged sequences, compared with two usual ways over a padded batch.

    python benchmarks/generalized_advantages.py [--samples 512] [--longest 5400] [--rounds 15] [--threads 2]

All get the same rewards, values and lengths (1.4 million tokens by default; a tenth of them masked). The loop pads to
[samples, longest] and takes one step per token position, as most implementations do, in float32 and without masks. The
chunks multiply 128 positions at a time by a triangular matrix, and take one step per chunk, as slime does.
Each round calls each of them four times in a row. Prints the medians and minima of the last three calls, their ratio,
and the median of the first, whose data and memory other programs' data have displaced from the caches; and the worst
difference of each from float64. The third row is what slimrl does on GPUs and for small batches, here on the CPU. Then
the first call of a new process, with nothing compiled before and with the machine code on disk. Target: 2.5 ms on two
idle cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from unittest import mock

import torch
from ratios import add_json_option, write_ratios
from torch import Tensor

from slimrl.algorithms import returns
from slimrl.algorithms.returns import generalized_advantages

GAMMA, LAMBD = 1.0, 0.95
TARGET_MS = 2.5  # of 1.4 million tokens, on two idle cores


def over_padded(rewards: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """The loop over time; results end to end. Every token is trained on."""
    longest = int(lengths.max())
    inside = torch.arange(longest) < lengths[:, None]
    padded = torch.zeros(2, *inside.shape, dtype=values.dtype)
    padded[0][inside], padded[1][inside] = rewards, values
    running, following, found = torch.zeros(len(lengths), dtype=values.dtype), torch.zeros(len(lengths)), []
    for step in reversed(range(longest)):
        delta = padded[0, :, step] + GAMMA * following - padded[1, :, step]
        running = delta + GAMMA * LAMBD * running
        following = padded[1, :, step]
        found.append(running)
    return torch.stack(found[::-1], dim=1)[inside]


CHUNK = 128


def over_chunks(rewards: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Sums within chunks by a matrix product, then a loop over the chunks; results end to end."""
    padded_length = -(-int(lengths.max()) // CHUNK) * CHUNK
    inside = torch.arange(padded_length) < lengths[:, None]
    padded = torch.zeros(2, *inside.shape, dtype=values.dtype)
    padded[0][inside], padded[1][inside] = rewards, values
    following = torch.nn.functional.pad(padded[1, :, 1:], (0, 1))
    delta = padded[0] + GAMMA * following - padded[1]
    places, decay = torch.arange(CHUNK), GAMMA * LAMBD
    apart = places[:, None] - places
    within = torch.where(apart >= 0, decay ** apart.clamp(min=0).to(values.dtype), 0)
    sums = delta.view(len(lengths), -1, CHUNK) @ within
    carried, weights = torch.zeros(len(lengths), dtype=values.dtype), decay ** (CHUNK - places).to(values.dtype)
    for chunk in reversed(range(sums.shape[1])):
        sums[:, chunk] += carried[:, None] * weights
        carried = sums[:, chunk, 0].clone()
    return sums.view_as(inside)[inside]


def ours(rewards: Tensor, values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """slimrl's advantages."""
    return generalized_advantages(rewards, values, mask, lengths, gamma=GAMMA, lambd=LAMBD)[0]


def in_torch(rewards: Tensor, values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """slimrl's advantages by matrix products, whatever the size."""
    with mock.patch.object(returns, "COMPILED_FROM", sys.maxsize):
        return ours(rewards, values, mask, lengths)


FIRST = """
import time, torch
from slimrl.algorithms.returns import COMPILED_FROM, generalized_advantages
column = torch.ones(COMPILED_FROM)
started = time.perf_counter()
generalized_advantages(column, column, column, torch.tensor([COMPILED_FROM]), gamma=1.0, lambd=1.0)
print(time.perf_counter() - started)
"""


def first_calls() -> tuple[float, float]:
    """Seconds of the first call of a process that compiles, and of one that finds the machine code."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        command = [sys.executable, "-c", FIRST]
        found = [
            float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
            for _ in range(2)
        ]
    return found[0], found[1]


def seconds(call: Callable[[], Tensor]) -> float:
    """Of one call, without freeing its result."""
    started = time.perf_counter()
    result = call()
    taken = time.perf_counter() - started
    del result
    return taken


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--longest", type=int, default=5400)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    add_json_option(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, args.longest, (args.samples,), generator=generator)
    tokens = int(lengths.sum())
    rewards, values = torch.zeros(tokens), torch.randn(tokens, generator=generator)
    rewards[lengths.cumsum(0) - 1] = 1.0
    everything, most = torch.ones(tokens), (torch.rand(tokens, generator=generator) < 0.9).float()
    masked = rewards * most
    calls = {
        "slimrl": lambda: ours(rewards, values, everything, lengths),
        "slimrl, a tenth masked": lambda: ours(masked, values, most, lengths),
        "slimrl, in torch": lambda: in_torch(rewards, values, everything, lengths),
        "chunks of a padded batch": lambda: over_chunks(rewards, values, lengths),
        "loop over a padded batch": lambda: over_padded(rewards, values, lengths),
    }
    first: dict[str, list[float]] = {name: [] for name in calls}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds + 1):  # the first is a warm-up
        for name, call in calls.items():
            first[name].append(seconds(call))
            times[name] += [seconds(call) for _ in range(3)]
    medians = {name: statistics.median(found[3:]) for name, found in times.items()}
    truth = over_padded(rewards.double(), values.double(), lengths)
    print(f"{tokens:,} tokens in {args.samples} samples, {args.threads} threads")
    for name, median in medians.items():
        least, displaced = 1e3 * min(times[name]), 1e3 * statistics.median(first[name][1:])
        ratio = f"{median / medians['slimrl']:8.2f} x slimrl"
        print(f"{name:26} {1e3 * median:8.1f} ms {ratio}   least {least:6.1f}   first of a round {displaced:6.1f}")
    print(f"slimrl's median is {1e3 * medians['slimrl'] / TARGET_MS:.2f} of the target of {TARGET_MS:g} ms")
    print("first call of a process: {:.2f} s compiling, {:.2f} s with the machine code on disk".format(*first_calls()))
    for name in ("slimrl", "slimrl, in torch", "chunks of a padded batch", "loop over a padded batch"):
        print(f"{name:26} worst difference from float64 {float((calls[name]() - truth).abs().max()):.1e}")
    peers = {"loop": "loop over a padded batch", "chunks": "chunks of a padded batch"}
    write_ratios(args.json, {f"{name} / slimrl": medians[row] / medians["slimrl"] for name, row in peers.items()})


if __name__ == "__main__":
    main()
