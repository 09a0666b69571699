"""Random models of a known shape: flags from scripts/models, a trainer without a checkpoint, a folder with config.json.

Downloads nothing and writes no weights. Used by the checks of training and of the engine.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slimrl.arguments import Arguments, read_args
from slimrl.data.batch_schedule import schedule_batch
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.training.trainer import MegatronTrainer
from tools.gpu_check.machine import ROOT

ONE_RANK = ["--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1", "--num-rollout", "100",
            "--num-steps-per-rollout", "1", "--lr-decay-style", "constant"]  # fmt: skip


def model_flags(name: str) -> list[str]:
    """MODEL_ARGS of scripts/models/<name>.sh, as bash reads them."""
    script = f"source '{ROOT}/scripts/models/{name}.sh'; printf '%s\\n' \"${{MODEL_ARGS[@]}}\""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split()


def arguments(model: str, *flags: str) -> Arguments:
    """The validated flags of one training rank. Raises ValueError for incompatible flags."""
    args, problems = read_args([*model_flags(model), *ONE_RANK, *flags], entry="convert_hf_to_torch_dist.py")
    if wrong := [problem for problem in problems if problem.flag not in ("--hf-checkpoint", "--save")]:
        raise ValueError("; ".join(map(str, wrong)))
    return args


class RandomTrainer(MegatronTrainer):
    """A trainer of one rank with random weights that are never loaded."""

    def __init__(self, args: Arguments) -> None:
        self.args = args
        super().__init__(args, rank=0, world_size=1, local_rank=0, init_method=torch.distributed.HashStore())

    def _load_weights(self) -> tuple[None, None]:
        return None, None


def scheduled(args: Arguments, rollout: RolloutBatch) -> RolloutBatch:
    """The rollout cut into micro-batches for one rank and one optimizer step."""
    (share,) = schedule_batch(
        rollout,
        data_parallel_size=1,
        context_parallel_size=1,
        micro_batch_group=1,
        global_batch_size=len(rollout),
        micro_batch_size=args.micro_batch_size,
        max_tokens_per_micro_batch=args.max_tokens_per_gpu if args.use_dynamic_batch_size else None,
        balance=False,
    )
    return share


def rollout_of(
    tokens: Sequence[Sequence[int]], prompt_length: int, log_probs: Sequence[Sequence[float]]
) -> RolloutBatch:
    """Samples with equal prompt lengths; rewards alternate, so that advantages are not zero."""
    samples = len(tokens)
    total = torch.tensor([len(one) for one in tokens])
    rewards = torch.tensor([1.0 if number % 2 else -1.0 for number in range(samples)])
    flat = torch.tensor([value for one in log_probs for value in one], dtype=torch.float32)
    return RolloutBatch(
        tokens=torch.tensor([token for one in tokens for token in one]),
        total_lengths=total,
        response_lengths=total - prompt_length,
        loss_mask=torch.ones_like(flat),
        rollout_log_probs=flat,
        raw_rewards=rewards,
        rewards=rewards,
        group_ids=torch.zeros(samples, dtype=torch.int64),
        sample_ids=torch.arange(samples),
        truncated=torch.zeros(samples, dtype=torch.bool),
    )


def hf_config(args: Arguments) -> dict[str, Any]:
    """config.json of the Qwen3 model of these flags."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": args.vocab_size,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.ffn_hidden_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.num_attention_heads,
        "num_key_value_heads": args.num_query_groups,
        "head_dim": args.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": args.max_position_embeddings,
        "rms_norm_eps": args.norm_epsilon,
        "rope_theta": args.rotary_base,
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        "attention_bias": False,
        "dtype": "bfloat16" if args.bf16 else "float32",
        "torch_dtype": "bfloat16" if args.bf16 else "float32",
        "eos_token_id": 0,
    }


def save_config(args: Arguments, folder: Path) -> Path:
    """A folder with config.json only: SGLang generates random weights (`load_format` "dummy")."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(args)))
    return folder
