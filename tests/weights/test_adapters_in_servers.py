"""LoRA adapters by tensors in real SGLang servers, against transformers' model with W + alpha / rank * B A."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from transformers import AutoModelForCausalLM

from slimrl.engines.protocol import EngineError
from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.server import ServerProcess
from slimrl.engines.sglang.server_args import adapter_options
from slimrl.models.adapters import ADAPTER_NAME, TARGETS, AdapterConfig, peft_config
from slimrl.rollout.dataset.images import ImageProcessor, data_uri
from slimrl.weights.update.adapter_updater import AdapterTransport
from slimrl.weights.update.buckets import iter_buckets
from slimrl.weights.update.engine_fanout import WeightSyncError
from slimrl.weights.update.topology import EngineEndpoint
from tests.families.toys import TOYS
from tests.megatron.launch import RankPool
from tests.megatron.tiny import save_qwen3, tiny_args
from tests.weights import ranks
from tests.weights.real_servers import running

pytestmark = pytest.mark.slow
ADAPTERS = AdapterConfig(rank=4, alpha=8.0, targets=TARGETS)
PROMPT = [5, 17, 90, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("model") / "base", seed=0)


@pytest.fixture(scope="module")
def servers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerControl]]:
    """One of one rank, and one of two."""
    options = {"skip_tokenizer_init": True, "max_total_tokens": 2048, "max_running_requests": 4}
    options |= adapter_options(ADAPTERS, releases_memory=True)
    logs = tmp_path_factory.mktemp("logs")
    started = [
        ServerProcess(folder, log_path=logs / f"{size}.log", tensor_parallel_size=size, options=options)
        for size in (1, 2)
    ]
    with running(started) as urls:
        yield [ServerControl(url) for url in urls]


def random_adapters(folder: Path, seed: int, targets: tuple[str, ...] = TARGETS) -> dict[str, torch.Tensor]:
    """A and B of every projection in `targets`, by PEFT's names."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, weight in AutoModelForCausalLM.from_pretrained(folder).named_parameters():
        module = name.removesuffix(".weight")
        if module.split(".")[-1] in targets:
            outputs, inputs = weight.shape
            found[f"base_model.model.{module}.lora_A.weight"] = 0.3 * torch.randn(4, inputs, generator=generator)
            found[f"base_model.model.{module}.lora_B.weight"] = 0.3 * torch.randn(outputs, 4, generator=generator)
    return found


def send(servers: list[ServerControl], adapters: dict[str, torch.Tensor], described: AdapterConfig = ADAPTERS) -> None:
    transport = AdapterTransport(servers, [1, 2][: len(servers)], peft_config(described), torch.device("cpu"))
    transport.with_checksums = True
    for bucket in iter_buckets(adapters.items(), 4096, transport.buffer):
        transport.start(bucket)


