# shellcheck shell=bash disable=SC2034
# GLM-4.5-Air (106B-A12B) in Megatron's flags; to be sourced. MODEL_ARGS_ROTARY_BASE replaces the rotary base.
# Proven: checked against published configs (glm4.5-106B-A12B.json).
MODEL_ARGS=(
   --swiglu
   --num-layers 46
   --hidden-size 4096
   --ffn-hidden-size 10944
   --num-attention-heads 96
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --add-qkv-bias
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --rotary-percent 0.5
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --vocab-size 151552
   --max-position-embeddings 131072
   --untie-embeddings-and-output-weights

   --num-experts 128
   --moe-router-topk 8
   --moe-ffn-hidden-size 1408
   --moe-layer-freq "[0]*1+[1]*45"
   --moe-shared-expert-intermediate-size 1408
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-aux-loss-coeff 0
   --moe-router-dtype fp32
   --moe-token-dispatcher-type alltoall
   --moe-grouped-gemm
   --moe-permute-fusion
)
