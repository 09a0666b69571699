"""A reward model on GPUs: behaviour that the CPU cannot show. Needs one GPU or more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slimrl.arguments import Arguments
from slimrl.cluster.engines.other_servers import RewardServers
from slimrl.cluster.launch import Launch
from slimrl.cluster.placement import GpuBundles, PlacementPlan
from slimrl.cluster.ray_session import ray_session
from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub import RewardConfig, RewardScorer
from tests.gpu.conftest import needs
from tests.reward_models import logits, write_reward_model
from tests.rollout.conftest import tokenizer  # noqa: F401 - the fixture

pytestmark = [pytest.mark.slow, needs("ray", "sglang")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=needs(gpus=2))])
def test_bf16_gpu_servers_give_transformers_logits(count: int, tmp_path: Path, tokenizer: Any):  # noqa: F811
    model = write_reward_model(tmp_path / "judge", tokenizer, "Qwen3")
    args = Arguments(
        rm_type="reward_model",
        rm_model=str(model),
        hf_checkpoint=str(model),
        run_dir=str(tmp_path / "run"),
        rm_server_options={"dtype": "bfloat16", "mem_fraction_static": 0.2, "attention_backend": "triton"},
    )
    samples = [Sample(prompt=f"{i}+{i}=", index=i, response=f"it is {'very ' * i}clear: {2 * i}") for i in range(8)]
    read = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": one.prompt}, {"role": "assistant", "content": one.response}], return_dict=False
        )
        for one in samples
    ]

    async def run() -> list[float]:
        gpus = GpuBundles(PlacementPlan(count, range(0), range(0), 1, tuple(range(at, at + 1) for at in range(count))))
        servers = await RewardServers.start(args, gpus, Launch.of_run(args))
        scorer = RewardScorer.from_args(servers.reachable(args))
        try:
            return await asyncio.gather(*(scorer.score(one, RewardConfig(None, "reward_model")) for one in samples))
        finally:
            scorer.close()
            await servers.close()
            gpus.release()

    with ray_session(count):
        rewards = asyncio.run(run())
    expected = logits(model, read)
    assert rewards == pytest.approx(expected, abs=0.03 * (max(expected) - min(expected)))
