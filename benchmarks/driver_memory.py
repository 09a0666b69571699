"""Memory of the rollout driver with all samples of a rollout in flight.

    OMP_NUM_THREADS=1 python benchmarks/driver_memory.py [--prompts 8192] [--samples 8] [--response-tokens 512]

One rollout through the real sglang-router, as in benchmarks/rollout_driver.py: every sample is a task from the start,
and stays in memory until its batch is built. Prints the resident memory that this adds to the driver: when all samples
are generated and scored, and the most until the pickled batches exist.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from pathlib import Path

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rollout_driver import Driver, EngineGroup, TimedClient, arguments, running_fleet

from slimrl.engines.sglang.client import RouterClient


async def run(options: argparse.Namespace, folder: Path, fleet: EngineGroup) -> None:
    """Takes one rollout and prints its memory."""
    count, concurrency = options.prompts * options.samples, options.concurrency * options.servers
    async with RouterClient(
        fleet.router.url, fleet.server_urls, concurrency=concurrency, request_timeout_s=600
    ) as client:
        driver = Driver(arguments(folder, options), TimedClient(client))
        try:
            before = psutil.Process().memory_info().rss
            await driver.rollout()
        finally:
            driver.close()
    print(f"{count} samples of {options.response_tokens} tokens in flight, {concurrency} requests at a time")
    print(f"before: {before / 2**20:.0f} MiB")
    most = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, used in (("all samples generated", driver.generated_bytes), ("most, with the batches", most)):
        added = used - before
        print(f"{name}: {added / 2**20:.0f} MiB more, {added / count / 1024:.1f} KiB per sample")


def main() -> None:
    """Reads the flags and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=512, help="requests in flight per server")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_fleet(Path(folder), options.servers, options.response_tokens) as fleet,
    ):
        uvloop.run(run(options, Path(folder), fleet))


if __name__ == "__main__":
    main()
