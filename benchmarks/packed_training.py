"""The benefit of packing: training tokens per second on a long-tailed batch, packed and padded to rectangles.

    OMP_NUM_THREADS=1 python benchmarks/packed_training.py [--samples 64] [--median 300] [--sigma 1.0] [--longest 2048]

The same small megatron-core model, on the GPU if there is one, runs forward and backward over the same samples in
interleaved rounds: packed up to `--longest` tokens, as this package does; in rectangles as wide as their longest
sample, of at most that many tokens including padding, with samples sorted by length (the best case of padding) and in
the original order; and all as wide as the longest sample of the batch. Prints real tokens per second, the fraction of
padding in the computed tokens, and the ratio to packed. All must give the same loss.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import torch
from checkpoints import model_flags
from megatron.core.models.gpt import GPTModel
from ratios import add_json_option, write_ratios
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.data import bin_packing
from slimrl.data.batch_schedule import DEFAULT_BREAK_EVEN_TOKENS
from slimrl.megatron import parallel
from slimrl.megatron.model import model_builder
from slimrl.megatron.model.micro_batch import PackedSequences, packed_sequences

VOCABULARY = 1024
MODEL = dict(
    **model_flags(hidden=128, layers=2, head_size=32, vocabulary=VOCABULARY, positions=32768),
    expert_tensor_parallel_size=1,
    use_distributed_optimizer=False,
)


def packed(samples: Sequence[Tensor], cap: int, device: torch.device) -> list[tuple[Tensor, Tensor, PackedSequences]]:
    """Tokens, which of them count, and boundaries of each micro-batch."""
    lengths = [sample.numel() for sample in samples]
    costs = [length + length**2 / DEFAULT_BREAK_EVEN_TOKENS for length in lengths]
    micro_batches = []
    for group in bin_packing.pack(lengths, costs, cap, 1)[0]:
        chosen = [samples[i] for i in group]
        sequences = packed_sequences(torch.tensor([sample.numel() for sample in chosen]), 1, device, rank=0)
        tokens = torch.cat(chosen).unsqueeze(0)
        micro_batches.append((tokens, torch.ones_like(tokens), sequences))
    return micro_batches


def rectangles(samples: Sequence[Tensor], cap: int, width: int = 0) -> list[tuple[Tensor, Tensor, None]]:
    """As many samples in a row as fit the cap when all are as long as the longest of them, and `width` at least."""
    groups: list[list[Tensor]] = []
    for sample in samples:
        longest = max([width, sample.numel(), *(other.numel() for other in groups[-1])]) if groups else 0
        if not groups or longest * (len(groups[-1]) + 1) > cap:
            groups.append([])
        groups[-1].append(sample)
    micro_batches = []
    for group in groups:
        tokens = torch.nn.utils.rnn.pad_sequence(group, batch_first=True)
        tokens = torch.nn.functional.pad(tokens, (0, max(0, width - tokens.shape[1])))
        ends = torch.tensor([[sample.numel()] for sample in group], device=tokens.device)
        micro_batches.append((tokens, torch.arange(tokens.shape[1], device=tokens.device) < ends, None))
    return micro_batches


def train(stage: GPTModel, micro_batches: Sequence[tuple[Tensor, Tensor, PackedSequences | None]]) -> float:
    """Forward and backward over everything; the summed loss, in which every token is its own label."""
    total = 0.0
    for tokens, counts, sequences in micro_batches:
        losses = stage(tokens, None, None, labels=tokens, packed_seq_params=sequences)
        loss = (losses * counts).sum()
        loss.backward()
        total += float(loss)
    stage.zero_grad()
    return total


def measure(options: argparse.Namespace, init_method: str) -> None:
    """Prints one line for each method; raises RuntimeError if two methods give different losses."""
    state = parallel.initialize(Arguments(**MODEL), rank=0, world_size=1, local_rank=0, init_method=init_method)
    stage = model_builder.build_model(Arguments(**MODEL), state)
    drawn = np.random.default_rng(options.seed).lognormal(np.log(options.median), options.sigma, options.samples)
    lengths = np.clip(drawn.round(), 16, options.longest).astype(int).tolist()
    generator = torch.Generator().manual_seed(options.seed)
    samples = [torch.randint(VOCABULARY, (length,), generator=generator).to(state.device) for length in lengths]
    ways = {
        "packed": packed(samples, options.longest, state.device),
        "padded, sorted by length": rectangles(sorted(samples, key=len), options.longest),
        "padded, as they came": rectangles(samples, options.longest),
        "padded to the longest": rectangles(samples, options.longest, max(lengths)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses = {}
    for _ in range(options.rounds + 1):
        for name, micro_batches in ways.items():
            started = time.perf_counter()
            losses[name] = train(stage, micro_batches)  # its result is read: the device is done
            seconds[name].append(time.perf_counter() - started)
    parallel.shutdown()
    if max(losses.values()) - min(losses.values()) > 1e-4 * losses["packed"]:
        raise RuntimeError(f"the losses differ: {losses}")
    own = statistics.median(seconds["packed"][1:])
    print(f"{len(lengths)} samples of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all, {state.device}")
    ratios = {}
    for name, micro_batches in ways.items():
        taken = statistics.median(seconds[name][1:])
        if name != "packed":
            ratios[f"speed of {name} / packed"] = own / taken
        computed = sum(tokens.numel() for tokens, _, _ in micro_batches)
        print(
            f"{name:26}{len(micro_batches):4} micro-batches {sum(lengths) / taken:9.0f} tokens/s"
            f"{(1 - sum(lengths) / computed) * 100:7.1f} % padding {own / taken:7.2f} x"
        )
    write_ratios(options.json, ratios)


def main() -> None:
    """Reads the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--median", type=float, default=300)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    add_json_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(options, f"file://{folder}/store")


if __name__ == "__main__":
    main()
