"""Tokens per second of a real SGLang server on a CPU, with slimrl's batched attention and with SGLang's own.

    OMP_NUM_THREADS=1 python benchmarks/cpu_attention.py [--rounds 5] [--concurrency 8 128] [--size tiny]

Two servers of one random Qwen3 (`--size`, as tools/make_tiny_model.py) run at the same time; the one that is not asked
sleeps. In every round each gets the same requests, all at once: prompts of 128 random tokens that no cache has seen,
and 384 sampled tokens with log-probabilities, so contexts of 128 to 512 tokens. Prints the medians over the rounds and
their ratio, of tokens per second and of the CPU time that the server's processes take per token; the latter depends
less on what else the machine does. Targets: 4 times the tokens/s at 128 concurrent requests, 1.5 times at 8.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import orjson
import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slimrl.engines.sglang.server import ServerProcess, server_command
from slimrl.tiny.models import SIZES, build_model, build_tokenizer

WITH, WITHOUT = "batched attention", "SGLang's attention"
NAMES = (WITH, WITHOUT)
PROGRAM_WITHOUT = (
    "from slimrl.engines.sglang import cpu_patches; cpu_patches.patch_attention = lambda: None; cpu_patches.main()"
)
START_TIMEOUT_S = 180.0


@dataclasses.dataclass(frozen=True)
class Figures:
    """One round of one server."""

    tokens_per_s: float
    cpu_us_per_token: float


def command_without(*args: Any) -> list[str]:
    """The command line of a server that keeps SGLang's attention."""
    python, _, _, *flags = server_command(*args)
    return [python, "-c", PROGRAM_WITHOUT, *flags]


@contextlib.contextmanager
def servers(folder: Path, size: str, most_requests: int) -> Iterator[dict[str, ServerProcess]]:
    """Two servers of one model, ready, by their names in `NAMES`; ends them. Prints the seconds each takes to start."""
    tokenizer = build_tokenizer(max_length=2048)
    build_model(SIZES[size], tokenizer, seed=0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    options = {"max_running_requests": most_requests}
    with contextlib.ExitStack() as stack:
        started = {}
        for name in NAMES:
            server = ServerProcess(folder / "model", log_path=folder / f"{len(started)}.log", options=options)
            stack.callback(server.stop)
            begun = time.perf_counter()
            command = server_command if name == WITH else command_without
            with mock.patch("slimrl.engines.sglang.server.server_command", command):
                server.start()
            server.wait_ready(START_TIMEOUT_S)
            print(f"{name}: ready after {time.perf_counter() - begun:.1f} s", flush=True)
            started[name] = server
        yield started


def cpu_seconds(server: ServerProcess) -> float:
    """CPU time of the server's processes so far."""
    process = psutil.Process(server.pid)
    return sum(sum(one.cpu_times()[:2]) for one in [process, *process.children(recursive=True)])


async def generate(
    session: aiohttp.ClientSession, server: ServerProcess, prompts: list[list[int]], new_tokens: int
) -> Figures:
    """Sends all prompts at once, and waits for `new_tokens` sampled tokens of each."""

    async def one(prompt: list[int]) -> int:
        sampling = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
        body = orjson.dumps({"input_ids": prompt, "sampling_params": sampling, "return_logprob": True})
        async with session.post(f"{server.url}/generate", data=body) as response:
            response.raise_for_status()
            return len(orjson.loads(await response.read())["output_ids"])

    started, cpu = time.perf_counter(), cpu_seconds(server)
    counts = await asyncio.gather(*(one(prompt) for prompt in prompts))
    if counts != [new_tokens] * len(prompts):
        raise RuntimeError(f"{len(prompts)} requests of {new_tokens} tokens gave {counts}")
    seconds, cpu = time.perf_counter() - started, cpu_seconds(server) - cpu
    return Figures(sum(counts) / seconds, 1e6 * cpu / sum(counts))


async def measure(
    options: argparse.Namespace, running: dict[str, ServerProcess]
) -> dict[tuple[int, str], list[Figures]]:
    """The figures of every round by concurrency and server, without the round that warms both up."""
    draw = random.Random(0)
    figures: dict[tuple[int, str], list[Figures]] = {}
    timeout = aiohttp.ClientTimeout(total=None)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout, headers=headers
    ) as session:
        for server in running.values():
            await generate(session, server, [[7] * 20] * 8, 20)
        for number in range(options.rounds):
            for concurrency in options.concurrency:
                prompts = [draw.choices(range(3, 20), k=options.prompt_tokens) for _ in range(concurrency)]
                for name in sorted(running, reverse=number % 2 == 1):
                    one = await generate(session, running[name], prompts, options.new_tokens)
                    figures.setdefault((concurrency, name), []).append(one)
                    print(
                        f"round {number}, {concurrency} requests, {name}: {one.tokens_per_s:.0f} tokens/s,"
                        f" {one.cpu_us_per_token:.0f} us CPU per token, load {os.getloadavg()[0]:.1f}",
                        flush=True,
                    )
    return figures


def show(concurrency: int, unit: str, figures: dict[str, list[float]]) -> None:
    """Prints the median of each server and the ratio of the medians, with the extremes of single rounds."""
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, values in figures.items():
        spread = f"({min(values):.0f} to {max(values):.0f})"
        print(f"{concurrency:>4} requests  {name:<20}{medians[name]:>8.0f} {unit} {spread}")
    ratios = [new / old for new, old in zip(figures[WITH], figures[WITHOUT], strict=True)]
    print(
        f"{concurrency:>4} requests  {'ratio':<20}{medians[WITH] / medians[WITHOUT]:>8.2f}"
        f" ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def main() -> None:
    """Reads the flags, measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 128])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=384)
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        servers(Path(folder), options.size, max(options.concurrency)) as running,
    ):
        figures = asyncio.run(measure(options, running))
    print(
        f"model {options.size}, torch {torch.__version__}, {psutil.cpu_count()} cores, load of the machine in the last"
        f" 15 minutes {os.getloadavg()[2]:.1f}; medians of {options.rounds} rounds (least to most)"
    )
    for concurrency in options.concurrency:
        rounds = {name: figures[concurrency, name] for name in NAMES}
        show(concurrency, "tokens/s", {name: [one.tokens_per_s for one in ones] for name, ones in rounds.items()})
        show(
            concurrency,
            "us of CPU per token",
            {name: [one.cpu_us_per_token for one in ones] for name, ones in rounds.items()},
        )


if __name__ == "__main__":
    main()
