"""A tiny random Qwen3 and a group of two real servers behind the real router, for the slow tests of this folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

VOCAB_SIZE = 64
CONTEXT_LENGTH = 1024


def write_tiny_qwen3(folder: Path, seed: int = 0) -> Path:
    """A 2-layer Qwen3 with grouped queries and tied embeddings, and a tokenizer of single characters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(33 + i): 3 + i for i in range(VOCAB_SIZE - 3)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    return write_tiny_qwen3(tmp_path / "model")


@dataclasses.dataclass
class EngineGroup:
    """Two running servers and their router."""

    model_path: Path
    servers: list
    router: object

    @property
    def server_urls(self) -> list[str]:
        return [server.url for server in self.servers]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineGroup]:
    from slimrl.engines.sglang.router import RouterProcess
    from slimrl.engines.sglang.server import ServerProcess

    folder = tmp_path_factory.mktemp("fleet")
    model_path = write_tiny_qwen3(folder / "model")
    options = {"enable_deterministic_inference": True, "max_running_requests": 32, "chunked_prefill_size": 256}
    servers = [
        ServerProcess(model_path, log_path=folder / f"server{i}.log", options=options, random_seed=i) for i in range(2)
    ]
    router = RouterProcess(log_path=folder / "router.log", options={"policy": "round_robin"})
    try:
        router.start()
        for server in servers:
            server.start()
        router.wait_alive(60)
        for server in servers:
            server.wait_ready(120)
            router.add_worker(server.url)
        router.wait_ready(2, 60)
        yield EngineGroup(model_path, servers, router)
    finally:
        router.stop()
        for server in servers:
            server.stop()
