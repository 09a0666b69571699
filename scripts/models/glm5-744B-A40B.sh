# shellcheck shell=bash disable=SC2034
# GLM-5 (744B-A40B) in Megatron's flags; to be sourced. MODEL_ARGS_ROTARY_BASE replaces the rotary base.
# slimrl does not support this model yet: it has no weight mapping for sparse attention (DSA).
# Proven: not run (unsupported: no weight mapping for sparse attention).
MODEL_ARGS=(
   --swiglu
   --num-layers 78
   --hidden-size 6144
   --ffn-hidden-size 12288
   --num-attention-heads 64
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --vocab-size 154880
   --max-position-embeddings 202752
   --untie-embeddings-and-output-weights

   --multi-latent-attention
   --q-lora-rank 2048
   --kv-lora-rank 512
   --qk-head-dim 192
   --qk-pos-emb-head-dim 64
   --v-head-dim 256
   --qk-layernorm
   --rope-type rope
   --experimental-attention-variant dsa
   --dsa-indexer-n-heads 32
   --dsa-indexer-head-dim 128
   --dsa-indexer-topk 2048

   --num-experts 256
   --moe-router-topk 8
   --moe-ffn-hidden-size 2048
   --moe-layer-freq "[0]*3+[1]*75"
   --moe-shared-expert-intermediate-size 2048
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
