"""The flags of Baidu AIAK-RLHF: slimrl's flag for each, and the text of the page that lists them.

`ROWS` are rows of `foreign_flags`, by which the parser answers a word of this system. `AIAK` lists every flag of its
two programs, also those that slimrl or OpenRLHF has under the same name. `slimrl.arguments.docs` prints the page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

AIAK_RLHF = "AIAK-RLHF's"
Row = tuple[str, str | None, str]  # owner, slimrl's flag, clause

# AIAK-RLHF's names that OpenRLHF does not have
_AIAK_ROWS: dict[str, tuple[str | None, str]] = {
    "num-nodes": ("--actor-num-nodes", ""),
    "colocate-all": ("--colocate", "and --rm-colocate for the reward model"),
    "ref-reward-offload": (
        "--rm-colocate",
        "which keeps the reward model in host memory during training; the reference always is there",
    ),
    "max-samples": ("--prompt-data", "path@[0:N] for the first N rows"),
    "prompt-data-probs": ("--prompt-data", "path=probability for each path"),
    "dataset-probs": ("--prompt-data", "path=probability for each path"),
    "tensorboard": ("--tensorboard-dir", "with --use-tensorboard"),
    "prompt-key": ("--input-key", ""),
    "max-len": ("--rollout-max-context-len", ""),
}


@dataclasses.dataclass(frozen=True)
class AiakFlag:
    """A flag of AIAK-RLHF: the programs that have it, its default there, and how its meaning differs from slimrl's."""

    programs: str  # "rm", "ppo" or "rm ppo"
    default: str
    note: str = ""


_PROMPTS = "counts prompts, as there; with `--n-samples-per-prompt 1` also samples"
AIAK: dict[str, AiakFlag] = {
    "pretrain": AiakFlag("rm ppo", "bigscience/bloomz-1b7", "the reference is `--ref-load`, a critic `--critic-load`"),
    "reward-pretrain": AiakFlag("ppo", "", "with `--rm-type reward_model`"),
    "save-path": AiakFlag("rm ppo", "./ckpt", "checkpoints; `--save-hf` also exports Hugging Face folders"),
    "save-steps": AiakFlag("rm ppo", "-1", "without it only the last rollout is saved"),
    "eval-steps": AiakFlag("rm", "-1"),
    "logging-steps": AiakFlag("rm ppo", "1"),
    "tensorboard": AiakFlag("rm ppo", ""),
    "train-batch-size": AiakFlag("rm", "128"),
    "micro-train-batch-size": AiakFlag("rm ppo", "8", "a pair is two; or `--use-dynamic-batch-size`"),
    "micro-rollout-batch-size": AiakFlag("ppo", "8"),
    "rollout-batch-size": AiakFlag("ppo", "512", _PROMPTS),
    "max-samples": AiakFlag("ppo", "100000"),
    "max-epochs": AiakFlag("rm ppo", "1", "in `train_rm.py`: `--num-epoch`"),
    "max-len": AiakFlag("rm", "512", "cuts longer answers at their end, as there"),
    "prompt-max-len": AiakFlag("ppo", "1024", "AIAK cuts longer prompts: `--rollout-truncate-prompt`"),
    "generate-max-len": AiakFlag("ppo", "1024"),
    "zero-stage": AiakFlag(
        "rm ppo",
        "2",
        "3: `--data-parallel-sharding-strategy optim_grads_params`; with `--adam_offload` leave it out",
    ),
    "bf16": AiakFlag("rm ppo", "off", "the default follows the model's dtype"),
    "flash-attn": AiakFlag("rm ppo", "off"),
    "gradient-checkpointing": AiakFlag("rm ppo", "off"),
    "learning-rate": AiakFlag("rm", "1e-5"),
    "actor-learning-rate": AiakFlag("ppo", "1e-6"),
    "critic-learning-rate": AiakFlag("ppo", "9e-6"),
    "init-kl-coef": AiakFlag("ppo", "0.02", "needs `--ref-load`"),
    "normalize-reward": AiakFlag("ppo", "off", "by the moments of the run ([rewards.md](rewards.md))"),
    "dataset": AiakFlag("rm", "Dahoas/full-hh-rlh", "`tools/prepare_data.py preference` converts published sets"),
    "dataset-probs": AiakFlag("rm", "1.0"),
    "prompt-data": AiakFlag("ppo", "Dahoas/full-hh-rlh", "a file or folder instead of a name on the hub"),
    "prompt-data-probs": AiakFlag("ppo", "1.0"),
    "prompt-key": AiakFlag("rm", ""),
    "chosen-key": AiakFlag("rm", "", "belongs to training on pairs"),
    "rejected-key": AiakFlag("rm", "", "belongs to training on pairs"),
    "input-key": AiakFlag("ppo", "", "the default is `input`"),
    "input-template": AiakFlag("ppo", "Human: {}\\nAssistant:", "without default: a row's text is the prompt"),
    "apply-chat-template": AiakFlag("rm ppo", "off"),
    "num-nodes": AiakFlag("ppo", ""),
    "num-gpus-per-node": AiakFlag("ppo", "", "GPUs of a node; those of training are `--actor-num-gpus-per-node`"),
    "colocate-all": AiakFlag("ppo", "on"),
    "ref-reward-offload": AiakFlag("ppo", "off"),
    "adam-offload": AiakFlag("ppo", "off", "needs `--use-precision-aware-optimizer`"),
    "vllm-num-engines": AiakFlag("ppo", "", "with `--colocate` the engines use all training GPUs: leave it out"),
    "vllm-tensor-parallel-size": AiakFlag("ppo", ""),
    "vllm-gpu-memory-utilization": AiakFlag("ppo", "0.9"),
}

