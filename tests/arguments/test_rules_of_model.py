"""Rules about experts, latent attention, pipeline stages and number formats."""

from __future__ import annotations

import pytest

from tests.arguments.one_rule import sentences

MODEL = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --vocab-size 1000 --actor-num-gpus-per-node 8"
EXPERTS = "--num-experts 16 --moe-router-topk 4"
VIRTUAL = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"

OFFLOAD = "--bf16 --optimizer-cpu-offload --use-precision-aware-optimizer"
# rule -> (lines that pass, lines that do not with their error)
CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "expert_flags_have_experts": (
        ["", EXPERTS, "--moe-router-topk 2", f"{EXPERTS} --moe-ffn-hidden-size 32"],
        [
            (
                "--moe-ffn-hidden-size 32",
                "--moe-ffn-hidden-size needs experts and the model has none: give --num-experts, or leave it out.",
            )
        ],
    ),
    "router_can_choose_experts": (
        [EXPERTS, f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 2"],
        [
            (
                "--num-experts 16 --moe-router-topk 17",
                "--moe-router-topk 17 is more than --num-experts 16: lower it.",
            ),
            (
                f"{EXPERTS} --moe-router-num-groups 4",
                "--moe-router-num-groups and --moe-router-group-topk belong together: give both, or neither.",
            ),
            (
                f"{EXPERTS} --moe-router-num-groups 5 --moe-router-group-topk 2",
                "--num-experts 16 does not divide by --moe-router-num-groups 5: choose a divisor.",
            ),
            (
                f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 4",
                "--moe-router-group-topk 4 is more than --moe-router-num-groups 2: lower it.",
            ),
            (
                f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 3",
                "--moe-router-topk 4 does not divide by --moe-router-group-topk 3, the groups of each token: choose a"
                " divisor.",
            ),
        ],
    ),
    "router_is_consistent": (
        [
            f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
            " --moe-router-topk-scaling-factor 2.5",
            f"{EXPERTS} --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2",
        ],
        [
            (
                f"{EXPERTS} --moe-router-enable-expert-bias",
                "--moe-router-enable-expert-bias needs sigmoid scores: add --moe-router-score-function sigmoid.",
            ),
            (
                "--num-experts 16 --moe-router-topk 1",
                "--moe-router-topk 1 with a softmax after the top-k gives every expert weight 1: add"
                " --moe-router-pre-softmax.",
            ),
            (
                f"{EXPERTS} --moe-router-topk-scaling-factor 2.5",
                "--moe-router-topk-scaling-factor 2.5 needs sigmoid scores or --moe-router-pre-softmax: add one of"
                " them, or leave it out.",
            ),
            (
                f"{EXPERTS} --moe-aux-loss-coeff 0.1 0.2",
                "--moe-aux-loss-coeff has 2 weights and --moe-router-load-balancing-type 1 kinds: give one weight for"
                " each kind.",
            ),
            (
                f"{EXPERTS} --moe-shared-expert-gate",
                "--moe-shared-expert-gate needs a shared expert: give --moe-shared-expert-intermediate-size.",
            ),
            (
                f"{EXPERTS} --moe-pad-expert-input-to-capacity",
                "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor: give it, or leave the first"
                " out.",
            ),
        ],
    ),
    "moe_layer_pattern_is_complete": (
        [f"{EXPERTS} --moe-layer-freq [0]*1+[1]*7", f"{EXPERTS} --moe-layer-freq 2"],
        [
            (
                f"{EXPERTS} --moe-layer-freq [0]*1+[1]*8",
                "--moe-layer-freq describes 9 layers and --num-layers is 8: make them agree.",
            )
        ],
    ),
    "experts_divide_over_gpus": (
        [
            f"{EXPERTS} --expert-model-parallel-size 8",
            f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel",
            "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
        ],
        [
            (
                "--expert-model-parallel-size 2",
                "--expert-model-parallel-size 2 needs experts and the model has none: leave it out.",
            ),
            (
                "--expert-tensor-parallel-size 4",
                "--expert-tensor-parallel-size 4 needs experts and the model has none: leave it out.",
            ),
            (
                f"{EXPERTS} --expert-model-parallel-size 3",
                "--num-experts 16 does not divide by --expert-model-parallel-size 3: choose a divisor.",
            ),
            (
                f"{EXPERTS} --tensor-model-parallel-size 2",
                "--num-experts with --tensor-model-parallel-size 2 trains with --sequence-parallel only: add it.",
            ),
        ],
    ),
    "latent_flags_have_latent_attention": (
        ["--multi-latent-attention --kv-lora-rank 16 --mscale 1.0", ""],
        [
            (
                "--kv-lora-rank 16",
                "--kv-lora-rank belongs to latent attention: add --multi-latent-attention, or leave it out.",
            ),
            (
                "--position-embedding-type yarn",
                "--position-embedding-type yarn is supported with --multi-latent-attention only: use rope.",
            ),
        ],
    ),
    "latent_attention_is_plain_otherwise": (
        [
            "--multi-latent-attention",
            "--rotary-interleaved",
            "--multi-latent-attention --tensor-model-parallel-size 2 --sequence-parallel",
        ],
        [
            (
                "--multi-latent-attention --tensor-model-parallel-size 2",
                "--multi-latent-attention with --tensor-model-parallel-size 2 trains with --sequence-parallel only:"
                " add it.",
            ),
            (
                "--multi-latent-attention --rotary-interleaved",
                "--rotary-interleaved and --multi-latent-attention exclude each other (MLA has its own order of"
                " rotary channels): leave the first out.",
            ),
            (
                "--multi-latent-attention --use-rope-scaling",
                "--use-rope-scaling is for Llama 3 and --multi-latent-attention uses --rotary-scaling-factor: leave"
                " the first out.",
            ),
        ],
    ),
    "world_divides_by_model_gpus": (
        [
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2",
            f"{EXPERTS} --expert-model-parallel-size 4 --pipeline-model-parallel-size 2",
        ],
        [
            (
                "--tensor-model-parallel-size 4 --context-parallel-size 4",
                "--actor-num-nodes 1 x --actor-num-gpus-per-node 8 = 8 training GPUs do not divide by"
                " --tensor-model-parallel-size 4 x --context-parallel-size 4 = 16: choose sizes whose product divides"
                " them.",
            ),
            (
                f"{EXPERTS} --expert-model-parallel-size 8 --pipeline-model-parallel-size 2",
                "--actor-num-nodes 1 x --actor-num-gpus-per-node 8 = 8 training GPUs do not divide by"
                " --expert-model-parallel-size 8 x --pipeline-model-parallel-size 2 = 16: choose sizes whose product"
                " divides them.",
            ),
        ],
    ),
    "stages_are_several": (
        ["--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3", ""],
        [
            (
                "--decoder-first-pipeline-num-layers 3",
                "--decoder-first-pipeline-num-layers 3 divides layers over pipeline stages and there is only one"
                " stage: leave it out, or raise --pipeline-model-parallel-size.",
            )
        ],
    ),
    "layers_divide_over_stages": (
        [
            "--pipeline-model-parallel-size 4",
            "--pipeline-model-parallel-size 3 --decoder-last-pipeline-num-layers 2",
            "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3"
            " --decoder-last-pipeline-num-layers 5",
            "--pipeline-model-parallel-size 3 --account-for-loss-in-pipeline-split",
        ],
        [
            (
                "--pipeline-model-parallel-size 3",
                "--num-layers 8 = 8 layers do not divide over the 3 of --pipeline-model-parallel-size 3 stages: choose"
                " a divisor, or set --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers.",
            ),
            (
                "--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 3",
                "--num-layers 8 - 3 on the first stage = 5 layers do not divide over the other 2 of"
                " --pipeline-model-parallel-size 3 stages: choose a divisor, or set --decoder-first-pipeline-num-layers"
                " and --decoder-last-pipeline-num-layers.",
            ),
        ],
    ),
    "virtual_stages_divide": (
        [
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4",
        ],
        [
            (
                "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
                "--num-layers 8 does not divide by --pipeline-model-parallel-size 2 x"
                " --num-layers-per-virtual-pipeline-stage 3 = 6: choose sizes whose product divides it.",
            ),
            (
                "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"
                " --num-virtual-stages-per-pipeline-rank 2",
                "--num-layers-per-virtual-pipeline-stage 2 and --num-virtual-stages-per-pipeline-rank 2 exclude each"
                " other: give one.",
            ),
        ],
    ),
    "virtual_stages_exchange_groups": (
        [
            "--pipeline-model-parallel-size 2 --rollout-batch-size 12",
            VIRTUAL,
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
        ],
        [
            (
                "--pipeline-model-parallel-size 2 --microbatch-group-size-per-vp-stage 2",
                "--microbatch-group-size-per-vp-stage 2 is for virtual stages and there are none: give"
                " --num-layers-per-virtual-pipeline-stage, or leave it out.",
            ),
            (
                f"{VIRTUAL} --no-overlap-p2p-communication",
                "--no-overlap-p2p-communication mixes up the messages between virtual stages with"
                " --pipeline-model-parallel-size 2: leave it out.",
            ),
            (
                f"{VIRTUAL} --microbatch-group-size-per-vp-stage 1",
                "--microbatch-group-size-per-vp-stage 1 is less than --pipeline-model-parallel-size 2: give at"
                " least 2.",
            ),
        ],
    ),
    "optimizer_settings_belong_to_the_optimizer": (
        ["--optimizer muon --no-use-distributed-optimizer --muon-num-ns-steps 10 --muon-no-split-qkv --adam-beta1 0.8"],
        [
            (
                "--muon-no-split-qkv",
                "--muon-no-split-qkv belongs to --optimizer muon: add it, or leave --muon-no-split-qkv out.",
            ),
            (
                "--optimizer muon --muon-num-ns-steps 6",
                "--muon-num-ns-steps 6 ends within a round of the five steps whose coefficients belong together: give"
                " a multiple of 5.",
            ),
        ],
    ),
    "other_optimizers_fit_the_run": (
        ["--optimizer muon --no-use-distributed-optimizer --bf16", "--optimizer sgd --no-use-distributed-optimizer"],
        [
            (
                "--optimizer muon --use-distributed-optimizer",
                "--optimizer muon keeps its whole state on each data parallel GPU: leave --use-distributed-optimizer"
                " out, or use --optimizer adam.",
            ),
            (
                "--optimizer muon --no-use-distributed-optimizer --fp16",
                "--optimizer muon has no loss scale: leave --fp16 out, or use --optimizer adam.",
            ),
        ],
    ),
    "optimizer_state_types_fit_the_optimizer": (
        [
            "--use-precision-aware-optimizer --exp-avg-dtype fp32",
            "--overlap-param-gather --overlap-grad-reduce",
            "--bf16 --grad-reduce-in-bf16",
        ],
        [
            (
                "--no-bf16 --grad-reduce-in-bf16",
                "--grad-reduce-in-bf16 needs bf16 weights: add --bf16, or leave the flag out.",
            ),
            (
                "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
                "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other: give one.",
            ),
            (
                "--exp-avg-dtype bf16",
                "--exp-avg-dtype bf16 needs --use-precision-aware-optimizer: add it, or leave --exp-avg-dtype out.",
            ),
            (
                "--use-precision-aware-optimizer --no-use-distributed-optimizer",
                "--use-precision-aware-optimizer needs the distributed optimizer: leave --no-use-distributed-optimizer"
                " out, or --use-precision-aware-optimizer.",
            ),
            (
                "--use-precision-aware-optimizer --exp-avg-dtype bf16",
                "--exp-avg-dtype bf16 needs a package that is not installed: install transformer_engine, or leave"
                " --exp-avg-dtype out.",
            ),
            (
                f"{OFFLOAD} --exp-avg-sq-dtype bf16",
                "--exp-avg-sq-dtype bf16 conflicts with --optimizer-cpu-offload, which keeps fp32 state: leave one of"
                " them out.",
            ),
            (
                "--use-precision-aware-optimizer --exp-avg-dtype fp8 --colocate",
                "--exp-avg-dtype fp8 keeps tensors that --offload-train cannot copy: give --exp-avg-dtype bf16, or"
                " --no-offload-train.",
            ),
            ("--overlap-param-gather", "--overlap-param-gather needs --overlap-grad-reduce: add it."),
        ],
    ),
    "optimizer_in_host_memory_is_complete": (
        [f"{OFFLOAD} --overlap-cpu-optimizer-d2h-h2d --optimizer-offload-fraction 0.5 --no-pin-cpu-grads"],
        [
            (
                "--overlap-cpu-optimizer-d2h-h2d",
                "--overlap-cpu-optimizer-d2h-h2d belongs to --optimizer-cpu-offload: add it, or leave"
                " --overlap-cpu-optimizer-d2h-h2d out.",
            ),
            (
                "--no-pin-cpu-params",
                "--no-pin-cpu-params belongs to --optimizer-cpu-offload: add it, or leave --no-pin-cpu-params out.",
            ),
            (
                "--bf16 --optimizer-cpu-offload",
                "--optimizer-cpu-offload takes its gradients from --use-precision-aware-optimizer: add it.",
            ),
            (
                "--no-bf16 --optimizer-cpu-offload --use-precision-aware-optimizer",
                "--optimizer-cpu-offload keeps fp32 copies of 16-bit weights and cannot load others: add --bf16, or"
                " leave --optimizer-cpu-offload out.",
            ),
            (
                f"{OFFLOAD} --no-weight-decay-decoupling",
                "--optimizer-cpu-offload decouples the weight decay: leave --no-weight-decay-decoupling out, or"
                " --optimizer-cpu-offload.",
            ),
            (
                f"{OFFLOAD} --overlap-cpu-optimizer-d2h-h2d --optimizer-offload-fraction 0.5 --grad-reduce-in-bf16",
                "--overlap-cpu-optimizer-d2h-h2d with --optimizer-offload-fraction 0.5 and --grad-reduce-in-bf16 steps"
                " on gradients that megatron-core 0.16.1 may still be converting: leave one of them out.",
            ),
        ],
    ),
    "few_bits_have_their_kernels": (["", "--bf16"], []),
    "few_bits_fit_the_layers": (
        [
            "--bf16 --fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16",
            "--bf16 --fp8-format e4m3 --recompute-granularity selective --recompute-modules mlp",
            f"{EXPERTS} --bf16 --fp8-format e4m3 --moe-router-padding-for-quantization",
        ],
        [
            (
                "--bf16 --fp8-format e4m3 --first-last-layers-bf16",
                "--first-last-layers-bf16 does not support --fp8-recipe delayed: give another, such as tensorwise, or"
                " leave it out.",
            ),
            (
                "--bf16 --fp8-format e4m3 --recompute-granularity selective --recompute-modules mlp layernorm",
                "--recompute-modules layernorm does not support --fp8-recipe delayed: give another, such as tensorwise,"
                " or leave it out.",
            ),
            (
                f"{EXPERTS} --moe-router-padding-for-quantization",
                "--moe-router-padding-for-quantization belongs to --fp8-format or --fp4-format: add one, or leave it"
                " out.",
            ),
        ],
    ),
    "formats_have_their_settings": (
        [
            "--fp8-margin 0",
            "--fp16 --initial-loss-scale 4096 --hysteresis 3",
            "--bf16 --fp8-format e4m3 --no-fp8-wgrad --activation-func-fp8-input-store",
            "--bf16 --fp4-format e2m1",
        ],
        [
            ("--no-fp8-wgrad", "--no-fp8-wgrad belongs to --fp8-format: add it, or leave --no-fp8-wgrad out."),
            ("--bf16 --loss-scale 8", "--loss-scale belongs to --fp16: add it, or leave --loss-scale out."),
            ("--fp4-recipe custom", "--fp4-recipe belongs to --fp4-format: add it, or leave --fp4-recipe out."),
        ],
    ),
    "skipped_step_limit_belongs_to_nan_check": (
        ["--no-check-for-nan-in-loss-and-grad", "--no-check-for-nan-in-loss-and-grad --max-skipped-steps 3"],
        [
            (
                "--max-skipped-steps 3",
                "--max-skipped-steps 3 belongs to --no-check-for-nan-in-loss-and-grad: add it, or leave"
                " --max-skipped-steps out.",
            ),
        ],
    ),
}


def broken(rule: str, line: str) -> list[str]:
    return sentences(rule, f"{MODEL} {line}")


@pytest.mark.parametrize(("rule", "line"), [(rule, line) for rule, (passing, _) in CASES.items() for line in passing])
def test_valid_flags_are_accepted(rule: str, line: str):
    assert broken(rule, line) == []


@pytest.mark.parametrize(
    ("rule", "line", "sentence"),
    [(rule, line, sentence) for rule, (_, failing) in CASES.items() for line, sentence in failing],
)
def test_each_violation_is_one_error(rule: str, line: str, sentence: str):
    assert broken(rule, line) == [sentence]


def test_fp8_without_transformer_engine_is_rejected_at_startup(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert broken("few_bits_have_their_kernels", "--fp8-format e4m3") == [
        "--fp8-format e4m3 needs a package that is not installed: install transformer_engine, or leave it out.",
        "--fp8-format e4m3 computes from bf16 weights: add --bf16.",
    ]
