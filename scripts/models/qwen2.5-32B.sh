# shellcheck shell=bash disable=SC2034
# Qwen2.5-32B in Megatron's flags; to be sourced. A fine-tuned model may have another rotary base (see its
# config.json): set MODEL_ARGS_ROTARY_BASE, or append the flag: MODEL_ARGS+=(--rotary-base 5000000), the last one wins.
# Proven: checked against published configs (qwen2.5-32B.json).
MODEL_ARGS=(
   --swiglu
   --num-layers 64
   --hidden-size 5120
   --ffn-hidden-size 27648
   --num-attention-heads 40
   --group-query-attention
   --num-query-groups 8
   --add-qkv-bias
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --vocab-size 152064
   --max-position-embeddings 131072
   --untie-embeddings-and-output-weights
)
