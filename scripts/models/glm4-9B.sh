# shellcheck shell=bash disable=SC2034
# GLM-4-9B-0414, GLM-Z1-9B-0414 in Megatron's flags; to be sourced. MODEL_ARGS_ROTARY_BASE replaces the rotary base.
# Proven: checked against published configs (glm4-9B.json).
MODEL_ARGS=(
   --swiglu
   --num-layers 40
   --hidden-size 4096
   --ffn-hidden-size 13696
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 2
   --kv-channels 128
   --add-qkv-bias
   --post-self-attn-layernorm
   --post-mlp-layernorm
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000}"
   --rotary-percent 0.5
   --rotary-interleaved
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --vocab-size 151552
   --max-position-embeddings 32768
   --untie-embeddings-and-output-weights
)