def answer_of(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of the server at `url` to a request to generate."""
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
        return json.loads(response.read())


def generate(server: ServerControl, adapter: str | None) -> tuple[list[int], torch.Tensor]:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "lora_path": adapter,
    }
    answer = answer_of(server.url, body)
    return answer["output_ids"], torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


def difference(
    server: ServerControl, folder: Path, adapters: dict[str, torch.Tensor] | None, name: str | None = None
) -> float:
    """Between the server's log-probabilities and those of transformers, at most."""
    tokens, found = generate(server, ADAPTER_NAME if adapters else name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if adapters and f"{module}.lora_A.weight" in adapters:
                a, b = (adapters[f"{module}.lora_{letter}.weight"].double() for letter in "AB")
                weight += ADAPTERS.scale * (b @ a)
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((expected - found).abs().max())


def test_servers_serve_the_newest_adapter_beside_the_base(servers, folder):
    base = [server.weights_checksum() for server in servers]
    for seed in (1, 2):  # the second takes the place of the first
        adapters = random_adapters(folder, seed)
        send(servers, adapters)
        for server in servers:
            assert difference(server, folder, adapters) < 1e-5
            assert difference(server, folder, None) < 1e-5
    assert [server.weights_checksum() for server in servers] == base
    assert not any("base_layer" in name for server in base for rank in server for name in rank["checksums"])


def test_failed_update_names_every_server_and_the_reason(servers, folder):
    larger = AdapterConfig(rank=8, alpha=8.0, targets=TARGETS)
    with pytest.raises(WeightSyncError, match=r"loading adapters failed on .*rank.*; .*rank"):
        send(servers, random_adapters(folder, 3), larger)


def test_adapters_on_another_base_than_the_servers_are_refused(servers, folder, tmp_path):
    other = save_qwen3(tmp_path / "other", seed=1)
    engines = [EngineEndpoint(server.url, gpus) for server, gpus in zip(servers, ([2], [3, 4]), strict=True)]
    args = tiny_args(tensor_model_parallel_size=2, lora_rank=4, lora_alpha=8.0)
    with RankPool(2) as pool:
        refused = pool.run(ranks.adapter_update, args, other, engines, timeout_s=120)
        accepted, _ = pool.run(ranks.adapter_update, args, folder, engines, timeout_s=120)
    assert all("the adapters are trained on those of --ref-load: make them equal" in error for error in refused)
    assert refused[0].count("tensors differ from the trainer's") == 2  # each server
    assert accepted.buckets > 1 and accepted.attempts == 1
    for server in servers:  # B is zero: the base
        assert server.weight_version() == "1" and difference(server, folder, None, ADAPTER_NAME) < 1e-5


def test_projections_that_a_family_has_as_one_are_served(tmp_path):
    """GLM-4's gate_up_proj has one A for both halves."""
    folder = TOYS["glm4"].save(tmp_path / "glm4", tokenizer=False)
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
    config = AdapterConfig(rank=4, alpha=8.0, targets=targets)
    options = {"skip_tokenizer_init": True, "max_total_tokens": 2048, "context_length": 512, "max_running_requests": 4}
    options |= adapter_options(config, releases_memory=False)
    with running([ServerProcess(folder, log_path=tmp_path / "log", options=options)]) as (url,):
        server, adapters = ServerControl(url), random_adapters(folder, 1, targets)
        assert any("gate_up_proj" in name for name in adapters)
        send([server], adapters, config)
        assert difference(server, folder, adapters) < 1e-5
        assert difference(server, folder, None) < 1e-5


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_other_pixels_change_the_log_probs_of_an_adapter_as_in_transformers(name, tmp_path):
    toy = TOYS[name]
    folder = toy.save(tmp_path / name, tokenizer=False)
    options = {"max_total_tokens": 2048, "context_length": 512, "max_running_requests": 4}
    options |= adapter_options(ADAPTERS, releases_memory=False)
    processor, draw, texts = ImageProcessor(str(folder)), np.random.default_rng(0), []
    with running([ServerProcess(folder, log_path=tmp_path / "log", options=options)]) as (url,):
        base, whole = toy.load(folder), toy.load(folder)
        adapters = add_random_adapters(whole)
        send([ServerControl(url)], adapters)
        for _ in range(2):
            image = data_uri(PIL.Image.fromarray(draw.integers(0, 255, (64, 128, 3), dtype=np.uint8)))
            ids = [5, 6, 281, 283, 282, *range(40, 60)]
            found = log_probs_of_prompt(url, ids, image)
            tokens = torch.tensor([[*processor.expand(ids, [processor.decoded(image)[1]])]])
            seen = processor.train_inputs([image]) | {"mm_token_type_ids": (tokens == 283).int()}
            with torch.no_grad():
                expected, without = (
                    model(tokens, **seen).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[-19:, 0]
                    for model in (whole, base)
                )
            assert (found[-19:] - expected).abs().max() < 1e-5 < 1e-2 < (expected - without).abs().max()
            texts.append(found[-19:])
    assert (texts[0] - texts[1]).abs().max() > 1e-3


def add_random_adapters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A and B of every target of the decoder by PEFT's names, which the weights of `model` have afterwards."""
    generator, found = torch.Generator().manual_seed(1), {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            module = name.removesuffix(".weight")
            if "language_model" in name and module.split(".")[-1] in TARGETS:
                a = 0.3 * torch.randn(4, weight.shape[1], generator=generator)
                b = 0.3 * torch.randn(weight.shape[0], 4, generator=generator)
                found |= {f"base_model.model.{module}.lora_{x}.weight": value for x, value in (("A", a), ("B", b))}
                weight += ADAPTERS.scale * (b @ a)
    return found


def log_probs_of_prompt(url: str, ids: list[int], image: str) -> torch.Tensor:
    """Of all tokens but the first, those of the image too, with the run's adapter."""
    body = {
        "input_ids": ids,
        "image_data": [image],
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "lora_path": ADAPTER_NAME,
    }
    return torch.tensor([entry[0] for entry in answer_of(url, body)["meta_info"]["input_token_logprobs"][1:]])


def test_request_for_an_adapter_without_an_update_is_refused(servers):
    with pytest.raises((urllib.error.HTTPError, EngineError)):
        generate(servers[0], "unknown")
