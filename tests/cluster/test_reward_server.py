"""A reward model behind real SGLang servers on separate GPUs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from slimrl.arguments import Arguments
from slimrl.cluster.engines.frozen_models import FrozenRecovery
from slimrl.cluster.engines.health_monitor import HealthConfig
from slimrl.cluster.engines.other_servers import RewardServers
from slimrl.cluster.launch import Launch
from slimrl.cluster.placement import GpuBundles, PlacementPlan
from slimrl.cluster.ray_session import ray_session
from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub import RewardConfig, RewardScorer
from slimrl.rollout.rm_hub.remote import RemoteRefused
from tests import accuracy
from tests.reward_models import (
    logits,
    token_logits,
    two_layer_logits,
    write_process_reward_model,
    write_reward_model,
)
from tests.rollout.conftest import tokenizer  # noqa: F401 - the fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
REWARD = RewardConfig(None, "reward_model")
Ended = TypeVar("Ended")


def sample(index: int, question: str, response: str) -> Sample:
    return Sample(prompt=question, index=index, response=response, metadata={})


def kill_server(log_dir) -> None:
    """Kills the server as an out-of-memory killer would."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "--is-embedding" in line and str(log_dir) in line:
            process.kill()


def conversation(one: Sample) -> list[dict[str, str]]:
    return [{"role": "user", "content": one.prompt}, {"role": "assistant", "content": one.response}]


def served(
    folder: Path,
    tokenizer: Any,  # noqa: F811
    family: str,
    then: Callable[[RewardServers, RewardScorer, list[Sample]], Awaitable[Ended]],
    **flags: Any,
) -> tuple[list[float], Ended]:
    """Rewards of six samples, which are compared with transformers' logits, and the result of `then`."""
    # shards with an index: SGLang loads only the files that an index names
    model = write_reward_model(folder / "judge", tokenizer, family, shard_size="100KB")
    args = Arguments(
        rm_type="reward_model",
        rm_model=str(model),
        hf_checkpoint=str(model),
        run_dir=str(folder / "run"),
        rm_concurrency=2,
        **flags,
    )
    samples = [sample(i, f"{i}+{i}=", f"it is {'very ' * i}clear: {2 * i}") for i in range(6)]
    read = [tokenizer.apply_chat_template(conversation(one), return_dict=False) for one in samples]
    assert len({len(row) for row in read}) == 6 and tokenizer.decode(read[0]).endswith("<|im_end|>\n")

    async def run() -> tuple[list[float], Ended]:
        gpus = GpuBundles(PlacementPlan(1, range(0), range(0), 1, (range(1),)))
        servers = await RewardServers.start(args, gpus, Launch.of_run(args))
        scorer = RewardScorer.from_args(servers.reachable(args))
        try:
            rewards = await asyncio.gather(*(scorer.score(one, REWARD) for one in samples))
            return rewards, await then(servers, scorer, samples)
        finally:
            scorer.close()
            if servers.recovery is not None:
                await servers.recovery.close()
            await servers.close()
            gpus.release()

    with ray_session(1):
        rewards, end = asyncio.run(run())
    accuracy.near_outputs(rewards, logits(model, read), abs=1e-5)
    assert max(rewards) - min(rewards) > 0.5  # weights for which any comparison would succeed
    return rewards, end


def test_rewards_match_transformers_logits_and_a_dead_server_is_named(tmp_path, tokenizer):  # noqa: F811
    async def die(servers: RewardServers, scorer: RewardScorer, samples: list[Sample]) -> str:
        watch = asyncio.ensure_future(servers.watch(asyncio.Event().wait()))
        with pytest.raises(RemoteRefused, match="is longer than the model's context length"):
            await scorer.score(sample(9, "1+1=", "x" * 2000), REWARD)
        assert not watch.done()
        assert set(await servers.memory()) == {"server_reward0_rss_gib", "server_reward0_actor_rss_gib"}
        kill_server(tmp_path)
        return await asyncio.wait_for(watch, 20)

    _, death = served(tmp_path, tokenizer, "Qwen2", die)
    assert death.startswith("the reward model's server 0 has ended, responses cannot be scored: SGLang server _reward0")


def test_rewards_of_a_model_with_experts_match_transformers_logits(tmp_path, tokenizer):  # noqa: F811
    """SGLang has no such classifier."""

    async def nothing(servers: RewardServers, scorer: RewardScorer, samples: list[Sample]) -> None:
        return None

    served(tmp_path, tokenizer, "Qwen3Moe", nothing)


