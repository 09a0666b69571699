# shellcheck shell=bash disable=SC2034
# MiniMax-M2 (230B-A10B) in Megatron's flags; to be sourced. MODEL_ARGS_ROTARY_BASE replaces the rotary base.
# slimrl does not support this model yet: its query and key norms span all heads, Megatron's only one head.
# Proven: not run (unsupported: query and key norms span all heads).
MODEL_ARGS=(
   --swiglu
   --num-layers 62
   --hidden-size 3072
   --ffn-hidden-size 1536
   --num-attention-heads 48
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --qk-layernorm
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-5000000}"
   --rotary-percent 0.5
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --vocab-size 200064
   --max-position-embeddings 196608
   --untie-embeddings-and-output-weights

   --num-experts 256
   --moe-router-topk 8
   --moe-ffn-hidden-size 1536
   --moe-layer-freq "[1]*62"
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type none
   --moe-aux-loss-coeff 0
   --moe-router-dtype fp32
   --moe-token-dispatcher-type alltoall
   --moe-grouped-gemm
   --moe-permute-fusion
)
