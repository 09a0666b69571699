"""The texts of the pages for users of AIAK-RLHF and ChatLearn, to which `slimrl.arguments.docs` adds the tables."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[tuple[str, str]]) -> str:
    """A Markdown table; the first row is its head."""
    lines = [f"| {left} | {right} |" for left, right in rows]
    return "\n".join([lines[0], "| --- | --- |", *lines[1:]])


_AIAK_DIFFERENCES = (
    (
        "AIAK-RLHF",
        "slimrl",
    ),
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
    (
        "Llama-2",
        "`scripts/models/llama2-7B.sh`, `llama2-13B.sh`, `llama2-70B.sh`",
    ),
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
    (
        "several data sets with probabilities",
        "`--prompt-data a.jsonl=0.7 b.jsonl=0.3` ([data.md](data.md))",
    ),
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
_CHATLEARN_DIFFERENCES = (
    (
        "ChatLearn",
        "slimrl",
    ),
    (
        "`examples/fsdp/scripts/train_grpo_qwen3.sh`",
        "`scripts/run-qwen3-8B-math-fsdp.sh`: the same model, data, batch sizes and rewards, with Megatron-FSDP",
    ),
    (
        "`examples/megatron/configs/llama2/rlhf.yaml`: PPO with `policy`, `reference`, `reward`, `value`, "
        "`ppo_policy`, `ppo_value`",
        "`--advantage-estimator ppo` with `--ref-load`, `--rm-type reward_model --rm-model` and `--critic-load`; "
        "`value` and `ppo_value` are one critic ([algorithms.md](algorithms.md#ppo))",
    ),
    (
        "FSDP (`train_backend: fsdp`) or Megatron-core",
        "Megatron-core, with its FSDP by `--use-megatron-fsdp` ([sharding.md](sharding.md))",
    ),
    (
        "vLLM or SGLang",
        "`--rollout-engine sglang` (default) or `vllm`, behind SGLang's router ([engines.md](engines.md))",
    ),
    (
        "models as a graph: `Engine`, `Environment`, `Trainer`, `Evaluator` with `env_flow` and `trainer_flow`",
        "a loop in Python over the verbs of a run: `examples/flow.py`, `train.py` ([hooks.md](hooks.md))",
    ),
    (
        "`colocation: [policy,policy_trainer,ref_policy]`",
        "`--colocate` ([colocation.md](colocation.md))",
    ),
    (
        "`rule_reward.py`",
        "`--rm-type math`, or a function with `--custom-rm-path` ([rewards.md](rewards.md))",
    ),
    (
        "`math_lighteval.py`",
        "`python tools/prepare_data.py MATH-lighteval` ([data.md](data.md#published-sets))",
    ),
    (
        "dynamic batch size and sequence packing",
        "always packed; `--use-dynamic-batch-size --max-tokens-per-gpu N --balance-data` ([packing.md](packing.md))",
    ),
    (
        "Ulysses sequence parallelism",
        "`--context-parallel-size`, and `--tensor-model-parallel-size` with `--sequence-parallel` "
        "([parallelism.md](parallelism.md))",
    ),
    (
        "partial rollout",
        "`--partial-rollout` ([rollouts.md](rollouts.md))",
    ),
    (
        "asynchronous schedule",
        "`train_async.py` ([asynchrony.md](asynchrony.md))",
    ),
    (
        "`save_model/policy_trainer/<n>/huggingface` for serving",
        "`--save-hf` ([serving.md](serving.md))",
    ),
    (
        "a job on PAI-DLC that is shown as failed after its training is complete: `ray.exceptions.RpcError: Timed out "
        "while waiting for GCS to become available.`",
        "no such end: the head's node tells the others how the run ended before its Ray ends; they exit with code 0, "
        "and the recipe on the head's node with that of training "
        "([launchers.md](launchers.md#a-lost-run-starts-again))",
    ),
)
CHATLEARN_PAGE = f"""\
# Coming from PAI-ChatLearn

ChatLearn reads a YAML file with one part per model (`models.policy`, `models.policy_trainer`, ...) and one for the run,
and overrides `part.key=value`; slimrl has one list of flags. Written on slimrl's command line, a key of ChatLearn is
answered with the flag to use. This page is generated from the table that the parser uses:
`python -m slimrl.arguments.docs chatlearn > docs/coming-from-pai-chatlearn.md`.

## What is different

{table(_CHATLEARN_DIFFERENCES)}

## Keys

The keys of `runtime_args` are also those of `runtime` and `rlhf`, as older files say. The last column completes the
error that the command line gives for a key; for a key without a row it says that there is none.

"""
