"""Requests that span a weight update follow the old weights before it and the new after it, with no stale KV."""

from __future__ import annotations

import asyncio
import copy
import importlib.metadata
import time

import psutil
import pytest
import torch

from slimrl.engines.sglang.client import RouterClient
from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.server import ServerProcess
from slimrl.engines.sglang.versions import has_per_token_versions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not has_per_token_versions(importlib.metadata.version("sglang")),
        reason="SGLang before 0.5.19 does not report which weight version sampled which token: slimrl does not retract",
    ),
]
NEW_TOKENS = 400
PAUSE_S = 1.0


def test_requests_resume_with_new_weights_and_recomputed_kv_after_a_retraction(tmp_path, tiny_model):
    from transformers import AutoModelForCausalLM

    old = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    new = copy.deepcopy(old)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    new.save_pretrained(tmp_path / "new")
    prompts = [[3 + i, *range(10, 26)] for i in range(6)]
    server = ServerProcess(tiny_model, log_path=tmp_path / "log", options={"disable_radix_cache": True})
    server.start()
    try:
        server.wait_ready(120)
        answers = asyncio.run(generate_over_an_update(server, prompts, str(tmp_path / "new")))
    finally:
        server.stop()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.weight_version == "new" and len(answer.token_ids) == NEW_TOKENS
        follows_old, follows_new = (follows(model, prompt, answer) for model in (old, new))
        cut = int(follows_old.int().cumprod(0).sum())
        assert 0 < cut < NEW_TOKENS
        assert follows_new[cut:].all()
        (first, sampled_by_old), (second, sampled_by_new) = answer.version_spans  # exactly at that token
        assert (first, second) == ("default", "new") and sampled_by_old + sampled_by_new == NEW_TOKENS
        assert follows_old[:sampled_by_old].all() and follows_new[sampled_by_old:].all()


async def generate_over_an_update(server: ServerProcess, prompts: list[list[int]], folder: str):
    url = server.url
    async with RouterClient(url, [url], concurrency=8, request_timeout_s=60) as client:
        params = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
        tasks = [asyncio.create_task(client.generate(prompt, params)) for prompt in prompts]
        await asyncio.sleep(0.25)
        await asyncio.to_thread(update, server, folder)
        return await asyncio.gather(*tasks)


def update(server: ServerProcess, folder: str) -> None:
    control = ServerControl(server.url, timeout_s=60)
    with control.weight_update("new", running="retract"):
        before = cpu_seconds(server.pid)
        time.sleep(PAUSE_S)
        used = cpu_seconds(server.pid) - before
        control.update_weights_from_disk(folder)
    assert used < PAUSE_S / 4, f"a paused server used {used:.2f} s of a core in {PAUSE_S:g} s"


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its living descendants."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in [root, *root.children(recursive=True)]]
    return sum(time.user + time.system for time in times)


def follows(model, prompt, answer) -> torch.Tensor:
    """Per new token: whether its log-probability matches the model, [new tokens] bool."""
    with torch.no_grad():
        scores = model(torch.tensor([prompt + answer.token_ids])).logits[0].log_softmax(-1)
    rows = torch.arange(len(prompt) - 1, len(prompt) - 1 + len(answer.token_ids))
    return (scores[rows, torch.tensor(answer.token_ids)] - torch.tensor(answer.log_probs)).abs() < 1e-4
