# shellcheck shell=bash disable=SC2034
# Qwen2.5-3B in Megatron's flags; to be sourced. A fine-tuned model may have another rotary base (see its
# config.json): set MODEL_ARGS_ROTARY_BASE, or append the flag: MODEL_ARGS+=(--rotary-base 5000000), the last one wins.
# Proven: checked against published configs (qwen2.5-3B.json).
MODEL_ARGS=(
   --swiglu
   --num-layers 36
   --hidden-size 2048
   --ffn-hidden-size 11008
   --num-attention-heads 16
   --group-query-attention
   --num-query-groups 2
   --add-qkv-bias
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --vocab-size 151936
   --max-position-embeddings 32768
)
