"""Command lines as users of slime have them, as data: what each recipe asks for, in its own flags.

`{data}` is a folder with the model, its reference checkpoint and the datasets. `refused` names the flags that slimrl
rejects with an error instead of running; all other flags must be accepted unchanged. `instead` are the flags that these
errors say to give.
"""

from __future__ import annotations

import dataclasses

CKPT = """--hf-checkpoint {data}/hf --ref-load {data}/torch_dist --load {data}/slimrl --save {data}/slimrl
 --save-interval 20"""
MATH = """--prompt-data {data}/dapo-math-17k.jsonl --input-key prompt --label-key label --apply-chat-template
 --rollout-shuffle --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
 --rollout-max-response-len 8192 --rollout-temperature 1 --global-batch-size 256 --balance-data"""
DAPO = """--over-sampling-batch-size 64
 --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"""
EVAL = """--eval-interval 20 --eval-prompt-data aime {data}/aime-2024.jsonl --n-samples-per-eval-prompt 16
 --eval-max-response-len 16384 --eval-top-p 1"""
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
GRPO = """--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
 --eps-clip 0.2 --eps-clip-high 0.28"""
GSPO = """--advantage-estimator gspo --kl-loss-coef 0.00 --kl-loss-type low_var_kl --kl-coef 0.00 --entropy-coef 0.00
 --eps-clip 4e-4"""
ADAM = """--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9
 --adam-beta2 0.98"""
OFFLOADED_ADAM = f"{ADAM} --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"
MISC = """--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
 --attention-softmax-in-fp32 --attention-backend flash"""
DEEPEP = "--moe-enable-deepep --moe-token-dispatcher-type flex"
ONE_NODE = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate"

OPD_IN_RANKS = f"""--advantage-estimator grpo --use-opd --opd-type megatron --opd-kl-coef 1.0
 --opd-teacher-load {{data}}/torch_dist --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
 {ADAM} {MISC} {ONE_NODE} --make-vocab-size-divisible-by 128 --rollout-num-gpus-per-engine 1
 --sglang-mem-fraction-static 0.4"""


PPO = """--advantage-estimator ppo --kl-loss-coef 0.00 --kl-loss-type k1 --kl-coef 0.00 --entropy-coef 0.00
 --eps-clip 4e-4 --num-critic-only-steps 1 --normalize-advantages"""
ROLES = """megatron:
- {name: default, role: critic, overrides: {lr: 1e-5}}
- {name: default, role: actor, overrides: {lr: 1e-6}}
"""
# files of --sglang-config, by name
GROUPS = {
    "sizes": """sglang:
  - name: default
    num_gpus_per_engine: 2
    server_groups:
      - {worker_type: regular, num_gpus: 2, overrides: {mem_fraction_static: 0.85, chunked-prefill-size: 4096}}
      - {worker_type: regular, num_gpus: 3, num_gpus_per_engine: 1, overrides: {enable_torch_compile: false}}
      - {worker_type: placeholder, num_gpus: 1}
""",
    "models": """sglang:
  - name: actor
    update_weights: true
    server_groups: [{worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2}]
  - name: ref
    update_weights: false
    engine_groups: [{worker_type: regular, num_gpus: 2, overrides: {fp8_gemm_runner_backend: triton}}]
  - name: reward
    model_path: DATA/hf2
    server_groups: [{worker_type: regular, num_gpus: 2, overrides: {model_path: DATA/hf2, lora_strict_loading: false}}]
""",
    "disaggregated": """sglang:
  - name: default
    server_groups:
      - {worker_type: prefill, num_gpus: 4, num_gpus_per_engine: 2, overrides: {chunked_prefill_size: 8192}}
      - {worker_type: decode, num_gpus: 2, num_gpus_per_engine: 1, overrides: {mem_fraction_static: 0.88}}
""",
    "teachers": """sglang:
  - name: student
    update_weights: true
    server_groups: [{worker_type: regular, num_gpus: 2, num_gpus_per_engine: 1}]
  - {name: dapo-math-17k, model_path: DATA/hf2, update_weights: false, server_groups: [{num_gpus: 1}]}
  - {name: tool, model_path: DATA/hf2, update_weights: false, server_groups: [{worker_type: regular, num_gpus: 1}]}
""",
}


