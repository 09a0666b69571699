"""Time and memory of training on one long sequence, with the core attention of a machine without Transformer Engine.

    OMP_NUM_THREADS=1 python benchmarks/long_sequences.py [--tokens 1024 4096 16384 32768] [--rounds 3]

A process for each length builds the same small megatron-core model, runs forward, the cross-entropy of all tokens and
backward on one sequence of a pack, and reports the median seconds and the memory that the first run took. Attention
does work that grows with the square of the length, all else with the length; memory must grow with the length alone.
Prints both for every length, the memory per token as a ratio to that of the shortest (target: at most 1.1), and what
the scores of attention would take if one head of one layer held them as a matrix.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from packed_training import MODEL, VOCABULARY, packed
from ratios import add_json_option, write_ratios

from slimrl.arguments import Arguments
from slimrl.megatron import parallel
from slimrl.megatron.model import model_builder

WARM_UP_TOKENS = 64
MIB = 2**20


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(tokens: int, rounds: int, answers: Connection) -> None:
    """Sends the median seconds and the bytes of one run."""
    with tempfile.NamedTemporaryFile() as store:
        state = parallel.initialize(
            Arguments(**MODEL), rank=0, world_size=1, local_rank=0, init_method=f"file://{store.name}.init"
        )
        model = model_builder.build_model(Arguments(**MODEL), state)
        seconds, before, after = [], 0, 0
        for number, length in enumerate([WARM_UP_TOKENS, *[tokens] * rounds]):
            generator = torch.Generator().manual_seed(0)
            sample = torch.randint(VOCABULARY, (length,), generator=generator).to(state.device)
            ((ids, _, sequences),) = packed([sample], length, state.device)
            started = time.perf_counter()
            losses = model(ids, None, None, labels=ids, packed_seq_params=sequences)
            losses.sum().backward()
            model.zero_grad()
            float(losses.detach()[0, 0])  # the device is done
            seconds.append(time.perf_counter() - started)
            before, after = (peak_bytes(state.device), after) if number == 0 else (before, peak_bytes(state.device))
            del losses
        parallel.shutdown()
    answers.send((statistics.median(seconds[1:]), after - before))


def main() -> None:
    """Measures each length, and prints a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 32768], help="ascending lengths")
    parser.add_argument("--rounds", type=int, default=3)
    add_json_option(parser)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ratios: dict[str, float] = {}
    shortest = 0.0
    for tokens in options.tokens:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=measure, args=(tokens, options.rounds, theirs))
        process.start()
        theirs.close()
        seconds, taken = mine.recv()
        process.join()
        shortest = shortest or taken / tokens
        print(
            f"{tokens:6} tokens: {seconds:8.2f} s, {tokens / seconds:8.0f} tokens/s, {taken / MIB:8.0f} MiB,"
            f" {taken / tokens / 1024:6.1f} KiB per token, {taken / tokens / shortest:5.2f} x the shortest; a matrix"
            f" {tokens**2 * 4 / MIB:.0f} MiB",
            flush=True,
        )
        if tokens != options.tokens[0]:
            ratios[f"memory per token, {tokens} / {options.tokens[0]} tokens"] = taken / tokens / shortest
    write_ratios(options.json, ratios)


if __name__ == "__main__":
    main()
