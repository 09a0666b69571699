# shellcheck shell=bash disable=SC2034
# Moonlight-16B-A3B in Megatron's flags; to be sourced. MODEL_ARGS_ROTARY_BASE replaces the rotary base.
# Proven: checked against published configs (moonlight.json).
MODEL_ARGS=(
   --swiglu
   --num-layers 27
   --hidden-size 2048
   --ffn-hidden-size 11264
   --num-attention-heads 16
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-50000}"
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --vocab-size 163840
   --max-position-embeddings 8192
   --untie-embeddings-and-output-weights

   --multi-latent-attention
   --kv-lora-rank 512
   --qk-head-dim 128
   --qk-pos-emb-head-dim 64
   --v-head-dim 128
   --qk-layernorm
   --rotary-scaling-factor 1
   --mscale 1.0
   --mscale-all-dim 1.0

   --num-experts 64
   --moe-router-topk 6
   --moe-ffn-hidden-size 1408
   --moe-layer-freq "[0]*1+[1]*26"
   --moe-shared-expert-intermediate-size 2816
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-router-topk-scaling-factor 2.446
   --moe-router-num-groups 1
   --moe-router-group-topk 1
   --moe-aux-loss-coeff 0
   --moe-router-dtype fp32
   --moe-token-dispatcher-type alltoall
   --moe-grouped-gemm
   --moe-permute-fusion
)
