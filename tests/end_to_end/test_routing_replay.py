"""A run whose training takes the experts that the engine chose (--use-rollout-routing-replay)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from slimrl.data.sample import Sample
from slimrl.observability import rollout_dump
from tests.end_to_end import harness
from tests.end_to_end.conftest import ROOT, Tiny
from tests.tools.converting import run_tool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = 3


class TinyExperts(Tiny):
    """The toy of Qwen3-MoE, with the flags of its recipe."""

    def model_args(self) -> list[str]:
        script = f"source '{ROOT}/scripts/models/qwen3-30B-A3B.sh'; source '{ROOT}/scripts/lib/tiny/qwen3_moe.sh'"
        script += "; printf '%s\\n' \"${MODEL_ARGS[@]}\""
        return subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout.split()


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> TinyExperts:
    folder = tmp_path_factory.mktemp("experts")
    flags = ("--output-dir", folder / "toy", "--family", "qwen3_moe", "--warm-start-steps", "0", "--untie")
    done = run_tool("make_tiny_model.py", *flags, "--train-size", "64", "--eval-size", "8")
    assert done.returncode == 0, done.stderr
    made = TinyExperts(folder / "toy", folder / "home", folder / "toy" / "model")
    made.home.mkdir()
    return made


def run(experts: TinyExperts, folder: Path, **changes: object) -> tuple[harness.Finished, str]:
    folder.mkdir()
    dumps = str(folder / "dump" / "{rollout_id}.jsonl")
    flags = experts.flags(
        use_rollout_routing_replay=True,
        actor_num_gpus_per_node=1,
        rollout_num_gpus=1,
        num_rollout=STEPS,
        lr=3e-3,
        save_debug_rollout_data=dumps,
        **changes,
    )
    done = harness.start("train.py", flags, folder, "routing", experts.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    return done, dumps


def experts_of_transformers(folder: Path, sample: Sample) -> torch.Tensor:
    """Int64 [tokens, layers, experts per token]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([sample.tokens]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(model.config.num_experts_per_tok).indices for layer in logits], dim=1)


def test_samples_have_the_experts_of_the_engine_and_training_agrees_with_it(experts: TinyExperts, tmp_path: Path):
    done, dumps = run(experts, tmp_path / "run")
    assert max(done.steps("train_rollout_logprob_abs_diff_mean")) < 1e-5
    sample = rollout_dump.load_rollout(dumps, 0).samples[0]
    own = experts_of_transformers(experts.model, sample)[:-1].sort(-1).values
    assert torch.from_numpy(sample.rollout_routed_experts).long().sort(-1).values.equal(own)


def test_continued_samples_have_the_experts_of_all_their_tokens(experts: TinyExperts, tmp_path: Path):
    _, dumps = run(experts, tmp_path / "run", partial_rollout=True, over_sampling_batch_size=16)
    samples = [sample for number in range(STEPS) for sample in rollout_dump.load_rollout(dumps, number).samples]
    assert any(len(sample.version_spans) > 1 for sample in samples)
    assert all(len(sample.rollout_routed_experts) == len(sample.tokens) - 1 for sample in samples)


def other_experts(args: object, sample: Sample) -> None:
    """--rollout-sample-hook-path: the experts after those that the engine chose."""
    sample.rollout_routed_experts = (sample.rollout_routed_experts + 1) % args.num_experts


def test_training_follows_the_experts_of_the_samples(experts: TinyExperts, tmp_path: Path):
    hook = "tests.end_to_end.test_routing_replay.other_experts"
    done, _ = run(experts, tmp_path / "run", rollout_sample_hook_path=hook)
    assert min(done.steps("train_rollout_logprob_abs_diff_mean")) > 1e-3
