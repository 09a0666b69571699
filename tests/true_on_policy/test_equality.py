"""--true-on-policy-mode: a real server and real training ranks compute the same log-probabilities to the last bit."""

from __future__ import annotations

import dataclasses
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from slimrl.engines.server_protocol import ServerLaunch
from slimrl.engines.sglang.server import ServerProcess
from tests.families.layouts import LAYOUTS, flags
from tests.families.toys import TOYS, Toy
from tests.megatron.launch import RankPool
from tests.true_on_policy import jobs

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_total_tokens": 4096,
    "context_length": 512,
    "enable_deterministic_inference": True,
}
BY_NAME = {layout.name: layout for layout in LAYOUTS}
TEMPERATURE = 0.7
PROMPTS = (3, 40, 9, 70, 21, 130, 5, 33)  # tokens
PACKS = [[[0, 1, 2, 3, 4, 5, 6, 7]], [[n] for n in range(8)], [[7, 2, 5], [0], [6, 1, 4, 3]]]


def widened(toy: Toy) -> Toy:
    """The toy with blocks of 128 columns: two ranks of a server divide 96 into 64 and 32, those of training by 2."""
    words, config = list(toy.flags), dict(toy.config)
    for flag, entry in (("--ffn-hidden-size", "intermediate_size"), ("--moe-ffn-hidden-size", "moe_intermediate_size")):
        if flag in words:
            words[words.index(flag) + 1], config[entry] = "128", 128
    return dataclasses.replace(toy, config=config, flags=tuple(words))


class Served:
    """A server of a toy model with the operators of the flag, and the samples that it generated."""

    def __init__(self, name: str, gpus: int, layouts: tuple[str, ...], root: Path) -> None:
        self.toy, self.layouts = TOYS[name] if gpus == 1 else widened(TOYS[name]), layouts
        self.folder = self.toy.save(root / name, tokenizer=False)
        launch = ServerLaunch(cuda=False, batch_invariant=True)
        self.server = ServerProcess(
            self.folder, log_path=root / "server.log", options=OPTIONS, launch=launch, tensor_parallel_size=gpus
        )
        self.server.start()

    def prompts(self) -> list[list[int]]:
        random = torch.Generator().manual_seed(3)
        vocabulary = self.toy.config["vocab_size"]
        return [torch.randint(0, vocabulary, (tokens,), generator=random).tolist() for tokens in PROMPTS]

    def answer(self, prompt: list[int], seed: int, **sampling: Any) -> tuple[list[int], list[float]]:
        """The sampled tokens and their log-probabilities."""
        body = {
            "input_ids": prompt,
            "sampling_params": {
                "max_new_tokens": 5 + seed * 7 % 30,
                "temperature": TEMPERATURE,
                "ignore_eos": True,
                "sampling_seed": seed,
                **sampling,
            },
            "return_logprob": True,
        }
        request = urllib.request.Request(
            self.server.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=100) as response:
            result = json.loads(response.read())
        return result["output_ids"], [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]


# toy, ranks of the server, layouts of training
CASES = (
    ("qwen3", 1, ("one rank",)),
    ("qwen3", 2, ("tensor 2", "tensor 2, sequence")),
    ("qwen3-moe", 1, ("one rank", "expert 2")),
    ("qwen3-moe", 2, ("tensor 2, expert tensor 2",)),
    ("qwen2", 1, ("one rank",)),
    ("llama-tied", 1, ("one rank",)),
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-tp{case[1]}")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    name, gpus, layouts = request.param
    started = Served(name, gpus, layouts, tmp_path_factory.mktemp("served"))
    try:
        started.server.wait_ready(120)
        yield started
    finally:
        started.server.stop()


def test_answers_are_the_same_alone_and_in_a_batch(served: Served):
    prompts = served.prompts()
    alone = [served.answer(prompt, seed) for seed, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(served.answer, prompts, range(len(prompts))))
    assert alone == together


def test_training_computes_the_servers_log_probs_in_every_packing(served: Served):
    """Also those of samples from the most probable tokens, whose log-probabilities are of the whole vocabulary."""
    prompts = served.prompts()
    truncated = {"top_p": 0.9, "top_k": 20}
    with ThreadPoolExecutor(len(prompts)) as threads:
        asked = [threads.submit(served.answer, *it, **(truncated if it[1] % 3 else {})) for it in zip(prompts, count())]
        answers = [one.result() for one in asked]
    samples = [(prompt, tokens) for prompt, (tokens, _) in zip(prompts, answers, strict=True)]
    expected = [log_probs for _, log_probs in answers]
    for layout in (BY_NAME[name] for name in served.layouts):
        args = flags(served.toy, layout, "--true-on-policy-mode")
        args.rollout_temperature, args.log_probs_chunk_size, args.keep_logits = TEMPERATURE, -1, False
        args.data_pad_size_multiplier = 8
        with RankPool(layout.ranks) as ranks:
            results = ranks.run(jobs.log_probs, args, served.folder, samples, PACKS, timeout_s=200)
        for packing in (packing for found in results for packing in found):
            assert packing == expected, layout.name
