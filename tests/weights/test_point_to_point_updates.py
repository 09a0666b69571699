"""Weight updates from trainer shards straight to the ranks of real SGLang servers."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.server import ServerProcess
from slimrl.engines.sglang.server_args import point_to_point_options
from slimrl.weights.update.topology import EngineEndpoint
from tests.families.layouts import LAYOUTS, flags, of_folder
from tests.families.test_serving import Served, assert_serves
from tests.families.toys import TOYS
from tests.megatron.launch import RankPool
from tests.megatron.tiny import save_qwen3, tiny_args
from tests.mooncake import mooncake
from tests.weights import ranks
from tests.weights.proxy import UPDATES, Proxy
from tests.weights.real_servers import running
from tests.weights.test_real_servers import SERVER_OPTIONS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three tied models of the same shape; the servers start with the first."""
    root = tmp_path_factory.mktemp("models")
    return [save_qwen3(root / str(seed), seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def servers(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """One of one rank, and one of two."""
    logs = tmp_path_factory.mktemp("logs")
    options = SERVER_OPTIONS | point_to_point_options({})
    started = [
        ServerProcess(folders[0], log_path=logs / f"{size}.log", tensor_parallel_size=size, options=options)
        for size in (1, 2)
    ]
    with running(started) as urls:
        yield urls


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as two:
        yield two


def engines_of(servers: list[str]) -> list[EngineEndpoint]:
    return [EngineEndpoint(url, gpus) for url, gpus in zip(servers, ([2], [3, 4]), strict=True)]


@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {},
        {"tensor_model_parallel_size": 2, "lora_rank": 4, "lora_merge": True},
    ],
    ids=["TP2", "PP2", "DP2", "TP2 with merged adapters"],
)
def test_servers_of_one_and_two_ranks_have_the_trainers_bits(parallel, servers, folders, pool):
    """Each update compares every tensor of every server with the gathered weights, by checksums."""
    args = tiny_args(**parallel)
    results = pool.run(ranks.point_to_point_updates, args, [*folders[1:], folders[1]], engines_of(servers), "nccl")
    for reports in results:
        assert [report.attempts for report in reports] == [1, 1, 1], reports
    assert [ServerControl(url).weight_version() for url in servers] == ["3", "3"]
    assert all(report.buckets > 4 and report.bytes > 0 for reports in results for report in reports)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return mooncake(tmp_path_factory)


@pytest.fixture(scope="module")
def servers_with_mooncake(
    environment: dict[str, str], folders: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    """One server of two ranks."""
    options = SERVER_OPTIONS | point_to_point_options({})
    log = tmp_path_factory.mktemp("logs") / "mooncake.log"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, f"{value}:{os.environ.get(name, '')}")
        with running([ServerProcess(folders[0], log_path=log, tensor_parallel_size=2, options=options)]) as urls:
            yield urls


def test_mooncake_brings_the_same_bits(servers_with_mooncake, environment, folders, pool):
    args = tiny_args(tensor_model_parallel_size=2)
    engines = [EngineEndpoint(servers_with_mooncake[0], [2, 3])]
    job = (args, [*folders[1:], folders[1]], engines, "mooncake", environment)
    for reports in pool.run(ranks.point_to_point_updates, *job):
        assert [report.attempts for report in reports] == [1, 1, 1], reports
    assert ServerControl(servers_with_mooncake[0]).weight_version() == "3"


def test_server_of_two_ranks_serves_experts_and_latent_attention(pool, tmp_path):
    """Latent attention computes with matrices that the server makes of the weights, which have no checksums."""
    toy = TOYS["moonlight"]
    served = Served(toy, "", tmp_path)
    old, new = served.folder(0), served.folder(1)
    options = SERVER_OPTIONS | point_to_point_options({})
    server = ServerProcess(old, log_path=tmp_path / "log", tensor_parallel_size=2, options=options)
    with running([server]) as (url,):
        layout = next(layout for layout in LAYOUTS if layout.name == "expert 2")
        args = flags(toy, layout, *of_folder(new))
        for (report,) in pool.run(ranks.point_to_point_updates, args, [new], [EngineEndpoint(url, [2, 3])]):
            assert getattr(report, "attempts", report) == 1
        assert_serves(dataclasses.replace(served, url=url), 1, "1")


@pytest.mark.parametrize("transport", ["nccl", "mooncake"])
def test_server_killed_during_an_update_is_named_on_every_rank_and_the_other_can_be_updated(
    transport, environment, folders, pool, tmp_path
):
    options = SERVER_OPTIONS | point_to_point_options({})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, f"{value}:{os.environ.get(name, '')}")
        started = [ServerProcess(folders[0], log_path=tmp_path / f"{n}.log", options=options) for n in range(2)]
        with running(started) as urls, Proxy(urls[1]) as proxy:

            def kill(body):
                started[1].stop()
                return body

            proxy.tamper(UPDATES["p2p"], kill, range(2, 3))  # the first call but to describe and to join
            engines = [EngineEndpoint(url, [gpu]) for url, gpu in ((urls[0], 2), (proxy.url, 3))]
            args, more = tiny_args(tensor_model_parallel_size=2), (transport, environment)
            begun = time.monotonic()
            results = pool.run(ranks.point_to_point_updates, args, folders[1:2], engines, *more)
            assert time.monotonic() - begun < 40
            for (error,) in results:
                assert f"{proxy.url} does not answer" in error and "(1 of 3 attempts)" in error
                assert f"{urls[0]} is stopped and reports version 'default'" in error
            for (report,) in pool.run(ranks.point_to_point_updates, args, folders[1:2], engines[:1], *more):
                assert report.attempts == 1
            assert ServerControl(urls[0]).weight_version() == "1"
