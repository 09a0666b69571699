"""Names of flags that users of slime and Megatron-LM know and that this version of slimrl does not have yet.

They are refused like any unknown flag, with a sentence that says so instead of a wrong guess at a spelling.
"""

from __future__ import annotations

_NAMES = """
allgather-cp apply-layernorm-1p async-save attention-output-gate balance-by-flops buffer-filter-path
ci-disable-kl-checker ci-load-grad-norm ci-save-grad-norm ci-test ci-train-rollout-logprob-abs-diff-threshold
ckpt-format custom-advantage-function-path custom-config-path custom-convert-samples-to-train-data-path
custom-eval-rollout-log-function-path custom-loss-function-path custom-megatron-before-log-prob-hook-path
custom-megatron-before-train-step-hook-path custom-megatron-init-path custom-model-provider-path
custom-pg-loss-reducer-function-path custom-rollout-log-function-path custom-tis-function-path
custom-update-weight-post-write-path data-source-path deterministic-mode disable-compute-advantages-and-returns
disable-rollout-global-dataset disable-wandb-random-suffix dump-details enable-experimental enable-mtp-training
end-weight-decay eval-function-path fetch-trajectory-retry-times fp8-format fp8-param-gather fp8-recipe freeze-indexer
freeze-params-name-list gamma get-mismatch-metrics group-rm http-proxy keep-old-actor kv-lora-rank lambd
load-debug-rollout-data-subsample load-forge-rollout-data log-correct-samples log-multi-turn log-passrate
log-probs-max-tokens-per-gpu log-reward-category loss-mask-type lr-wsd-decay-iters lr-wsd-decay-style manual-gc
mask-offpolicy-in-partial-rollout megatron-config-path megatron-deepgemm-forward-layers
megatron-deepgemm-forward-modules megatron-deepgemm-moe-forward-layers megatron-deepgemm-moe-forward-modules
memory-recorder memory-snapshot-dir memory-snapshot-num-steps memory-snapshot-path min-batch-collection-ratio
model-name moe-aux-loss-coeff moe-enable-deepep moe-ffn-hidden-size moe-grouped-gemm moe-layer-freq moe-permute-fusion
moe-router-bias-update-rate moe-router-dtype moe-router-enable-expert-bias moe-router-group-topk
moe-router-load-balancing-type moe-router-num-groups moe-router-pre-softmax moe-router-score-function moe-router-topk
moe-router-topk-scaling-factor moe-shared-expert-gate moe-shared-expert-intermediate-size moe-token-dispatcher-type
moe-token-drop-policy mscale mscale-all-dim mtp-loss-scaling-factor mtp-num-layers multi-latent-attention
multimodal-keys no-check-for-nan-in-loss-and-grad no-position-embedding no-save-rng num-critic-only-steps num-experts
num-layers-per-virtual-pipeline-stage only-train-params-name-list opd-kl-coef opd-teacher-ckpt-step opd-teacher-load
opd-type opsm-delta optimizer-cpu-offload overlap-cpu-optimizer-d2h-h2d overlap-grad-reduce overlap-param-gather
override-opt-param-scheduler partial-rollout post-mlp-layernorm post-self-attn-layernorm prefill-num-servers
profile-step-end profile-step-start profile-target q-lora-rank qk-head-dim qk-pos-emb-head-dim qwen-gdn-backend
recompute-loss-function recompute-modules record-memory-history ref-update-interval release-train
reset-optimizer-states rm-url rollout-all-samples-process-path rollout-buffer-url rollout-data-postprocess-path
rollout-data-transport rollout-external-engine-addrs rollout-sample-filter-path rollout-sample-hook-path
rollout-task-type rotary-scaling-factor save-debug-train-data save-hf sgd-momentum sglang-config spec
start-weight-decay tis-clip tis-clip-low train-backend update-weight-delta-checksum update-weight-delta-encoding
update-weight-disk-keep-files update-weight-local-checkpoint-dir update-weight-mode use-checkpoint-opt-param-scheduler
use-cpu-initialization use-distributed-post use-gated-attention use-opd use-opsm use-precision-aware-optimizer
use-pytorch-profiler use-rollout-entropy use-rollout-routing-replay use-routing-replay use-stateless-adam use-tis
use-unbiased-kl use-wandb v-head-dim value-clip wandb-always-use-train-step wandb-dir wandb-group wandb-host wandb-key
wandb-mode wandb-project wandb-run-id wandb-team weight-decay-incr-style
"""

UNSERVED_FLAGS = frozenset(f"--{name}" for name in _NAMES.split())
