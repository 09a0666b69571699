"""Cost of the rollout driver per sample: whole rollouts through the real sglang-router, with instant engines.

    OMP_NUM_THREADS=1 python benchmarks/rollout_driver.py [--rounds 5] [--prompts 512] [--samples 8]

Every sample takes the full path: the prompt is sampled and tokenized, an HTTP request goes through the router, 512
tokens with log-probabilities come back (from benchmarks/instant_server.py), a grader process grades them (no answer
matches literally), and they are counted in the metrics and put into a pickled RolloutBatch per data-parallel rank, as
in the rollout manager.

Target: at least 2000 samples per second on 4 cores. For comparison, in interleaved rounds on the same servers and
router: the router under a generator that reads nothing, an aiohttp client that only decodes the responses, and an httpx
client with its own JSON, as slime has. Prints medians over the rounds: samples per second, and microseconds of CPU per
sample of each process and of the thread with the driver's event loop. Latencies are those of requests, once in these
rollouts (which saturate the client) and once at a steady 500 requests per second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import orjson
import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ratios import add_json_option, write_ratios

from benchmarks.instant_server import raw_load
from slimrl.arguments import Arguments
from slimrl.data.batch_schedule import schedule_batch
from slimrl.data.sample import Sample
from slimrl.engines.protocol import Generation, SamplingConfig
from slimrl.engines.sglang.client import RouterClient
from slimrl.engines.sglang.router import RouterProcess
from slimrl.processes.child_process import claim_ports
from slimrl.rollout import async_utils
from slimrl.rollout.convert_samples import RewardProcessing, compute_rewards, training_batch
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.metrics import sample_metrics
from slimrl.rollout.rollout_generator import RolloutGenerator
from slimrl.tiny.models import build_tokenizer

JSON = {"Content-Type": "application/json"}
SERVER = Path(__file__).with_name("instant_server.py")
START_TIMEOUT_S = 120.0
DATA_PARALLEL_SIZE = 2
STEADY_PER_S = 500.0
TARGET_PER_S = 2000.0
PROCESSES = ("driver", "graders", "router", "servers")


@dataclasses.dataclass(frozen=True)
class EngineGroup:
    """A running router and the instant servers behind it."""

    router: RouterProcess
    server_urls: list[str]
    server_pids: list[int]

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far of this process and of those that work for it, by PROCESSES."""
        graders = [child for child in psutil.Process().children() if "grader_pool" in " ".join(child.cmdline())]
        guardian = psutil.Process(self.router.pid)
        groups = {
            "graders": graders,
            "router": [guardian, *guardian.children(recursive=True)],
            "servers": [psutil.Process(pid) for pid in self.server_pids],
        }
        # The kernel reports CPU time of other processes in 10 ms steps; a short round of the driver may take less.
        others = {name: sum(sum(one.cpu_times()[:2]) for one in group) for name, group in groups.items()}
        return {"driver": time.process_time(), **others}


@dataclasses.dataclass(frozen=True)
class Figures:
    """One round of one method: wall time and CPU time per sample, the latter by process and of the event loop's thread.

    `others` is how many cores the rest of the machine kept busy meanwhile.
    """

    seconds: float
    cpu: dict[str, float]
    loop_cpu: float
    others: float


class TimedClient:
    """The client, with the time of each request."""

    def __init__(self, client: RouterClient) -> None:
        self._client = client
        self.seconds: list[float] = []

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], session_id: str | None = None
    ) -> Generation:
        """As the client's."""
        started = time.perf_counter()
        generation = await self._client.generate(input_ids, sampling_params, session_id)
        self.seconds.append(time.perf_counter() - started)
        return generation

    async def abort_all(self) -> None:
        """As the client's."""
        await self._client.abort_all()

    def percentiles_ms(self) -> tuple[float, float]:
        """Median and 99th percentile since the last call, in milliseconds."""
        hundredths = statistics.quantiles(self.seconds, n=100)
        self.seconds.clear()
        return 1e3 * hundredths[49], 1e3 * hundredths[98]


