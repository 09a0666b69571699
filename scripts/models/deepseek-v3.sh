# shellcheck shell=bash disable=SC2034
# DeepSeek-V3 and DeepSeek-R1 in Megatron's flags; to be sourced. MODEL_ARGS_ROTARY_BASE replaces the rotary base.
# MODEL_ARGS_NUM_LAYERS keeps only the first N layers, of which three are dense.
# Proven: checked against published configs (deepseek-v3.json).
MODEL_ARGS=(
   --swiglu
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-61}"
   --hidden-size 7168
   --ffn-hidden-size 18432
   --num-attention-heads 128
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000}"
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --vocab-size 129280
   --max-position-embeddings 163840
   --untie-embeddings-and-output-weights

   --multi-latent-attention
   --q-lora-rank 1536
   --kv-lora-rank 512
   --qk-head-dim 128
   --qk-pos-emb-head-dim 64
   --v-head-dim 128
   --qk-layernorm
   --rotary-scaling-factor 40
   --mscale 1.0
   --mscale-all-dim 1.0

   --num-experts 256
   --moe-router-topk 8
   --moe-ffn-hidden-size 2048
   --moe-layer-freq "[0]*3+[1]*$((${MODEL_ARGS_NUM_LAYERS:-61} - 3))"
   --moe-shared-expert-intermediate-size 2048
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-router-topk-scaling-factor 2.5
   --moe-router-num-groups 8
   --moe-router-group-topk 4
   --moe-aux-loss-coeff 0
   --moe-router-dtype fp32
   --moe-token-dispatcher-type alltoall
   --moe-grouped-gemm
   --moe-permute-fusion
)
