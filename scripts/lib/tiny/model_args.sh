# Megatron flags of this model; to be sourced.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS=(
   --swiglu
   --num-layers 2
   --hidden-size 64
   --ffn-hidden-size 128
   --num-attention-heads 4
   --group-query-attention
   --num-query-groups 2
   --kv-channels 16
   --qk-layernorm
   --use-rotary-position-embeddings
   --rotary-base 10000
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-06
   --vocab-size 281
   --max-position-embeddings 2048
)