def layout(tp: int, pp: int, cp: int, ep: int, tokens: int) -> str:
    """The parallel sizes and the packing that every recipe spells out."""
    return (
        f"--tensor-model-parallel-size {tp} --sequence-parallel --pipeline-model-parallel-size {pp}"
        f" --context-parallel-size {cp} --expert-model-parallel-size {ep} --expert-tensor-parallel-size 1 {RECOMPUTE}"
        f" --use-dynamic-batch-size --max-tokens-per-gpu {tokens}"
    )


# of slime's two scripts for geo3k, which source the script of a model of text
GEO3K = f"""--hf-checkpoint {{data}}/hf --load {{data}}/hf --rotary-base 5000000 --apply-chat-template --rollout-shuffle
 {layout(4, 1, 1, 1, 4096)} {MISC} --train-backend megatron --megatron-to-hf-mode bridge --actor-num-nodes 1
 --actor-num-gpus-per-node 8 --multimodal-keys {{{{"image":"images"}}}}"""
NOT_OF_TEXT = ("--position-embedding-type", "--mrope-section", "--recompute-granularity", "--megatron-to-hf-mode")
WITH_IMAGES = "--position-embedding-type mrope --mrope-section 24 20 20 --recompute-granularity selective"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One launch script: the model's script, its flags, the program, the unsupported flags and what replaces them."""

    model: str
    flags: str
    entry: str = "train.py"
    refused: tuple[str, ...] = ()
    instead: str = ""
    beside: tuple[str, ...] = ()  # flags that belong to refused ones, and are left out with them
    decoder: str | None = None  # the model script that it sources, if that is of a model of text


