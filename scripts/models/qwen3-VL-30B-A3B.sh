# shellcheck shell=bash disable=SC2034
# Qwen3-VL-30B-A3B in Megatron's flags; to be sourced. The sizes of its vision tower are read from config.json of
# --hf-checkpoint. A fine-tuned model may have another rotary base: set MODEL_ARGS_ROTARY_BASE, or append the flag.
# Proven: checked against published configs (qwen3-VL-30B-A3B.json).
MODEL_ARGS=(
   --swiglu
   --num-layers 48
   --hidden-size 2048
   --ffn-hidden-size 6144
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 4
   --kv-channels 128
   --qk-layernorm
   --position-embedding-type mrope
   --mrope-section 24 20 20
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-5000000}"
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --untie-embeddings-and-output-weights
   --vocab-size 151936
   --max-position-embeddings 262144

   --num-experts 128
   --moe-router-topk 8
   --moe-ffn-hidden-size 768
   --moe-layer-freq "[1]*48"
   --moe-router-score-function softmax
   --moe-aux-loss-coeff 0
   --moe-router-dtype fp32
   --moe-token-dispatcher-type alltoall
   --moe-grouped-gemm
   --moe-permute-fusion
)
