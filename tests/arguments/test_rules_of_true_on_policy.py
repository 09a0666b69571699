"""Rules about --true-on-policy-mode. The recipe with it passes, whatever would add in another order is one error."""

from __future__ import annotations

import pytest

from slimrl.arguments import read_args
from slimrl.engines.sglang.server_args import server_flags

MODE = "--true-on-policy-mode --no-bf16"
OUT = "leave {0} out, or --true-on-policy-mode."
HALVES = "--expert-tensor-parallel-size 2"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 768"
ONE = "--tensor-model-parallel-size 1 --rollout-num-gpus-per-engine 1"
GPUS = f"--true-on-policy-mode --bf16 {ONE}"
ATTENTION = (
    " has a use with --true-on-policy-mode and --bf16 only, as flash_attention_3: leave it out; --attention-backend"
    " chooses the attention of training."
)
# rule -> (flags that pass when appended to the recipe, flags that do not with their error)
CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "true_on_policy_has_a_precision": (
        [MODE, "--true-on-policy --no-bf16 --deterministic-mode", f"{GPUS} --attn-implementation flash_attention_3"],
        [
            (
                f"{MODE} --fp16",
                "--true-on-policy-mode computes in float32 on CPUs and in bfloat16 on GPUs, not with --fp16: leave it"
                " out.",
            ),
            (
                f"{MODE} --attn-implementation flash_attention_3",
                "--attn-implementation flash_attention_3" + ATTENTION,
            ),
            (f"{GPUS} --attn-implementation sdpa", "--attn-implementation sdpa" + ATTENTION),
        ],
    ),
    "true_on_policy_knows_the_model": (
        [f"{MODE} --rollout-temperature 0.6"],
        [
            (
                f"{MODE} --lora-rank 8 --lora-merge",
                "--true-on-policy-mode has no products with an adapter: " + OUT.format("--lora-rank"),
            ),
            (
                f"{MODE} --keep-logits",
                "--true-on-policy-mode computes log-probabilities from chunks of rows: " + OUT.format("--keep-logits"),
            ),
            (
                f"{MODE} --fp32-residual-connection",
                "--true-on-policy-mode adds in the dtype of the weights: " + OUT.format("--fp32-residual-connection"),
            ),
            (
                f"{MODE} --attention-dropout 0.1",
                "--true-on-policy-mode has no dropout in the engines: " + OUT.format("--attention-dropout"),
            ),
            (
                f"{MODE} --softmax-scale 0.1",
                "--true-on-policy-mode has the usual scale of attention: " + OUT.format("--softmax-scale"),
            ),
            (
                f"{MODE} --transformer-impl transformer_engine",
                "--true-on-policy-mode computes in slimrl's own layers: "
                + OUT.format("--transformer-impl transformer_engine"),
            ),
        ],
    ),
    "true_on_policy_adds_in_one_order": (
        [f"{MODE} {ONE}", f"{MODE} {ONE} --pipeline-model-parallel-size 2"],
        [
            (
                f"{MODE} --rollout-num-gpus-per-engine 1",
                "--tensor-model-parallel-size 2 and --rollout-num-gpus-per-engine 1 split sums differently, and"
                " --true-on-policy-mode needs the same: give one number for both.",
            ),
            (
                f"{MODE} --tensor-model-parallel-size 4 --rollout-num-gpus-per-engine 4",
                "--tensor-model-parallel-size 4 adds the sums of ranks in an order that depends on the number of"
                " tokens, and --true-on-policy-mode needs one order: give 1 or 2.",
            ),
            (
                "--true-on-policy-mode --bf16 --tensor-model-parallel-size 2 --rollout-num-gpus-per-engine 2",
                "--tensor-model-parallel-size 2 with --true-on-policy-mode is for float32 on CPUs; in bfloat16 on GPUs"
                " give 1.",
            ),
            (
                f"{MODE} --context-parallel-size 2",
                "--true-on-policy-mode attends within one rank: " + OUT.format("--context-parallel-size"),
            ),
            (
                f"{MODE} --use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim",
                "--true-on-policy-mode was not shown to be exact with Megatron-FSDP: "
                + OUT.format("--use-megatron-fsdp"),
            ),
        ],
    ),
    "true_on_policy_engines_compute_alike": (
        [
            f"{MODE} --sglang-enable-deterministic-inference --sglang-attention-backend torch_native",
            f"{GPUS} --sglang-cuda-graph-max-bs 64",
        ],
        [
            (
                f"{MODE} --sglang-rl-on-policy-target fsdp",
                "--sglang-rl-on-policy-target fsdp names kernels of GPUs, which --true-on-policy-mode has in bfloat16:"
                " leave --sglang-rl-on-policy-target out, or give --bf16 on GPUs.",
            ),
            (
                f"{GPUS} --sglang-attention-backend triton",
                "--sglang-attention-backend triton is another choice than fa3, which --true-on-policy-mode needs in"
                " bfloat16: give that.",
            ),
            (
                f"{MODE} --rollout-engine vllm",
                "--rollout-engine vllm has operators of its own, and --true-on-policy-mode has those of sglang: give"
                " sglang.",
            ),
            (
                f"{MODE} --sglang-attention-backend fa3",
                "--sglang-attention-backend fa3 is another choice than torch_native, which --true-on-policy-mode needs"
                " in float32: give that.",
            ),
            (
                f"{MODE} --sglang-speculative-algorithm NGRAM",
                "--sglang-speculative-algorithm was not shown to leave log-probabilities as they are: leave it, or"
                " --true-on-policy-mode out.",
            ),
            (
                f"{MODE} --sglang-kv-cache-dtype fp8_e5m2",
                "--sglang-kv-cache-dtype was not shown to leave log-probabilities as they are: leave it, or"
                " --true-on-policy-mode out.",
            ),
        ],
    ),
    "on_policy_target_belongs_to_the_mode": (
        [f"{GPUS} --sglang-rl-on-policy-target fsdp"],
        [
            (
                "--sglang-rl-on-policy-target fsdp",
                "--sglang-rl-on-policy-target fsdp makes SGLang compute log-probabilities in a way of its own, which"
                " depends on the batch, and only --true-on-policy-mode has it right: add --true-on-policy-mode, or"
                " leave the flag out.",
            ),
        ],
    ),
    "true_on_policy_trains_what_it_samples": (
        [MODE],
        [
            (
                f"{MODE} --partial-rollout --over-sampling-batch-size 64",
                "--partial-rollout continues responses of older weights, and --true-on-policy-mode has none: leave one"
                " out.",
            ),
        ],
    ),
}


