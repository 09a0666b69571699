# shellcheck shell=bash disable=SC2034
# Qwen3-Next-80B-A3B in Megatron's flags; to be sourced. A fine-tuned model may have another rotary base (see its
# config.json): set MODEL_ARGS_ROTARY_BASE, or append the flag: MODEL_ARGS+=(--rotary-base 5000000), the last one wins.
# slimrl does not support this model yet: it has no weight mapping for linear attention.
# Proven: not run (unsupported: no weight mapping for linear attention).
MODEL_ARGS=(
   --swiglu
   --num-layers 48
   --hidden-size 2048
   --ffn-hidden-size 5120
   --num-attention-heads 16
   --group-query-attention
   --num-query-groups 2
   --kv-channels 256
   --qk-layernorm
   --attention-output-gate
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000000}"
   --rotary-percent 0.25
   --apply-layernorm-1p
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --vocab-size 151936
   --max-position-embeddings 262144
   --untie-embeddings-and-output-weights

   --experimental-attention-variant gated_delta_net
   --linear-attention-freq 4
   --linear-conv-kernel-dim 4
   --linear-key-head-dim 128
   --linear-value-head-dim 128
   --linear-num-key-heads 16
   --linear-num-value-heads 32

   --num-experts 512
   --moe-router-topk 10
   --moe-ffn-hidden-size 512
   --moe-layer-freq "[1]*48"
   --moe-shared-expert-intermediate-size 512
   --moe-router-score-function softmax
   --moe-shared-expert-gate
   --moe-aux-loss-coeff 0
   --moe-router-dtype fp32
   --moe-token-dispatcher-type alltoall
   --moe-grouped-gemm
   --moe-permute-fusion
)