ROWS: dict[str, Row] = {name: (AIAK_RLHF, *row) for name, row in _AIAK_ROWS.items()}


def table(rows: Sequence[tuple[str, str]]) -> str:
    """A Markdown table; the first row is its head."""
    lines = [f"| {left} | {right} |" for left, right in rows]
    return "\n".join([lines[0], "| --- | --- |", *lines[1:]])


_AIAK_DIFFERENCES = (
    ("AIAK-RLHF", "slimrl"),
    (
        "`train_ppo_ray_optim.py`",
        "`train.py --advantage-estimator ppo`; without a critic any other estimator "
        "([algorithms.md](algorithms.md#advantages))",
    ),
    (
        "`train_rm.py`",
        "`train.py --loss-type reward_model_loss` on pairs or scores ([reward-models.md](reward-models.md))",
    ),
    (
        "`--colocate_all`, `--ref_reward_offload`",
        "`--colocate --rm-colocate`: policy, critic, reference, engines and reward model on the same "
        "GPUs, each offloaded while another works; the reference is always in host memory between its "
        "passes ([colocation.md](colocation.md))",
    ),
    (
        "`--zero_stage 3` and `--adam_offload` together",
        "one of the two: `--optimizer-cpu-offload --use-precision-aware-optimizer` with the distributed optimizer, and "
        "`--tensor-model-parallel-size` if the weights do not fit; or `--use-megatron-fsdp "
        "--data-parallel-sharding-strategy optim_grads_params`, whose state stays on the GPUs "
        "([sharding.md](sharding.md))",
    ),
    ("Llama-2", "`scripts/models/llama2-7B.sh`, `llama2-13B.sh`, `llama2-70B.sh`"),
    (
        "`--normalize_reward`",
        "the same flag: mean and standard deviation over the rewards of the run "
        "([rewards.md](rewards.md#normalization-over-the-run))",
    ),
    (
        "prompts above `--prompt_max_len` are cut",
        "they are skipped, or cut with `--rollout-truncate-prompt` ([data.md](data.md#long-prompts))",
    ),
    (
        "`Human: {}` around a prompt by default",
        "`--input-template`, and `--rm-input-template` for the reward model; no default",
    ),
    ("several data sets with probabilities", "`--prompt-data a.jsonl=0.7 b.jsonl=0.3` ([data.md](data.md))"),
    (
        "a PyTorchJob with its ConfigMap",
        "`tools/launch.py pytorchjob` writes both from a recipe ([launch-pytorchjob.md](launch-pytorchjob.md))",
    ),
    (
        "workers try 300 times, once a second, to join Ray's head",
        "once a second for `RAY_JOIN_TIMEOUT_S` (600 s; 1800 s in job files), and again after the loss of a head",
    ),
)
AIAK_PAGE = f"""\
# Coming from Baidu AIAK-RLHF

AIAK-RLHF trains reward models (`train_rm.py`) and PPO with every model on every GPU (`train_ppo_ray_optim.py`), on
OpenRLHF with DeepSpeed and vLLM. slimrl trains with Megatron-core and generates with SGLang or vLLM. This page is
generated from the table that the parser uses: `python -m slimrl.arguments.docs aiak > docs/coming-from-aiak-rlhf.md`.

## What is different

{table(_AIAK_DIFFERENCES)}

## Flags

Every flag of the two programs, with its default there. The last column is the answer of the command line: *accepted*,
or the error, which comes before anything starts. Most names are OpenRLHF's, and the error says so.

"""
