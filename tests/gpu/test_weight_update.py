"""Weights from a trainer on a GPU into real servers on GPUs: by CUDA IPC on the same GPU, by NCCL on another.

The verification compares every tensor bit for bit, with the checksums that servers compute on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.server import ServerProcess
from slimrl.engines.sglang.server_args import point_to_point_options
from slimrl.weights.update.topology import EngineEndpoint
from tests.gpu.conftest import needs
from tests.megatron.launch import RankPool
from tests.megatron.tiny import save_qwen3, tiny_args
from tests.weights import ranks
from tests.weights.proxy import UPDATES, Proxy, refuse

pytestmark = [pytest.mark.slow, needs("sglang")]
OPTIONS = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "mem_fraction_static": 0.2,
    "max_running_requests": 4,
    "attention_backend": "triton",  # the toys' heads of 16 channels are too narrow for others
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of the same shape; the servers start with the first."""
    root = tmp_path_factory.mktemp("models")
    return [save_qwen3(root / str(seed), seed=seed) for seed in range(2)]


@pytest.fixture
def server_on(folders: list[Path], tmp_path: Path) -> Iterator[Callable[[int], str]]:
    """`server_on(1)` starts a server on that GPU and returns its URL."""
    started: list[ServerProcess] = []

    def start(gpu: int) -> str:
        options = OPTIONS | point_to_point_options({})
        server = ServerProcess(folders[0], log_path=tmp_path / f"{gpu}.log", options=options, base_gpu_id=gpu)
        started.append(server)
        server.start()
        server.wait_ready(300)
        return server.url

    yield start
    for server in started:
        server.stop()


def update_weights(folder: Path, url: str, gpu: int, way: str, versions: list[str], tmp_path: Path) -> list:
    """The reports, or error texts, of a trainer on GPU 0."""
    args, engines = tiny_args(bf16=True), [EngineEndpoint(url, [gpu])]
    with RankPool(1) as pool:
        (results,) = pool.run(
            ranks.weight_updates, args, folder, engines, way, versions, tmp_path / "updates", timeout_s=300
        )
    return results


def test_server_on_the_same_gpu_opens_the_trainer_memory(server_on, folders, tmp_path):
    url = server_on(0)
    first, second = update_weights(folders[1], url, 0, "colocated", ["1", "2"], tmp_path)
    assert (first.attempts, second.attempts) == (1, 1) and first.buckets > 5
    assert ServerControl(url).weight_version() == "2"


@needs(gpus=2)
@pytest.mark.parametrize("way", ["split", "disk", "p2p"])
def test_server_on_another_gpu_receives_the_weights(way, server_on, folders, tmp_path):
    url = server_on(1)
    first, second = update_weights(folders[1], url, 1, way, ["1", "2"], tmp_path)
    assert (first.attempts, second.attempts) == (1, 1)
    assert ServerControl(url).weight_version() == "2"


@needs(gpus=2)
def test_bucket_without_receivers_leaves_no_pending_broadcast(server_on, folders, tmp_path):
    """NCCL's broadcast never returns by itself: the update must end it, and then succeed or report failure."""
    with Proxy(server_on(1)) as proxy:
        proxy.tamper(UPDATES["split"], refuse, range(2, 3))
        (result,) = update_weights(folders[1], proxy.url, 1, "split", ["1"], tmp_path)
    arrived = not isinstance(result, str)
    assert result.attempts == 2 if arrived else f"failed on {proxy.url}" in result
