# Toy sizes for the family qwen3_vl_moe; to be sourced after the flags of a model of this family.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS+=(
   --num-layers 3
   --hidden-size 64
   --ffn-hidden-size 128
   --num-attention-heads 4
   --vocab-size 285
   --max-position-embeddings 2048
   --norm-epsilon 1e-06
   --num-experts 8
   --moe-router-topk 2
   --moe-ffn-hidden-size 48
   --rotary-base 5000000
   --mrope-section 4 2 2
   --num-query-groups 2
   --kv-channels 16
   --moe-layer-freq "[1]*3"
)
