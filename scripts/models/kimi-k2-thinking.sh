# shellcheck shell=bash disable=SC2034
# Kimi-K2-Thinking in Megatron's flags; to be sourced. MODEL_ARGS_ROTARY_BASE replaces the rotary base.
# Unlike DeepSeek-V3, its YaRN has beta_fast 1: with Megatron's 32 log-probabilities differ from the server's.
# Proven: checked against published configs (kimi-k2-thinking.json).
MODEL_ARGS=(
   --swiglu
   --num-layers 61
   --hidden-size 7168
   --ffn-hidden-size 18432
   --num-attention-heads 64
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-50000}"
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --vocab-size 163840
   --max-position-embeddings 262144
   --untie-embeddings-and-output-weights

   --multi-latent-attention
   --q-lora-rank 1536
   --kv-lora-rank 512
   --qk-head-dim 128
   --qk-pos-emb-head-dim 64
   --v-head-dim 128
   --qk-layernorm
   --rotary-scaling-factor 64
   --beta-fast 1
   --mscale 1.0
   --mscale-all-dim 1.0

   --num-experts 384
   --moe-router-topk 8
   --moe-ffn-hidden-size 2048
   --moe-layer-freq "[0]*1+[1]*60"
   --moe-shared-expert-intermediate-size 2048
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-router-topk-scaling-factor 2.827
   --moe-router-num-groups 1
   --moe-router-group-topk 1
   --moe-aux-loss-coeff 0
   --moe-router-dtype fp32
   --moe-token-dispatcher-type alltoall
   --moe-grouped-gemm
   --moe-permute-fusion
)
