"""One real engine over two Ray nodes of this machine: one process per node, one HTTP server, one reported death."""

from __future__ import annotations

import asyncio
import json
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from transformers import AutoModelForCausalLM

from slimrl.cluster.engines.engine_group import EngineGroup
from slimrl.cluster.launch import Launch
from slimrl.cluster.placement import GpuBundles, plan_gpus
from slimrl.engines.sglang.server import ServerProcess
from tests.end_to_end.ray_nodes import NODE, empty_cluster
from tests.megatron.launch import RankPool
from tests.megatron.tiny import save_qwen3, tiny_args
from tests.weights import ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
OPTIONS = {"skip_tokenizer_init": True, "max_total_tokens": 2048, "max_running_requests": 4}
PROMPT = [5, 17, 90, 3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models of the same shape; the engine starts with the first."""
    root = tmp_path_factory.mktemp("models")
    return [save_qwen3(root / str(seed), seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    """A Ray cluster of two nodes with one GPU each."""
    with empty_cluster() as (cluster, folder):
        try:
            for _ in range(2):
                cluster.add_node(**NODE, temp_dir=folder)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
            yield cluster
        finally:
            ray.shutdown()


@pytest.fixture(scope="module")
def fleet(two_nodes: Cluster, folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineGroup]:
    args = tiny_args(
        hf_checkpoint=str(folders[0]),
        run_dir=str(tmp_path_factory.mktemp("run")),
        actor_num_gpus_per_node=1,
        actor_num_nodes=2,
        colocate=True,
        rollout_num_gpus=2,
        rollout_num_gpus_per_engine=2,
        num_gpus_per_node=1,
        sglang_options=OPTIONS,
    )
    gpus = GpuBundles(plan_gpus(args))
    fleet = None
    try:
        fleet = asyncio.run(EngineGroup.start(args, gpus, Launch.of_run(args)))
        yield fleet
    finally:
        if fleet is not None:
            asyncio.run(fleet.close())
        gpus.release()


def engine_processes(folder: Path) -> dict[str, psutil.Process]:
    """The top process of each of the engine's parts, by its `--node-rank`."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if (
            f"--model-path={folder}" in words
            and "--nnodes=2" in words
            and "slimrl.engines.sglang.cpu_patches" in words[:4]
        ):
            (rank,) = (word for word in words if word.startswith("--node-rank="))
            found.setdefault(rank, process)
    return found


def generate(url: str, temperature: float = 0.0) -> tuple[list[int], list[float], str]:
    """(tokens, log-probabilities, weight version) of 12 tokens."""
    sampling = {"max_new_tokens": 12, "temperature": temperature, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
        answer = json.loads(response.read())
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return answer["output_ids"], logprobs, answer["meta_info"]["weight_version"]


def assert_serves(url: str, folder: Path, version: str) -> None:
    """The server samples from the model in `folder`, as transformers computes it."""
    tokens, logprobs, reported = generate(url, temperature=1.0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (expected - torch.tensor(logprobs)).abs().max() < 1e-5
    assert reported == version


def test_engine_processes_are_on_different_nodes_and_one_registers_with_the_router(fleet, folders):
    (endpoint,) = fleet.endpoints
    assert list(endpoint.gpus) == [0, 1] and len(set(endpoint.nodes)) == 2
    assert sorted(engine_processes(folders[0])) == ["--node-rank=0", "--node-rank=1"]


def test_multi_node_engine_generates_the_same_as_a_single_process(fleet, folders, tmp_path):
    single = ServerProcess(folders[0], log_path=tmp_path / "log", options=OPTIONS)
    try:
        single.start()
        single.wait_ready(120)
        tokens, logprobs, _ = generate(single.url)
    finally:
        single.stop()
    over_nodes, over_nodes_logprobs, _ = generate(fleet.router_url)
    assert over_nodes == tokens
    assert max(abs(a - b) for a, b in zip(over_nodes_logprobs, logprobs, strict=True)) <= 1e-4


def test_multi_node_engine_receives_weights_from_local_and_remote_trainers(fleet, folders, tmp_path):
    args = tiny_args(tensor_model_parallel_size=2)
    with RankPool(2) as pool:
        for way, version, folder in (("colocated", "1", folders[1]), ("split", "2", folders[2])):
            results = pool.run(
                ranks.update_weights, args, folder, fleet.endpoints, way, version, tmp_path, timeout_s=180
            )
            assert not any(isinstance(result, str) for result in results), results
            assert_serves(fleet.endpoints[0].url, folder, version)


def test_death_of_one_process_is_reported_once_and_stops_the_others(fleet, folders):
    processes = engine_processes(folders[0])
    everything = [child for process in processes.values() for child in process.children(recursive=True)]
    assert len(everything) >= 3  # two schedulers and the detokenizer
    processes["--node-rank=1"].send_signal(signal.SIGKILL)
    message = asyncio.run(asyncio.wait_for(fleet.watch(), 60))
    assert "SGLang server 0, node 1 of 2" in message and "exit code -9" in message
    assert "the other 1 nodes were ended" in message
    deadline = time.monotonic() + 60
    while any(process.is_running() for process in everything) or engine_processes(folders[0]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
