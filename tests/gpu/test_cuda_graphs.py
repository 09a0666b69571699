"""CUDA graphs of an engine leave the device's memory with everything else when it is released, and work afterwards.

GPU 0 must be idle except for this test, which reads the free memory of the device.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slimrl.engines.server_protocol import EngineMemory, ServerLaunch
from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.server import ServerProcess
from tests.gpu.conftest import needs
from tests.sglang.test_memory import greedy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs("sglang", "torch_memory_saver")]

MIB = 1024**2
# A wide vocabulary: the logits of a large batch, which each graph keeps, are most of what the graphs take.
OPTIONS = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "mem_fraction_static": 0.5,
    "max_total_tokens": 16384,
    "max_running_requests": 256,
    "cuda_graph_backend_prefill": "disabled",
}
GRAPHS = {"cuda_graph_max_bs_decode": 256}
NO_GRAPHS = {"cuda_graph_backend_decode": "disabled"}
LEAST_MIB = 64  # of graphs; with less the comparison would show nothing
START_TIMEOUT_S = 600


@dataclasses.dataclass(frozen=True)
class Held:
    """Memory of one server on the device, and its state after onload."""

    awake: int  # bytes
    released: int  # bytes: the CUDA context, libraries' workspaces, and what cannot be released
    wake_s: float
    before: list[int]  # a greedy answer
    after: list[int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of a Qwen3 with its published vocabulary."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def release_and_wake(model: Path, log_path: Path, options: dict[str, Any], free_bytes: Callable[[], int]) -> Held:
    """Starts a server, offloads it, onloads it and restores the weights."""
    idle = free_bytes()
    launch = ServerLaunch(cuda=torch.cuda.is_available(), memory_saver=True)
    server = ServerProcess(model, log_path=log_path, options=options, launch=launch)
    try:
        server.start()
        server.wait_ready(START_TIMEOUT_S)
        control = ServerControl(server.url)
        memory = EngineMemory([control])
        before = greedy(server.url)
        awake = idle - free_bytes()
        memory.release()
        released = idle - free_bytes()
        started = time.monotonic()
        memory.resume(["weights"])
        wake_s = time.monotonic() - started
        with control.weight_update("1"):
            control.update_weights_from_disk(str(model))
        started = time.monotonic()
        memory.resume(["kv_cache", "cuda_graph"])
        wake_s += time.monotonic() - started
        return Held(awake, released, wake_s, before, greedy(server.url))
    finally:
        server.stop()


def test_released_cuda_graphs_free_memory_and_give_the_same_results(
    model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
):
    """The same server with and without graphs: the difference is theirs.

    The driver keeps memory for each kernel of the graphs; up to a quarter of them may stay for that.
    """
    torch.cuda.init()  # creates this process's CUDA context before anything is measured
    free_bytes = lambda: torch.cuda.mem_get_info(0)[0]  # noqa: E731
    without = release_and_wake(model, tmp_path / "without.log", OPTIONS | NO_GRAPHS, free_bytes)
    graphs = release_and_wake(model, tmp_path / "with.log", OPTIONS | GRAPHS, free_bytes)
    taken, stayed = graphs.awake - without.awake, graphs.released - without.released
    figures = {"graphs_mib": taken // MIB, "graphs_after_release_mib": stayed // MIB, "wake_s": round(graphs.wake_s, 3)}
    figures |= {"server_after_release_mib": graphs.released // MIB, "wake_without_graphs_s": round(without.wake_s, 3)}
    print(figures)
    for name, value in figures.items():
        record_property(name, value)
    assert graphs.before == graphs.after and without.before == without.after
    assert taken > LEAST_MIB * MIB, f"graphs take too little to be seen: {figures}"
    assert stayed < taken / 4, figures
