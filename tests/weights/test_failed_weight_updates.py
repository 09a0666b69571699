"""Weight updates into two real servers that fail in transit, for every transport: retried, or ended with all paused."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.server import ServerProcess
from slimrl.engines.sglang.server_args import point_to_point_options
from slimrl.weights.update.topology import EngineEndpoint
from tests.megatron.launch import RankPool
from tests.megatron.tiny import save_qwen3, tiny_args
from tests.weights import ranks
from tests.weights.proxy import UPDATES, Proxy, exchange_key_and_value, refuse
from tests.weights.test_real_servers import SERVER_OPTIONS, assert_serves

pytestmark = pytest.mark.slow
GPUS = {"colocated": ([0], [1]), "split": ([1], [2]), "disk": ([1], [2]), "p2p": ([1], [2])}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of the same shape; the servers start with the first."""
    root = tmp_path_factory.mktemp("models")
    return [save_qwen3(root / str(seed), seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def servers(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    logs = tmp_path_factory.mktemp("logs")
    options = SERVER_OPTIONS | point_to_point_options({})
    started = [ServerProcess(folders[0], log_path=logs / f"{n}.log", options=options) for n in range(2)]
    with contextlib.ExitStack() as stack:
        for server in started:
            stack.callback(server.stop)
            server.start()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.wait_ready(120), started))
        yield started


@pytest.fixture
def proxy(servers: list[ServerProcess]) -> Iterator[Proxy]:
    """In front of the second server."""
    with Proxy(servers[1].url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


def weight_updates(
    pool, way: str, folder: Path, urls: list[str], versions: list[str], tmp_path: Path, left: int | None = None
) -> list:
    """`left`: another updater sends the last weight update, to that many of the servers."""
    engines = [EngineEndpoint(url, gpus) for url, gpus in zip(urls, GPUS[way], strict=True)]
    more = (True, engines[:left]) if left else ()
    (results,) = pool.run(
        ranks.weight_updates, tiny_args(), folder, engines, way, versions, tmp_path / "updates", *more, timeout_s=120
    )
    return results


def version_of(server: ServerProcess) -> str:
    return ServerControl(server.url).weight_version()


def holds_requests(url: str) -> bool:
    """Whether a request is held instead of being answered."""
    body = json.dumps({"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}).encode()
    request = urllib.request.Request(url + "/generate", body, {"Content-Type": "application/json"})
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=0.5)
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize("way", UPDATES)
def test_rejected_bucket_is_followed_by_a_second_complete_weight_update(way, servers, folders, pool, proxy, tmp_path):
    proxy.tamper(UPDATES[way], refuse, range(0, 1) if way == "disk" else range(2, 3))
    urls = [servers[0].url, proxy.url]
    first, second = weight_updates(pool, way, folders[1], urls, [f"{way} 1", f"{way} 2"], tmp_path)
    assert (first.attempts, second.attempts) == (2, 1)
    assert first.bytes == second.bytes  # of the successful attempt, which sent everything
    for server in servers:
        assert_serves(server.url, folders[1], f"{way} 2")
    assert not list(tmp_path.glob("updates/*"))


def test_values_corrupted_in_transit_are_found_and_sent_again(servers, folders, pool, proxy, tmp_path):
    buckets = 14  # each call of the first attempt, none of the second
    proxy.tamper(UPDATES["colocated"], exchange_key_and_value, range(buckets))
    (report,) = weight_updates(pool, "colocated", folders[1], [servers[0].url, proxy.url], ["3"], tmp_path)
    assert (report.attempts, report.buckets) == (2, buckets)
    assert 0 < report.check_seconds < report.seconds
    for server in servers:
        assert_serves(server.url, folders[1], "3")


@pytest.mark.parametrize("way", [way for way in UPDATES if way != "p2p"])  # whose calls name no such tensors
def test_no_server_resumes_after_the_last_attempt(way, servers, folders, pool, proxy, tmp_path):
    before = version_of(servers[0])
    proxy.tamper(UPDATES[way], exchange_key_and_value, range(1000))
    urls = [servers[0].url, proxy.url]
    (error,) = weight_updates(pool, way, folders[1], urls, [f"{way} 4"], tmp_path)
    assert f"weight version '{way} 4' was not loaded by every server (3 of 3 attempts)" in error
    assert f"{proxy.url} rank 0: 1 of 18 tensors differ" in error and "layers.0.self_attn.qkv_proj" in error
    for url in urls:
        assert f"{url} is stopped and reports version {before!r}" in error
    assert [version_of(server) for server in servers] == [before, before]
    assert all(holds_requests(server.url) for server in servers)
    proxy.leave_alone()
    (report,) = weight_updates(pool, way, folders[1], urls, [f"{way} 5"], tmp_path)
    assert report.attempts == 1
    for server in servers:
        assert_serves(server.url, folders[1], f"{way} 5")


def test_server_killed_during_a_weight_update_ends_it_and_the_others_can_be_updated(
    servers, folders, pool, proxy, tmp_path
):
    before = version_of(servers[0])

    def kill(body):
        servers[1].stop()
        return body

    proxy.tamper(UPDATES["split"], kill, range(2, 3))
    urls = [servers[0].url, proxy.url]
    error, report = weight_updates(pool, "split", folders[1], urls, ["6"], tmp_path, left=1)
    assert "(1 of 3 attempts)" in error and f"failed on {proxy.url}" in error
    assert f"{proxy.url} does not answer" in error
    assert f"{servers[0].url} is stopped and reports version {before!r}" in error
    assert report.attempts == 1
    assert_serves(servers[0].url, folders[1], "left")
