"""Weights from real Megatron ranks into real SGLang servers, in every placement that a CPU machine supports."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.server import ServerProcess
from slimrl.weights.update.topology import EngineEndpoint
from tests.megatron.launch import RankPool
from tests.megatron.tiny import VOCAB_SIZE, save_qwen3, tiny_args
from tests.weights import ranks
from tests.weights.real_servers import running

pytestmark = pytest.mark.slow
SERVER_OPTIONS = {"skip_tokenizer_init": True, "max_total_tokens": 2048, "max_running_requests": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models of the same shape; the servers start with the first."""
    root = tmp_path_factory.mktemp("models")
    return [save_qwen3(root / str(seed), seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def servers(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """URLs of two servers of one rank and one of two ranks."""
    logs = tmp_path_factory.mktemp("logs")
    started = [
        ServerProcess(folders[0], log_path=logs / f"{n}.log", tensor_parallel_size=size, options=SERVER_OPTIONS)
        for n, size in enumerate((1, 1, 2))
    ]
    with running(started) as urls:
        yield urls


@pytest.fixture(scope="module")
def staged(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server of two pipeline stages of one rank each."""
    options = {**SERVER_OPTIONS, "pp_size": 2}
    server = ServerProcess(folders[0], log_path=tmp_path_factory.mktemp("staged") / "log", options=options)
    try:
        server.start()
        server.wait_ready(120)
        yield server.url
    finally:
        server.stop()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def generate(url: str) -> tuple[list[int], list[float], str]:
    """(tokens, log-probabilities, weight version) of 12 sampled tokens."""
    body = {
        "input_ids": [5, 17, 90, 3],
        "sampling_params": {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
        answer = json.loads(response.read())
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return answer["output_ids"], logprobs, answer["meta_info"]["weight_version"]


def assert_serves(
    url: str, folder: Path, version: str, *, dtype: torch.dtype = torch.float32, limit: float = 1e-5
) -> None:
    """The server samples from the model in `folder`, as transformers computes it in float32 on weights of `dtype`."""
    tokens, logprobs, reported = generate(url)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).float()
    with torch.no_grad():
        logits = model(torch.tensor([[5, 17, 90, 3, *tokens]])).logits[0, 3:-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (expected - torch.tensor(logprobs)).abs().max() < limit
    assert reported == version


def whole_model_bytes(folder: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())


def update_weights(
    pool: RankPool, tensor_parallel: int, folder: Path, engines, way: str, version: str, disk: Path
) -> list:
    args = tiny_args(tensor_model_parallel_size=tensor_parallel)
    return pool.run(ranks.update_weights, args, folder, engines, way, version, disk, timeout_s=180)


@pytest.mark.parametrize(
    ("version", "world", "tensor_parallel", "gpus"),
    [
        ("1", 1, 1, ([0], [1], [2, 3])),  # one trainer rank, engines on more GPUs than it has
        ("2", 2, 1, ([0], [1], [2, 3])),  # data parallel: each replica sends to the engine on its GPU
        ("3", 2, 1, (None, None, [0, 1])),  # data parallel, one engine over both GPUs
        ("4", 2, 2, ([0], [1], None)),  # tensor parallel, an engine on each GPU
    ],
)
def test_colocated_engines_serve_the_new_weights(
    version, world, tensor_parallel, gpus, servers, folders, one_rank, two_ranks, tmp_path
):
    folder = folders[1 + int(version) % 2]
    engines = [EngineEndpoint(url, own) for url, own in zip(servers, gpus, strict=True) if own is not None]
    pool = one_rank if world == 1 else two_ranks
    results = update_weights(pool, tensor_parallel, folder, engines, "colocated", version, tmp_path)
    assert all(num_bytes == whole_model_bytes(folder) and buckets > 5 for num_bytes, buckets in results), results
    for engine in engines:
        assert_serves(engine.url, folder, version)


def test_colocated_engines_read_weights_in_shared_memory_where_they_are(servers, folders, one_rank, tmp_path):
    engines = [EngineEndpoint(url, gpus) for url, gpus in zip(servers, ([0], [1], [2, 3]), strict=True)]
    job = (tiny_args(), folders[1], engines, "colocated", ["5"], tmp_path, True, None, True)
    ((report,),) = one_rank.run(ranks.weight_updates, *job, timeout_s=180)
    assert report.bytes == whole_model_bytes(folders[1]) and report.check_seconds > 0
    assert report.buckets <= 5  # of query, key and value: everything else is read where it is
    for engine in engines:
        assert_serves(engine.url, folders[1], "5")


@pytest.mark.parametrize(
    ("version", "world", "nodes"),
    [
        ("1", 1, None),  # one trainer rank sends to both stages
        ("2", 2, ("a", "b")),  # each stage is on the node of another trainer rank, whose memory it opens
    ],
)
def test_pipeline_stages_serve_the_new_weights(version, world, nodes, staged, folders, one_rank, two_ranks, tmp_path):
    folder = folders[int(version)]
    engine = EngineEndpoint(staged, [0, 1], nodes=nodes, tensor_parallel_size=1)
    results = update_weights(one_rank if world == 1 else two_ranks, 1, folder, [engine], "colocated", version, tmp_path)
    assert all(num_bytes == whole_model_bytes(folder) and buckets > 5 for num_bytes, buckets in results), results
    assert_serves(staged, folder, version)


@pytest.mark.parametrize(("way", "version"), [("split", "5"), ("disk", "6"), ("divided", "7")])
def test_engines_on_other_gpus_serve_the_new_weights(way, version, servers, folders, two_ranks, tmp_path):
    folder = folders[1 + int(version) % 2]
    engines = [EngineEndpoint(url, gpus) for url, gpus in zip(servers, ([2], [3], [4, 5]), strict=True)]
    results = update_weights(two_ranks, 2, folder, engines, way, version, tmp_path / "updates")
    assert not any(isinstance(result, str) for result in results), results
    assert all(num_bytes == whole_model_bytes(folder) for num_bytes, _ in results), results
    for engine in engines:
        assert_serves(engine.url, folder, version)
    if way == "disk":
        assert list((tmp_path / "updates").iterdir()) == []


def with_larger_vocabulary(folder: Path, target: Path) -> Path:
    """The same model with one more token: servers of the original have no slot for its embedding."""
    target.mkdir()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([table, table[:1]])
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("way", ["split", "divided"])  # the second server is told by rank 0, or by rank 1
def test_server_that_rejects_a_broadcast_is_named_and_keeps_its_version(way, servers, folders, two_ranks, tmp_path):
    larger = with_larger_vocabulary(folders[1], tmp_path / "larger")
    args = tiny_args(tensor_model_parallel_size=2, vocab_size=VOCAB_SIZE + 1)
    engines = [EngineEndpoint(servers[0], [2]), EngineEndpoint(servers[1], [3])]
    before = ServerControl(servers[1]).weight_version()
    results = two_ranks.run(ranks.update_weights, args, larger, engines, way, "8", tmp_path, timeout_s=180)
    assert all(isinstance(result, str) and servers[1] in result for result in results), results
    assert ServerControl(servers[1]).weight_version() == before
    # a complete weight update repairs it
    results = update_weights(two_ranks, 2, folders[1], engines, way, f"{way} 9", tmp_path)
    assert all(not isinstance(result, str) for result in results), results
    assert_serves(servers[1], folders[1], f"{way} 9")


def test_nothing_is_left_in_shared_memory(servers, folders, one_rank, tmp_path):
    before = {path.name for path in Path("/dev/shm").iterdir()}
    update_weights(one_rank, 1, folders[2], [EngineEndpoint(servers[0], [0])], "colocated", "9", tmp_path)
    left = {path.name for path in Path("/dev/shm").iterdir()} - before
    assert not [name for name in left if name.startswith("torch_") or "slimrl" in name]


def test_server_that_dies_during_a_weight_update_is_named_on_every_rank(servers, folders, two_ranks, tmp_path):
    larger = with_larger_vocabulary(folders[1], tmp_path / "larger")
    args = tiny_args(tensor_model_parallel_size=2, vocab_size=VOCAB_SIZE + 1)
    engines = [EngineEndpoint(servers[0], [0]), EngineEndpoint(servers[2], [1])]
    results = two_ranks.run(ranks.update_weights, args, larger, engines, "colocated", "10", tmp_path, timeout_s=180)
    assert all(isinstance(result, str) and "shared tensors failed on http://" in result for result in results), results
