"""Settings of the servers of --rm-model: a reward model gives embeddings, a teacher is a language model."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from slimrl.arguments import Arguments
from slimrl.arguments.hf_config import ServedModel
from slimrl.cluster.engines.engine import ServerSettings
from slimrl.cluster.engines.other_servers import RewardServers, server_settings
from slimrl.cluster.launch import Launch
from slimrl.cluster.placement import GpuBundles, plan_gpus
from slimrl.cluster.ray_session import ray_session
from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub import RewardScorer
from tests import accuracy


def settings_of(**flags: Any) -> ServerSettings:
    args = Arguments(rm_model="/models/32B", rm_num_gpus_per_engine=4, rollout_seed=42, **flags)
    launch = SimpleNamespace(machine=SimpleNamespace(cuda=True), bind="10.0.0.1")
    return server_settings(args, ServedModel("", "/models/32B", 4, 4), 1, cast("Any", launch))


@pytest.mark.parametrize(
    ("flags", "role", "more"),
    [
        ({"rm_type": "reward_model"}, "_reward", {"is_embedding": True}),
        ({"use_opd": True, "opd_type": "sglang"}, "_teacher", {}),
    ],
)
def test_role_decides_what_a_server_computes(flags: dict[str, Any], role: str, more: dict[str, Any]):
    options = {"api_key": "key", "mem_fraction_static": 0.8, "pp_size": 2}
    found = settings_of(rm_server_options=options, **flags)
    assert found.role == role and found.options == options | more
    assert (found.model_path, found.tensor_parallel_size, found.random_seed) == ("/models/32B", 2, 43)
    assert found.key == "key" and not found.memory_saver


def test_addresses_of_started_servers_become_the_address_of_the_model():
    engines = cast("Any", [SimpleNamespace(url="http://10.0.0.1:1"), SimpleNamespace(url="http://10.0.0.2:2")])
    args = Arguments(rm_model="/models/32B", use_opd=True, opd_type="sglang")
    assert RewardServers(engines, "teacher").reachable(args).rm_url == "http://10.0.0.1:1,http://10.0.0.2:2"
    assert RewardServers([]).reachable(args) is args


def test_each_of_several_teachers_has_its_own_gpus_servers_and_addresses():
    args = Arguments(
        use_opd=True,
        opd_type="sglang",
        opd_teacher_models=["math=/models/32B", "code=/models/7B"],
        opd_teacher_num_gpus=[4, 2],
        opd_teacher_num_gpus_per_engine=[4, 1],
        actor_num_nodes=1,
        actor_num_gpus_per_node=2,
        rollout_num_gpus=2,
        colocate=True,
    )
    plan = plan_gpus(args)
    assert plan.reward_servers == (range(2, 6), range(6, 7), range(7, 8))
    assert plan.total == 8 and plan.reward == range(2, 8)
    engines = cast("Any", [SimpleNamespace(url=f"http://h:{port}") for port in (1, 2, 3)])
    servers = RewardServers(engines, "teacher", ("math", "code", "code"))
    assert servers.reachable(args).opd_teachers == {"math": "http://h:1", "code": "http://h:2,http://h:3"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_started_teachers_score_the_samples_of_their_datasets_like_transformers(tmp_path):
    from tests.megatron.tiny import VOCAB_SIZE, save_qwen3

    folders = {name: save_qwen3(tmp_path / name, seed=seed) for name, seed in (("math", 1), ("code", 2))}
    args = Arguments(
        use_opd=True,
        opd_type="sglang",
        opd_teacher_models=[f"{name}={folder}" for name, folder in folders.items()],
        run_dir=str(tmp_path / "run"),
        colocate=True,
        actor_num_nodes=1,
        actor_num_gpus_per_node=0,
        rollout_num_gpus=0,
    )
    draw = torch.Generator().manual_seed(4)
    samples = [
        Sample(
            prompt="p",
            index=index,
            tokens=torch.randint(VOCAB_SIZE - 1, (9 + index,), generator=draw).tolist(),
            response_length=5,
            metadata={"teacher": ("math", "code")[index % 2]},
        )
        for index in range(4)
    ]

    async def run() -> None:
        gpus = GpuBundles(plan_gpus(args))
        servers = await RewardServers.start(args, gpus, Launch.of_run(args))
        scorer = RewardScorer.from_args(servers.reachable(args))
        try:
            await asyncio.gather(*(scorer.score_tokens(one) for one in samples))
        finally:
            scorer.close()
            await servers.close()
            gpus.release()

    with ray_session(2):
        asyncio.run(run())
    worst = 0.0
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        for one in samples:
            ids = torch.tensor([one.tokens])
            with torch.no_grad():
                true = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[-5:, 0]
            gap = float((true - torch.tensor(one.teacher_log_probs, dtype=torch.float64)).abs().max())
            if one.metadata["teacher"] == name:
                worst = max(worst, gap)
            else:
                assert gap > 1e-2  # the other teacher would have given other values
    accuracy.below("output", worst, 1e-4)
