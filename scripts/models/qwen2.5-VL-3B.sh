# shellcheck shell=bash disable=SC2034
# Qwen2.5-VL-3B in Megatron's flags; to be sourced. The sizes of its vision tower are read from config.json of
# --hf-checkpoint. A fine-tuned model may have another rotary base: set MODEL_ARGS_ROTARY_BASE, or append the flag.
# Proven: checked against published configs (qwen2.5-VL-3B.json).
MODEL_ARGS=(
   --swiglu
   --num-layers 36
   --hidden-size 2048
   --ffn-hidden-size 11008
   --num-attention-heads 16
   --group-query-attention
   --num-query-groups 2
   --add-qkv-bias
   --position-embedding-type mrope
   --mrope-section 16 24 24
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --vocab-size 151936
   --max-position-embeddings 128000
)