RECIPES: dict[str, Recipe] = {
    "quick start of a blog, with context parallelism": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {ADAM} {ONE_NODE} --rotary-base 1000000
 --global-batch-size 128 --rollout-batch-size 16 --num-steps-per-rollout 1 --rollout-temperature 0.8
 --eval-interval 5 --eval-top-p 0.7 --tensor-model-parallel-size 2 --sequence-parallel
 --pipeline-model-parallel-size 1 --context-parallel-size 2 {RECOMPUTE} --use-dynamic-batch-size
 --max-tokens-per-gpu 4608 --rollout-num-gpus-per-engine 2""",
    ),
    "manual: dynamic sampling, partial rollouts and a single evaluation path": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {GRPO} {ADAM} {DAPO} {ONE_NODE} {layout(2, 1, 1, 1, 9216)}
 --eval-interval 5 --eval-prompt-data {{data}}/aime-2024.jsonl --n-samples-per-eval-prompt 16
 --eval-max-response-len 16384 --eval-top-p 0.7 --partial-rollout
 --buffer-filter-path slime.rollout.filter_hub.buffer_filters.pop_first --rollout-num-gpus-per-engine 2
 --sglang-mem-fraction-static 0.7 --sglang-server-concurrency 160 --sglang-log-level INFO
 --sglang-cuda-graph-bs 1 2 4 8 16 24 32 40 48 56 64""",
    ),
    "manual: split into 2 training and 6 generating GPUs": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {ADAM} {MISC} {layout(2, 1, 1, 1, 9216)} --actor-num-nodes 1
 --actor-num-gpus-per-node 2 --rollout-num-gpus 6 --rollout-num-gpus-per-engine 1""",
    ),
    "manual: groups of two sizes, with options and a reserved GPU": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {ADAM} {MISC} {layout(2, 1, 1, 1, 9216)} --actor-num-nodes 1
 --actor-num-gpus-per-node 2 --rollout-num-gpus 6 --sglang-config {{data}}/sizes.yaml""",
    ),
    "manual: a reference and a reward model beside the policy": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {ADAM} {MISC} {layout(2, 1, 1, 1, 9216)} --actor-num-nodes 1
 --actor-num-gpus-per-node 2 --rollout-num-gpus 6 --sglang-config {{data}}/models.yaml
 --custom-rm-path tests.end_to_end.judge.reward""",
    ),
    "manual: two of three engines prefill": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {ADAM} {MISC} {layout(2, 1, 1, 1, 9216)} --actor-num-nodes 1
 --actor-num-gpus-per-node 2 --rollout-num-gpus 6 --rollout-num-gpus-per-engine 2 --prefill-num-servers 2
 --sglang-disaggregation-ib-device mlx5_0,mlx5_1""",
    ),
    "manual: groups that prefill and groups that decode": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {ADAM} {MISC} {layout(2, 1, 1, 1, 9216)} --actor-num-nodes 1
 --actor-num-gpus-per-node 2 --rollout-num-gpus 6 --sglang-config {{data}}/disaggregated.yaml""",
    ),
    "distillation from teachers in groups, asynchronous": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {GRPO} {ADAM} {MISC} {layout(2, 1, 1, 1, 16384)} --actor-num-nodes 1
 --actor-num-gpus-per-node 2 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 1 --use-opd --opd-type sglang
 --opd-kl-coef 1.0 --sglang-config {{data}}/teachers.yaml
 --custom-rm-path slime.rollout.on_policy_distillation.reward_func_route_by_domain
 --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards""",
        entry="train_async.py",
        refused=("--custom-rm-path",),
        instead="--rm-type zero --opd-teacher-models dapo-math-17k tool --opd-teacher-key domain",
    ),
    "PPO, colocated, with a file of roles": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {EVAL} {PPO} {ADAM} {MISC} {ONE_NODE} {layout(2, 1, 2, 1, 16384)}
 --megatron-config-path {{data}}/roles.yaml --use-kl-loss --num-rollout 2 --rollout-batch-size 4
 --n-samples-per-prompt 4 --global-batch-size 16 --n-samples-per-eval-prompt 1 --eval-top-k 1 --rollout-num-gpus 8
 --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.8 --sglang-cuda-graph-max-bs 16
 --sglang-max-running-requests 512 --sglang-enable-metrics --ci-test""",
    ),
    "PPO, split, with a file of roles": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {EVAL} {PPO} {ADAM} {MISC} {layout(2, 1, 2, 1, 2048)} --actor-num-nodes 1
 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --megatron-config-path {{data}}/roles.yaml --num-rollout 3
 --rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 32 --rollout-num-gpus-per-engine 2
 --sglang-mem-fraction-static 0.8 --sglang-cuda-graph-max-bs 32 --sglang-max-running-requests 512
 --sglang-enable-metrics --ci-test""",
    ),
    "PPO, only the critic is trained": Recipe(
        "qwen2.5-0.5B",
        f"""--hf-checkpoint {{data}}/hf {MATH} {PPO} {ADAM} {MISC} --tensor-model-parallel-size 1 --sequence-parallel
 --pipeline-model-parallel-size 1 --context-parallel-size 1 --expert-model-parallel-size 1
 --expert-tensor-parallel-size 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216 --num-rollout 3
 --rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 1024 --rollout-temperature 0.8
 --global-batch-size 32 --num-critic-only-steps 3 --rollout-num-gpus-per-engine 1 --rollout-num-gpus 4
 --sglang-mem-fraction-static 0.7 --sglang-cuda-graph-max-bs 32 --sglang-enable-metrics --ci-test
 --actor-num-nodes 1 --actor-num-gpus-per-node 4 --megatron-to-hf-mode bridge --colocate
 --critic-config-path {{data}}/roles.yaml""",
        refused=("--critic-config-path", "--megatron-to-hf-mode", "--ref-load"),
        instead="--megatron-config-path {data}/roles.yaml --ref-load {data}/torch_dist",
    ),
    "manual: PPO with a critic on GPUs of its own": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {EVAL} {PPO} {ADAM} {MISC} {layout(2, 1, 1, 1, 9216)} --actor-num-nodes 1
 --actor-num-gpus-per-node 4 --critic-num-nodes 1 --critic-num-gpus-per-node 4 --rollout-num-gpus 8 --critic-lr 1e-5
 --critic-lr-warmup-iters 5 --critic-save {{data}}/critic --eps-clip 0.2""",
    ),
    "qwen3-4B, 8 GPUs": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {ADAM} {MISC} {ONE_NODE} {layout(2, 1, 1, 1, 9216)}
 --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7""",
    ),
    "qwen3-4B, asynchronous": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {ADAM} {MISC} {layout(2, 1, 1, 1, 9216)} --actor-num-nodes 1
 --actor-num-gpus-per-node 2 --rollout-num-gpus 6 --rollout-num-gpus-per-engine 1 --update-weights-interval 2
 --use-tis""",
        entry="train_async.py",
    ),
    "qwen3-4B, supervised": Recipe(
        "qwen3-4B",
        f"""--hf-checkpoint {{data}}/hf --ref-load {{data}}/torch_dist --save {{data}}/slimrl --save-interval 1000
 --rollout-function-path slime.rollout.sft_rollout.generate_rollout --prompt-data {{data}}/openhermes.parquet
 --input-key messages --rollout-shuffle --num-epoch 3 --rollout-batch-size 128 --global-batch-size 128
 --loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns --debug-train-only
 {layout(1, 1, 1, 1, 9216)} --optimizer adam --lr 1e-5 --lr-decay-style cosine --min-lr 1e-6 --weight-decay 0.1
 --lr-warmup-fraction 0.1 --adam-beta1 0.9 --adam-beta2 0.95 {MISC} --actor-num-nodes 1
 --actor-num-gpus-per-node 8""",
        entry="train_async.py",
    ),
    "qwen2.5-0.5B, reproducible": Recipe(
        "qwen2.5-0.5B",
        f"""--hf-checkpoint {{data}}/hf --ref-load {{data}}/torch_dist --prompt-data {{data}}/gsm8k.parquet
 --input-key messages --label-key label --apply-chat-template --rollout-shuffle --rm-type math --num-rollout 100
 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 1024 --rollout-temperature 1
 --global-batch-size 256 --eval-interval 20 --eval-prompt-data gsm8k {{data}}/gsm8k.parquet
 --n-samples-per-eval-prompt 1 --eval-max-response-len 1024 --eval-top-k 1 {GRPO} {ADAM} {MISC} {ONE_NODE}
 --tensor-model-parallel-size 1 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216
 --rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.7 --sglang-enable-deterministic-inference
 --sglang-attention-backend flashinfer --deterministic-mode""",
    ),
    "qwen3-30B-A3B, 8 GPUs": Recipe(
        "qwen3-30B-A3B",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {OFFLOADED_ADAM} {MISC} {ONE_NODE} {layout(4, 1, 1, 8, 20480)}
 --rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7
 --sglang-cuda-graph-bs 1 2 4 8 16 24 32 40 48 56 64""",
    ),
    "qwen3-30B-A3B, more nodes and DeepEP": Recipe(
        "qwen3-30B-A3B",
        f"""{CKPT} {MATH} {EVAL} {GSPO} {ADAM} {MISC} {DEEPEP} {layout(4, 1, 1, 8, 20480)} --actor-num-nodes 2
 --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7
 --sglang-enable-dp-attention --sglang-dp-size 8 --sglang-moe-a2a-backend deepep --sglang-deepep-mode auto""",
    ),
    "qwen3-32B, 8 GPUs": Recipe(
        "qwen3-32B",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {OFFLOADED_ADAM} {MISC} {ONE_NODE} {layout(8, 1, 1, 1, 20480)}
 --rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7""",
    ),
    "qwen3-235B-A22B, 8 nodes": Recipe(
        "qwen3-235B-A22B",
        f"""{CKPT} {MATH} {EVAL} {GSPO} {ADAM} {MISC} {DEEPEP} {layout(4, 4, 2, 16, 16384)}
 --decoder-last-pipeline-num-layers 22 --actor-num-nodes 8 --actor-num-gpus-per-node 8 --colocate
 --rollout-num-gpus-per-engine 32 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention
 --sglang-dp-size 4 --sglang-enable-dp-lm-head --sglang-ep-size 32 --sglang-moe-a2a-backend deepep
 --sglang-deepep-mode auto --sglang-cuda-graph-bs 1 2 4 8 16 24 32""",
    ),
    "glm4-9B, 4 training and 4 generating GPUs": Recipe(
        "glm4-9B",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {ADAM} {MISC} {layout(2, 1, 2, 1, 4608)} --actor-num-nodes 1
 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2""",
    ),
    "glm4.5-355B-A32B, 16 nodes": Recipe(
        "glm4.5-355B-A32B",
        f"""{CKPT} {MATH} {EVAL} {GSPO} {OFFLOADED_ADAM} {MISC} {DAPO} {DEEPEP} {layout(8, 4, 2, 16, 16384)}
 --actor-num-nodes 16 --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 32
 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-dp-size 4 --sglang-ep-size 32
 --sglang-enable-dp-lm-head --sglang-moe-dense-tp-size 1 --decoder-first-pipeline-num-layers 23
 --use-fault-tolerance""",
    ),
    "glm4.7-30B-A3B, 8 GPUs": Recipe(
        "glm4.7-30B-A3B",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {OFFLOADED_ADAM} {MISC} {ONE_NODE} {layout(4, 1, 1, 8, 20480)}
 --rollout-num-gpus-per-engine 4 --sglang-mem-fraction-static 0.7""",
    ),
    "moonlight-16B-A3B, 8 GPUs": Recipe(
        "moonlight",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {OFFLOADED_ADAM} {MISC} {ONE_NODE} {layout(4, 1, 1, 8, 20480)}
 --rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7
 --rollout-max-response-len 4096 --eval-max-response-len 4096""",
    ),
    "deepseek-r1, 16 nodes": Recipe(
        "deepseek-v3",
        f"""{CKPT} {MATH} {DAPO} {EVAL} {GRPO} {OFFLOADED_ADAM} {MISC} {DEEPEP} {layout(8, 4, 4, 32, 16384)}
 --num-rollout 3000 --rollout-batch-size 128 --over-sampling-batch-size 256 --num-steps-per-rollout 4
 --decoder-last-pipeline-num-layers 13 --actor-num-nodes 16 --actor-num-gpus-per-node 8 --colocate
 --rollout-num-gpus-per-engine 64 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention
 --sglang-dp-size 8 --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head --sglang-disable-radix-cache
 --sglang-ep-size 64 --sglang-moe-a2a-backend deepep --sglang-deepep-mode auto --sglang-server-concurrency 1024
 --use-fault-tolerance --rollout-health-check-interval 60""",
    ),
    "kimi-k2, 32 nodes": Recipe(
        "kimi-k2",
        f"""{CKPT} {MATH} {DAPO} {EVAL} {GRPO} {OFFLOADED_ADAM} {MISC} {DEEPEP} {layout(8, 8, 4, 32, 16384)}
 --rollout-batch-size 128 --over-sampling-batch-size 256 --num-steps-per-rollout 4
 --decoder-last-pipeline-num-layers 5 --actor-num-nodes 32 --actor-num-gpus-per-node 8 --colocate
 --rollout-num-gpus-per-engine 16 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-dp-size 8
 --sglang-enable-dp-lm-head --sglang-ep-size 16 --sglang-server-concurrency 1024""",
    ),
    "mimo-7B-rl with speculative decoding": Recipe(
        "mimo-7B-rl",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {ADAM} {MISC} {ONE_NODE} {layout(2, 1, 1, 1, 9216)}
 --rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.7 --sglang-speculative-algorithm EAGLE
 --sglang-speculative-num-steps 3 --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 4
 --enable-mtp-training --mtp-loss-scaling-factor 0.2 --mtp-num-layers 1""",
        refused=("--enable-mtp-training", "--mtp-num-layers"),
    ),
    "llama3.2-3B with Weights & Biases": Recipe(
        "llama3.2-3B-Instruct",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {ADAM} {MISC} {ONE_NODE} {layout(2, 1, 1, 1, 9216)}
 --rollout-num-gpus-per-engine 2 --use-wandb --wandb-project slime --wandb-group llama
 --wandb-key 0123456789abcdef --log-passrate --log-multi-turn""",
    ),
    "qwen3-4B, distilled from a teacher on an SGLang server": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {GRPO} {ADAM} {MISC} {ONE_NODE} {layout(2, 1, 1, 1, 9216)} --rollout-num-gpus-per-engine 1
 --custom-rm-path slime.rollout.on_policy_distillation.reward_func
 --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards
 --rm-url http://10.0.0.7:13141/generate --use-opd --opd-type sglang --opd-kl-coef 1.0""",
    ),
    "qwen3-4B, distilled by an estimator of its own": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {GRPO} {ADAM} {MISC} {ONE_NODE} {layout(2, 1, 1, 1, 9216)} --rollout-num-gpus-per-engine 1
 --advantage-estimator on_policy_distillation
 --custom-rm-path examples.on_policy_distillation.on_policy_distillation.reward_func
 --custom-reward-post-process-path examples.on_policy_distillation.on_policy_distillation.post_process_rewards
 --rm-url http://10.0.0.7:13141/generate""",
        refused=("--advantage-estimator", "--custom-rm-path"),
        instead="--advantage-estimator grpo --use-opd --opd-type sglang --rm-type zero",
    ),
    "qwen3-4B, distilled from a teacher in the training ranks": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {ADAM} {MISC} {ONE_NODE} {layout(2, 1, 1, 1, 9216)}
 --rollout-num-gpus-per-engine 1 --use-opd --opd-type megatron --opd-kl-coef 1.0
 --opd-teacher-load {{data}}/torch_dist""",
    ),
    "qwen3-8B, distilled from a teacher in the training ranks, with a reward of 0": Recipe(
        "qwen3-8B",
        f"""{CKPT} {MATH} {OPD_IN_RANKS} {layout(4, 1, 1, 1, 8192)}
 --custom-rm-path slime.rollout.on_policy_distillation.reward_func
 --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards""",
    ),
    "qwen3-8B, distilled from a teacher in the training ranks, with a reward without its label": Recipe(
        "qwen3-8B",
        f"""{CKPT} --prompt-data {{data}}/dapo-math-17k.jsonl --input-key prompt --apply-chat-template --rm-type math
 --rollout-shuffle --num-rollout 300 --rollout-batch-size 16 --n-samples-per-prompt 4 --global-batch-size 64
 --rollout-max-response-len 16384 --rollout-temperature 1 --balance-data {OPD_IN_RANKS} {layout(4, 1, 1, 1, 8192)}""",
        refused=("--label-key",),
        instead="--label-key label",
    ),
    "qwen3-VL-4B on geo3k": Recipe(
        "qwen3-VL-4B",
        f"""{GEO3K} --prompt-data {{data}}/geo3k.parquet --input-key problem --label-key answer --rm-type math
 --num-rollout 3000 --rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 4096
 --rollout-temperature 0.8 --global-batch-size 512 --eval-interval 20 --eval-prompt-data geo3k {{data}}/geo3k.parquet
 --n-samples-per-eval-prompt 1 --eval-max-response-len 4096 --advantage-estimator grpo --kl-loss-coef 0.00
 --kl-loss-type low_var_kl --kl-coef 0.00 --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28 {ADAM} --colocate
 --rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.6 --sglang-cuda-graph-bs 1 2 4 8""",
        refused=NOT_OF_TEXT,
        instead=WITH_IMAGES,
        beside=("--recompute-method", "--recompute-num-layers"),
        decoder="qwen3-4B",
    ),
    "qwen3-VL-4B on geo3k, supervised": Recipe(
        "qwen3-VL-4B",
        f"""{GEO3K} --rollout-function-path slime.rollout.sft_rollout.generate_rollout --input-key messages
 --prompt-data {{data}}/geo3k.parquet --num-epoch 3000 --rollout-batch-size 128 --global-batch-size 128
 --loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns --debug-train-only
 --optimizer adam --lr 1e-5 --lr-decay-style cosine --min-lr 1e-6 --lr-warmup-fraction 0.1 --weight-decay 0.1
 --adam-beta1 0.9 --adam-beta2 0.95""",
        entry="train_async.py",
        refused=NOT_OF_TEXT,
        instead=WITH_IMAGES,
        beside=("--recompute-method", "--recompute-num-layers"),
        decoder="qwen3-4B",
    ),
    "a mistyped flag": Recipe(
        "qwen3-4B",
        f"""{CKPT} {MATH} {EVAL} {GRPO} {ADAM} {ONE_NODE} {layout(2, 1, 1, 1, 9216)} --rollout-num-gpus-per-engine 2
 --rollout-batch-sise 32""",
        refused=("--rollout-batch-sise",),
    ),
}