class Driver:
    """The rollout manager's work for one rollout, without Ray."""

    def __init__(self, args: Arguments, client: TimedClient) -> None:
        tokenizer = build_tokenizer(max_length=32768)
        self._args = args
        self._source = RolloutDataSource(args, tokenizer)
        self._generator = RolloutGenerator.from_args(args, tokenizer, client)
        self._rollout_id = 0
        async_utils.expect_many_samples()
        self.bytes_per_rollout = 0
        self.generated_bytes = 0  # resident memory when all samples of the last rollout were there

    async def rollout(self) -> None:
        """From prompts to pickled batches."""
        async_utils.collect_between_rollouts(samples_are_held=False)
        args = self._args
        output = await self._generator.generate_rollout(self._rollout_id, self._source)
        self.generated_bytes = psutil.Process().memory_info().rss
        samples = [sample for group in output.groups for sample in group]
        rewards = compute_rewards(RewardProcessing.from_args(args), samples)
        metrics = sample_metrics(samples, rewards.raw.tolist())
        shares = schedule_batch(
            training_batch(args, samples, rewards, hook_args=args),
            data_parallel_size=DATA_PARALLEL_SIZE,
            global_batch_size=args.global_batch_size,
            micro_batch_size=args.micro_batch_size,
            max_tokens_per_micro_batch=args.max_tokens_per_gpu,
            balance=True,
        )
        self.bytes_per_rollout = sum(len(pickle.dumps(share)) for share in shares)
        if metrics["rollout/raw_reward"] != 0.5 or metrics["rollout/reward_failures"] != 0.0:
            raise RuntimeError(f"every second answer is right, but the rewards are {metrics}")
        self._rollout_id += 1

    def close(self) -> None:
        """Ends the graders."""
        self._generator.close()


async def decode_only(url: str, body: bytes, count: int, concurrency: int) -> None:
    """A minimal aiohttp client: requests, and their responses as Python objects."""
    bodies = iter([body] * count)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=JSON) as session:

        async def work() -> None:
            for one in bodies:
                async with session.post(url, data=one) as response:
                    orjson.loads(await response.read())

        await asyncio.gather(*(work() for _ in range(concurrency)))


async def httpx_only(url: str, request: dict[str, Any], count: int, concurrency: int) -> None:
    """As slime has it: httpx, its JSON, and the tokens extracted from the response."""
    gpus = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(None)) as client:

        async def generate() -> None:
            async with gpus:
                response = await client.post(url, json=request)
                response.raise_for_status()
                scored = response.json()["meta_info"]["output_token_logprobs"]
                _ = [entry[1] for entry in scored], [entry[0] for entry in scored]

        await asyncio.gather(*(generate() for _ in range(count)))


async def steady(client: TimedClient, params: dict[str, Any], count: int) -> None:
    """Sends requests at a constant rate, regardless of their latency."""
    tasks, started = [], time.perf_counter()
    for number in range(count):
        await asyncio.sleep(max(0.0, started + number / STEADY_PER_S - time.perf_counter()))
        tasks.append(asyncio.create_task(client.generate(list(range(64)), params)))
    await asyncio.gather(*tasks)


