# Toy sizes for the family deepseek_v3; to be sourced after the flags of a model of this family.
# shellcheck shell=bash disable=SC2034
MODEL_ARGS+=(
   --num-layers 2
   --hidden-size 64
   --ffn-hidden-size 128
   --num-attention-heads 4
   --vocab-size 281
   --max-position-embeddings 163840
   --norm-epsilon 1e-06
   --num-experts 16
   --moe-router-topk 4
   --moe-ffn-hidden-size 32
   --q-lora-rank 48
   --kv-lora-rank 32
   --qk-head-dim 16
   --qk-pos-emb-head-dim 8
   --v-head-dim 16
   --moe-router-topk-scaling-factor 2.5
   --rotary-base 10000
   --rotary-scaling-factor 40.0
   --moe-layer-freq "[0]*1+[1]*1"
   --moe-shared-expert-intermediate-size 32
   --moe-router-num-groups 4
   --moe-router-group-topk 2
)
