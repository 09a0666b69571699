# shellcheck shell=bash disable=SC2034
# GLM-4.7-Flash (30B-A3B) in Megatron's flags; to be sourced. MODEL_ARGS_ROTARY_BASE replaces the rotary base.
# Proven: checked against published configs (glm4.7-30B-A3B.json).
MODEL_ARGS=(
   --swiglu
   --num-layers 47
   --hidden-size 2048
   --ffn-hidden-size 10240
   --num-attention-heads 20
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --vocab-size 154880
   --max-position-embeddings 202752
   --untie-embeddings-and-output-weights

   --multi-latent-attention
   --q-lora-rank 768
   --kv-lora-rank 512
   --qk-head-dim 192
   --qk-pos-emb-head-dim 64
   --v-head-dim 256
   --qk-layernorm
   --rope-type rope

   --num-experts 64
   --moe-router-topk 4
   --moe-ffn-hidden-size 1536
   --moe-layer-freq "[0]*1+[1]*46"
   --moe-shared-expert-intermediate-size 1536
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-router-topk-scaling-factor 1.8
   --moe-aux-loss-coeff 0
   --moe-router-dtype fp32
   --moe-token-dispatcher-type alltoall
   --moe-grouped-gemm
   --moe-permute-fusion
)
