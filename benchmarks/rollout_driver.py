"""What the rollout driver itself costs per sample: an engine that answers at once, so that all time is ours.

    OMP_NUM_THREADS=1 python benchmarks/rollout_driver.py [--prompts 512] [--samples 8] [--response-tokens 512]

Prints samples per second and microseconds per sample for whole rollouts (draw, request, reward, collect), beside
the floor of the same machine: the same number of asyncio tasks that only await an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from slimrl.arguments import Arguments
from slimrl.rollout.data_source import RolloutDataSource
from slimrl.rollout.engine import Generation
from slimrl.rollout.generate import RolloutGenerator
from slimrl.rollout.metrics import rollout_metrics
from slimrl.rollout.rewards import rewards_of


class ByteTokenizer:
    """One token per byte: tokenising is not what is measured."""

    def __call__(self, texts: list[str], add_special_tokens: bool = False) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode()) for text in texts]}


class InstantEngine:
    """Answers every request at the next turn of the event loop."""

    def __init__(self, response_tokens: int) -> None:
        self._token_ids = list(range(response_tokens))
        self._log_probs = [-0.5] * response_tokens
        self._text = "so " * (response_tokens - 4) + "\\boxed{42}"

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], session_id: str | None = None
    ) -> Generation:
        await asyncio.sleep(0)
        return Generation(list(self._token_ids), list(self._log_probs), "stop", "1", self._text)

    async def abort_all(self) -> None:
        """Nothing is in flight for long."""


def main() -> None:
    """Runs the rollouts and prints one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    count = options.prompts * options.samples
    with tempfile.TemporaryDirectory() as folder:
        args = _arguments(Path(folder), options)
        engine = InstantEngine(options.response_tokens)
        source = RolloutDataSource(args, ByteTokenizer())
        generator = RolloutGenerator(args, ByteTokenizer(), engine)
        outputs: list[Any] = []

        async def rollout() -> None:
            outputs.append(await generator.generate_rollout(len(outputs), source))

        async def floor() -> None:
            await asyncio.gather(*(engine.generate([], {}) for _ in range(count)))

        floor_s = _median_seconds(floor, options.repeats)
        rollout_s = _median_seconds(rollout, options.repeats)
        generator.close()
    samples = [sample for group in outputs[-1].groups for sample in group]
    started = time.perf_counter()
    rollout_metrics(samples, rewards_of(args, samples).raw)
    metrics_s = time.perf_counter() - started
    print(f"samples per rollout       {count:>10}")
    print(f"driver, samples per s     {count / rollout_s:>10.0f}")
    print(f"driver, us per sample     {1e6 * rollout_s / count:>10.1f}")
    print(f"floor, us per sample      {1e6 * floor_s / count:>10.1f}")
    print(f"driver / floor            {rollout_s / floor_s:>10.1f}")
    print(f"metrics, us per sample    {1e6 * metrics_s / count:>10.1f}")


def _arguments(folder: Path, options: argparse.Namespace) -> Arguments:
    data = folder / "train.jsonl"
    data.write_text("\n".join(json.dumps({"input": f"6 * {i} = " * 10, "label": "42"}) for i in range(options.prompts)))
    return Arguments(
        prompt_data=str(data),
        label_key="label",
        rm_type="math",
        rollout_shuffle=True,
        rollout_batch_size=options.prompts,
        n_samples_per_prompt=options.samples,
        rollout_max_response_len=options.response_tokens,
    )


def _median_seconds(work: Callable[[], Coroutine[Any, Any, None]], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        asyncio.run(work())
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
