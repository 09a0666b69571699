# shellcheck shell=bash disable=SC2034
# Qwen3-VL-4B in Megatron's flags; to be sourced. The sizes of its vision tower are read from config.json of
# --hf-checkpoint. A fine-tuned model may have another rotary base: set MODEL_ARGS_ROTARY_BASE, or append the flag.
# Proven: checked against published configs (qwen3-VL-4B.json).
MODEL_ARGS=(
   --swiglu
   --num-layers 36
   --hidden-size 2560
   --ffn-hidden-size 9728
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --qk-layernorm
   --position-embedding-type mrope
   --mrope-section 24 20 20
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-5000000}"
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --vocab-size 151936
   --max-position-embeddings 262144
)
