# Toy sizes for the family qwen3_moe; to be sourced after the flags of a model of this family.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS+=(
   --num-layers 2
   --hidden-size 64
   --ffn-hidden-size 128
   --num-attention-heads 4
   --vocab-size 281
   --max-position-embeddings 2048
   --norm-epsilon 1e-06
   --num-experts 8
   --moe-router-topk 2
   --moe-ffn-hidden-size 32
   --rotary-base 1000000
   --num-query-groups 2
   --kv-channels 16
   --moe-layer-freq "[1]*2"
)