@pytest.mark.parametrize("line", sorted({line for good, _ in CASES.values() for line in good}))
def test_valid_variant_passes(line, recipe):
    args, problems = read_args(recipe.line(line), passthrough={"sglang": server_flags})
    assert problems == []
    assert args.sglang_options["enable_deterministic_inference"]


@pytest.mark.parametrize(
    ("rule", "line", "sentence"), [(rule, *case) for rule, (_, bad) in CASES.items() for case in bad]
)
def test_violation_is_one_error(rule, line, sentence, recipe):
    _, problems = read_args(recipe.line(line), passthrough={"sglang": server_flags})
    assert [problem.sentence for problem in problems if "--true-on-policy-mode" in problem.sentence] == [sentence]


def test_other_families_are_refused(recipe):
    recipe.write_config(model_type="glm4")
    _, problems = read_args(recipe.line(MODE))
    assert (
        "--hf-checkpoint is a glm4 model, and --true-on-policy-mode has the layers of llama, qwen2, qwen3, qwen3_moe:"
        " give one of these, or leave --true-on-policy-mode out."
    ) in [problem.sentence for problem in problems]


def test_shared_experts_are_refused(recipe):
    recipe.write_config(model_type="qwen3_moe")
    _, problems = read_args(recipe.line(f"{MODE} {EXPERTS} {ONE} --moe-shared-expert-intermediate-size 512"))
    assert any("--true-on-policy-mode has no shared experts" in problem.sentence for problem in problems)


@pytest.mark.parametrize(
    ("flags", "sentences"),
    [
        (f"{EXPERTS} {HALVES}", []),
        (
            f"{EXPERTS} --expert-tensor-parallel-size 1",
            [
                "--expert-tensor-parallel-size 1 has whole experts in training, of which two ranks of an engine have"
                " halves, and --true-on-policy-mode needs the same: give 2, or --tensor-model-parallel-size 1."
            ],
        ),
        (
            f"{EXPERTS.replace('768', '736')} {HALVES}",
            [
                "--moe-ffn-hidden-size 736 is not a multiple of 64, to which a server with 2 ranks pads it, and"
                " --true-on-policy-mode needs the same halves: give --tensor-model-parallel-size 1."
            ],
        ),
    ],
)
def test_two_ranks_have_the_same_halves_of_experts(recipe, flags, sentences):
    recipe.write_config(model_type="qwen3_moe")
    _, problems = read_args(recipe.line(f"{MODE} {flags}"))
    assert [problem.sentence for problem in problems if "--true-on-policy-mode" in problem.sentence] == sentences


def test_asynchronous_training_is_refused(recipe):
    placement = "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 6"
    _, problems = read_args(recipe.line(MODE, placement=placement), entry="train_async.py")
    assert [problem.sentence for problem in problems] == [
        "--true-on-policy-mode trains samples of the current weights, and train_async.py those of older ones: start"
        " train.py."
    ]


def test_narrow_blocks_are_not_split(recipe):
    recipe.write_config(intermediate_size=9696)
    _, problems = read_args(recipe.line(f"{MODE} --ffn-hidden-size 9696"))
    assert [problem.sentence for problem in problems] == [
        "--ffn-hidden-size 9696 is not a multiple of 64, to which a server with 2 ranks pads it, and"
        " --true-on-policy-mode needs the same halves: give --tensor-model-parallel-size 1."
    ]


# examples/true_on_policy of slime
SLIMES_EXAMPLE = (
    "--sglang-enable-deterministic-inference --sglang-rl-on-policy-target fsdp --sglang-attention-backend fa3"
    " --attn-implementation flash_attention_3 --deterministic-mode --true-on-policy-mode"
)


def test_example_of_slime_means_the_kernels_of_gpus(recipe):
    recipe.write_config(dtype="bfloat16")
    args, problems = read_args(recipe.line(f"{SLIMES_EXAMPLE} {ONE}"), passthrough={"sglang": server_flags})
    assert problems == []
    assert args.true_on_policy_mode and args.bf16 and args.deterministic_mode
    assert args.transformer_impl == "local"


def test_experts_are_refused_in_bfloat16(recipe):
    recipe.write_config(model_type="qwen3_moe")
    _, problems = read_args(recipe.line(f"{GPUS} {EXPERTS}"))
    assert ["--true-on-policy-mode has experts in float32 on CPUs only: " + OUT.format("--num-experts")] == [
        problem.sentence for problem in problems if "--true-on-policy-mode" in problem.sentence
    ]