def test_rewards_after_the_death_of_a_server_are_those_of_its_replacement(tmp_path, tokenizer):  # noqa: F811
    """Requests for the only server wait for it, at its address."""
    lines: list[str] = []

    async def recover(servers: RewardServers, scorer: RewardScorer, samples: list[Sample]) -> list[float]:
        servers.recovery = FrozenRecovery(HealthConfig(30.0, 30.0, 0.0), servers, servers.gpu_memory, lines.append)
        watch = asyncio.ensure_future(servers.watch(asyncio.Event().wait()))
        url = servers.engines[0].url
        kill_server(tmp_path)
        again = await asyncio.wait_for(asyncio.gather(*(scorer.score(one, REWARD) for one in samples)), 200)
        assert servers.engines[0].url == url and not watch.done()
        assert set(await servers.memory()) == {"server_reward0_rss_gib", "server_reward0_actor_rss_gib"}
        assert servers.recovery.take_metrics()["rollout/faults/servers_replaced"] == 1
        return again

    rewards, again = served(tmp_path, tokenizer, "Llama", recover, use_fault_tolerance=True)
    accuracy.near_outputs(again, rewards, abs=1e-5)
    died, back = lines
    assert "SGLang server _reward0 (http" in died and "; a replacement will be started" in died
    assert back.startswith("SGLang server _reward0.1 (http") and back.endswith(" started and serves")


@pytest.mark.parametrize("kind", ["token classifier", "head of two layers"])
def test_rewards_of_steps_are_those_of_a_token_classifier_in_one_pass(kind, tmp_path, tokenizer):  # noqa: F811
    """The probability of the second label at each marker, from transformers' model over the whole text."""
    if kind == "token classifier":
        model = write_reward_model(tmp_path / "prm", tokenizer, "Qwen3", head="TokenClassification", labels=2)
        outputs_of = token_logits
    else:
        model, outputs_of = write_process_reward_model(tmp_path / "prm", tokenizer), two_layer_logits
    args = Arguments(
        rm_type="zero",
        rm_model=str(model),
        hf_checkpoint=str(model),
        run_dir=str(tmp_path / "run"),
        rm_step_separator="\n\n",
        rm_step_marker=" so",
    )
    texts = [["so it is", "then it is 4"], ["one", "two of them", "three"], ["only one"]]
    samples, rows, marks = [], [], []
    for index, steps in enumerate(texts):
        prompt, response = tokenizer(f"{index}+{index}=")["input_ids"], "\n\n".join(steps) + "\n\n" * (index == 1)
        ids = tokenizer(response)["input_ids"]
        samples.append(
            Sample(
                prompt=f"{index}+{index}=",
                index=index,
                tokens=[*prompt, *ids],
                response=response,
                response_length=len(ids),
                metadata={},
            )
        )
        row = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{index}+{index}="}], add_generation_prompt=True, return_dict=False
        )
        ends = []
        for step in steps:
            row = [*row, *tokenizer(step)["input_ids"], *tokenizer(" so")["input_ids"]]
            ends.append(len(row) - 1)
        rows.append(row)
        marks.append(ends)

    async def run() -> None:
        gpus = GpuBundles(PlacementPlan(1, range(0), range(0), 1, (range(1),)))
        servers = await RewardServers.start(args, gpus, Launch.of_run(args))
        scorer = RewardScorer.from_args(servers.reachable(args))
        try:
            await asyncio.gather(*(scorer.score_tokens(one) for one in samples))
        finally:
            scorer.close()
            await servers.close()
            gpus.release()

    with ray_session(1):
        asyncio.run(run())
    found = [reward for one in samples for reward in one.metadata["step_rewards"]]
    expected = []
    for row, ends in zip(rows, marks, strict=True):
        outputs = outputs_of(model, row)
        expected += [1 / (1 + math.exp(outputs[end][0] - outputs[end][1])) for end in ends]
    accuracy.near_outputs(found, expected, abs=1e-5)
    assert max(found) - min(found) > 0.05
    for one, steps in zip(samples, texts, strict=True):
        assert [value for value in one.token_rewards if value] == one.metadata["step_rewards"] and len(steps) == sum(
            value != 0 for value in one.token_rewards
        )
