# shellcheck shell=bash disable=SC2034
# GLM-4.5 (355B-A32B) in Megatron's flags; to be sourced. MODEL_ARGS_ROTARY_BASE replaces the rotary base.
# Proven: checked against published configs (glm4.5-355B-A32B.json).
MODEL_ARGS=(
   --swiglu
   --num-layers 92
   --hidden-size 5120
   --ffn-hidden-size 12288
   --num-attention-heads 96
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --add-qkv-bias
   --qk-layernorm
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --rotary-percent 0.5
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --vocab-size 151552
   --max-position-embeddings 131072
   --untie-embeddings-and-output-weights

   --num-experts 160
   --moe-router-topk 8
   --moe-ffn-hidden-size 1536
   --moe-layer-freq "[0]*3+[1]*89"
   --moe-shared-expert-intermediate-size 1536
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-router-topk-scaling-factor 2.5
   --moe-aux-loss-coeff 0
   --moe-router-dtype fp32
   --moe-token-dispatcher-type alltoall
   --moe-grouped-gemm
   --moe-permute-fusion
)