@contextlib.contextmanager
def running_fleet(folder: Path, servers: int, response_tokens: int) -> Iterator[EngineGroup]:
    """Starts the servers and the router, and ends them."""
    claim = claim_ports(servers)
    ports = range(claim.first, claim.first + servers)
    line = [sys.executable, str(SERVER), "--response-tokens", str(response_tokens), "--port"]
    processes = [subprocess.Popen([*line, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for port in ports]
    router = RouterProcess(log_path=folder / "router.log")
    try:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for process in processes:
            process.stdout.readline()
        router.start()
        router.wait_alive(START_TIMEOUT_S)
        for url in urls:
            router.add_worker(url)
        router.wait_ready(servers, START_TIMEOUT_S)
        yield EngineGroup(router, urls, [process.pid for process in processes])
    finally:
        router.stop()
        for process in processes:
            process.kill()
            process.communicate()
        claim.release()


def arguments(folder: Path, options: argparse.Namespace) -> Arguments:
    """A GRPO run with short prompts; the answer of every second one is 21/2."""
    data = folder / "train.jsonl"
    rows = [{"input": f"{number} + {number} = " * 4, "label": f"1{number % 2}.5"} for number in range(options.prompts)]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    return Arguments(
        prompt_data=str(data),
        label_key="label",
        rm_type="math",
        rollout_shuffle=True,
        rollout_batch_size=options.prompts,
        n_samples_per_prompt=options.samples,
        rollout_max_response_len=options.response_tokens,
        global_batch_size=options.prompts * options.samples,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=9216,
    )


async def measured(fleet: EngineGroup, work: Callable[[], Awaitable[Any]], count: int) -> Figures:
    """One round of `count` samples."""
    loop_before, busy_before, before = time.thread_time(), busy_seconds(), fleet.cpu_seconds()
    started = time.perf_counter()
    await work()
    seconds = time.perf_counter() - started
    after, busy, loop_cpu = fleet.cpu_seconds(), busy_seconds() - busy_before, time.thread_time() - loop_before
    cpu = {name: after[name] - before[name] for name in PROCESSES}
    others = max(0.0, busy - sum(cpu.values())) / seconds
    return Figures(seconds / count, {name: value / count for name, value in cpu.items()}, loop_cpu / count, others)


def busy_seconds() -> float:
    """CPU time so far of the whole machine."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


async def run(options: argparse.Namespace, folder: Path, fleet: EngineGroup) -> None:
    """Takes the rounds and prints the table."""
    args = arguments(folder, options)
    count, concurrency = options.prompts * options.samples, options.concurrency * options.servers
    params = SamplingConfig.for_training(args).params(Sample(prompt="", tokens=[1] * 64), 1)
    request = {"input_ids": list(range(64)), "sampling_params": params, "return_logprob": True}
    body, url, few = orjson.dumps(request), f"{fleet.router.url}/generate", max(1, count // 8)
    rounds: dict[str, list[Figures]] = {}
    latencies: dict[str, list[tuple[float, float]]] = {"in the rollouts": [], "at a steady load": []}
    async with RouterClient(
        fleet.router.url, fleet.server_urls, concurrency=concurrency, request_timeout_s=600
    ) as router_client:
        client = TimedClient(router_client)
        driver = Driver(args, client)
        ways: dict[str, tuple[Callable[[], Awaitable[Any]], int]] = {
            "slimrl, prompt to batch": (driver.rollout, count),
            "aiohttp, answers decoded": (lambda: decode_only(url, body, count, concurrency), count),
            "httpx, answers decoded": (lambda: httpx_only(url, request, few, concurrency), few),
            "router, nothing read": (
                lambda: raw_load(fleet.router.host, fleet.router.port, body, count, concurrency),
                count,
            ),
        }
        try:
            for turn in range(options.rounds + 1):
                for name, (work, samples) in ways.items():
                    figures = await measured(fleet, work, samples)
                    if turn:  # the first round opens connections and starts graders
                        rounds.setdefault(name, []).append(figures)
                    if work == driver.rollout:
                        percentiles = client.percentiles_ms()
                        if turn:
                            latencies["in the rollouts"].append(percentiles)
                if turn:
                    await steady(client, params, few)
                    latencies["at a steady load"].append(client.percentiles_ms())
        finally:
            driver.close()
    show(options, rounds, latencies, driver.bytes_per_rollout / count)


def show(
    options: argparse.Namespace,
    rounds: dict[str, list[Figures]],
    latencies: dict[str, list[tuple[float, float]]],
    batch_bytes: float,
) -> None:
    """Prints the table."""
    count, concurrency = options.prompts * options.samples, options.concurrency * options.servers
    print(
        f"{count} samples of {options.response_tokens} tokens per rollout, {options.rounds} rounds, {options.servers}"
        f" servers, {concurrency} requests in flight, {psutil.cpu_count()} cores, {batch_bytes:.0f} bytes per sample"
        " in the batches"
    )
    print(
        f"{'':<26}{'samples/s':>10}{'(least':>9}{'most)':>8}   CPU us/sample: {'  '.join(PROCESSES)}"
        "  driver's loop  cores busy with other programs"
    )
    driver_cpu = {}
    loop_cpu = {name: 1e6 * statistics.median(figure.loop_cpu for figure in of) for name, of in rounds.items()}
    for name, figures in rounds.items():
        seconds = [figure.seconds for figure in figures]
        cpu = {one: 1e6 * statistics.median(figure.cpu[one] for figure in figures) for one in PROCESSES}
        driver_cpu[name] = cpu["driver"]
        columns = "".join(f"{cpu[one]:>{len(one) + 2}.0f}" for one in PROCESSES)
        print(
            f"{name:<26}{1 / statistics.median(seconds):>10.0f}{1 / max(seconds):>9.0f}{1 / min(seconds):>8.0f}"
            f"{'':<16}{columns}{loop_cpu[name]:>15.0f}{statistics.median(figure.others for figure in figures):>12.1f}"
        )
    rate = 1 / statistics.median(figure.seconds for figure in rounds["slimrl, prompt to batch"])
    own = driver_cpu["slimrl, prompt to batch"]
    loop_us = loop_cpu["slimrl, prompt to batch"]
    print(f"slimrl / target of {TARGET_PER_S:.0f} samples/s: {rate / TARGET_PER_S:.2f}")
    print(f"CPU of the event loop's thread: {loop_us:.0f} us/sample, so at most {1e6 / loop_us:.0f} samples/s")
    ratios = {}
    for peer in ("aiohttp, answers decoded", "httpx, answers decoded"):
        ratios[f"driver CPU / {peer}"] = own / driver_cpu[peer]
        print(f"driver CPU, slimrl / {peer}: {own / driver_cpu[peer]:.2f}")
        print(f"event loop, slimrl / {peer}: {loop_us / loop_cpu[peer]:.2f}")
    for name, percentiles in latencies.items():
        p50, p99 = (statistics.median(column) for column in zip(*percentiles, strict=True))
        print(f"request latency {name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    write_ratios(options.json, ratios)


def main() -> None:
    """Reads the flags and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=512, help="requests in flight per server")
    add_json_option(parser)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_fleet(Path(folder), options.servers, options.response_tokens) as fleet,
    ):
        uvloop.run(run(options, Path(folder), fleet))


if __name__ == "__main__":
    main()
