"""Time of generalised advantages over ragged sequences, compared with the usual loop over a padded batch.

    python benchmarks/generalized_advantages.py [--samples 512] [--longest 5400] [--rounds 5]

Both get the same rewards, values and lengths (1.4 million tokens by default; a tenth of them masked). The loop pads to
[samples, longest] and takes one step per token position, as most implementations do, in float32 and without masks.
Prints medians of interleaved rounds on one thread, their ratio, and the worst difference of each from float64.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from ratios import add_json_option, write_ratios
from torch import Tensor

from slimrl.algorithms.returns import generalized_advantages

GAMMA, LAMBD = 1.0, 0.95


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


def ours(rewards: Tensor, values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """slimrl's advantages."""
    return generalized_advantages(rewards, values, mask, lengths, gamma=GAMMA, lambd=LAMBD)[0]


def seconds(call: Callable[[], Tensor]) -> float:
    """Of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--longest", type=int, default=5400)
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, args.longest, (args.samples,), generator=generator)
    tokens = int(lengths.sum())
    rewards, values = torch.zeros(tokens), torch.randn(tokens, generator=generator)
    rewards[lengths.cumsum(0) - 1] = 1.0
    everything, most = torch.ones(tokens), (torch.rand(tokens, generator=generator) < 0.9).float()
    calls = {
        "slimrl": lambda: ours(rewards, values, everything, lengths),
        "slimrl, a tenth masked": lambda: ours(rewards * most, values, most, lengths),
        "loop over a padded batch": lambda: over_padded(rewards, values, lengths),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds + 1):  # the first is a warm-up
        for name, call in calls.items():
            times[name].append(seconds(call))
    medians = {name: statistics.median(found[1:]) for name, found in times.items()}
    truth = over_padded(rewards.double(), values.double(), lengths)
    print(f"{tokens:,} tokens in {args.samples} samples")
    for name, median in medians.items():
        print(f"{name:26} {1e3 * median:8.1f} ms   {median / medians['slimrl']:6.2f} x slimrl")
    for name in ("slimrl", "loop over a padded batch"):
        print(f"{name:26} worst difference from float64 {float((calls[name]() - truth).abs().max()):.1e}")
    write_ratios(args.json, {"loop / slimrl": medians["loop over a padded batch"] / medians["slimrl"]})


if __name__ == "__main__":
    main()
