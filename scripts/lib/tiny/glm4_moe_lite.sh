# Toy sizes for the family glm4_moe_lite; to be sourced after the flags of a model of this family.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS+=(
   --num-layers 2
   --hidden-size 64
   --ffn-hidden-size 128
   --num-attention-heads 4
   --vocab-size 281
   --max-position-embeddings 2048
   --norm-epsilon 1e-05
   --num-experts 8
   --moe-router-topk 2
   --moe-ffn-hidden-size 32
   --q-lora-rank 48
   --kv-lora-rank 32
   --qk-head-dim 16
   --qk-pos-emb-head-dim 8
   --v-head-dim 16
   --moe-router-topk-scaling-factor 1.8
   --rotary-base 1000000
   --moe-layer-freq "[0]*1+[1]*1"
   --moe-shared-expert-intermediate-size 32
)
