"""Memory of policy, critic, reference and reward model on one GPU beside the plan: the table of docs/memory.md.

    OMP_NUM_THREADS=1 python benchmarks/role_memory.py [--hidden-size 768] [--layers 8]

Runs a PPO step with the real trainer and SGLang: TP 2, a reference model (`--kl-coef`), a critic, two servers and a
reward model of the policy's size that shares their GPUs (`--rm-colocate`). Prints planned and measured MiB of rank 0
and of the reward model's server, and their ratio. Baseline: the plan (`--dry-run`), which is exact for weights,
gradients and optimizer state; host models are allocated in chunks of 64 MiB, and activations without a GPU have no
fused kernels (docs/memory.md). Takes two minutes on 2 cores and 12 GiB.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.faults import prepared  # noqa: E402
from slimrl.arguments import read_args  # noqa: E402
from slimrl.arguments.dry_run import Machine, PlanContext, make_plan  # noqa: E402
from slimrl.engines.sglang.server_args import server_flags  # noqa: E402
from tests.end_to_end import harness  # noqa: E402

MIB = 2**20
KINDS = {
    "parameters": "policy: parameters",
    "gradients": "policy: gradients",
    "optimizer": "policy: optimizer state",
    "critic": "critic: weights and optimizer state",
    "critic_gradients": "critic: gradients",
    "host_models": "reference, and room for the policy, in host memory",
    "activations": "activations of the largest micro-batch",
}


def write_reward_model(policy: Path, folder: Path) -> None:
    """A classifier with one label of the policy's sizes, with random weights in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    config = AutoConfig.from_pretrained(policy, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sizes(hidden: int, layers: int) -> list[object]:
    """Options of make_tiny_model.py for an untrained model of this width and depth."""
    width = ["--hidden-size", hidden, "--ffn-hidden-size", 8 * hidden // 3, "--num-layers", layers]
    heads = ["--num-attention-heads", hidden // 64, "--num-query-groups", hidden // 128, "--kv-channels", 64]
    return ["--warm-start-steps", 0, *width, *heads]


def planned_reward_model(flags: list[str]) -> int:
    """Bytes of the reward model's weights on one GPU, by the plan."""
    args, problems = read_args(flags, entry="train.py", passthrough={"sglang": server_flags})
    assert problems == [], problems
    return make_plan(args, "train.py", PlanContext(Machine(gpus=(), host=None))).reward_weights[0]


def measured_reward_model(run_dir: Path) -> float:
    """Bytes of the weights that the reward model's server logs."""
    log = (run_dir / "logs/sglang_reward0.log").read_text()
    (gib,) = re.findall(r"Load weight end.*mem usage=([0-9.]+) GB", log)
    return float(gib) * 2**30


def main() -> None:
    """Runs, and prints one line for each kind of memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    own = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slimrl-memory-") as name:
        folder = Path(name)
        tiny = prepared(folder, *sizes(own.hidden_size, own.layers))
        write_reward_model(tiny.model, folder / "reward")
        flags = tiny.flags(
            advantage_estimator="ppo",
            use_kl_loss=None,
            kl_loss_coef=None,
            kl_coef=0.01,
            rm_type="reward_model",
            rm_model=folder / "reward",
            rm_colocate=True,
            colocate=True,
            actor_num_gpus_per_node=2,
            tensor_model_parallel_size=2,
            rollout_num_gpus_per_engine=1,
            num_rollout=1,
            rollout_batch_size=4,
        )
        done = harness.start("train.py", flags, folder, "memory", tiny.home).finish(1200)
        if done.code != 0:
            raise SystemExit(done.output[-4000:])
        steps = json.loads((done.run_dir / "summary.json").read_text())["steps"]
        found = {key: value for step in steps for key, value in step.items() if "memory_" in key}
        rows = {
            title: (found[f"planned_memory_{kind}"], found[f"memory_{kind}"])
            for kind, title in KINDS.items()
            if f"memory_{kind}" in found
        }
        rows["reward model: weights, as its server logs them"] = (
            planned_reward_model(flags),
            measured_reward_model(done.run_dir),
        )
    print("| on one GPU (rank, server) | planned, MiB | measured, MiB | ratio |", "| --- | --- | --- | --- |", sep="\n")
    for title, (planned, measured) in rows.items():
        print(f"| {title} | {planned / MIB:.1f} | {measured / MIB:.1f} | {measured / planned:.2f} |")


if __name__ == "__main__":
    main()
