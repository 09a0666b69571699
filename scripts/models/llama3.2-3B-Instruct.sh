# shellcheck shell=bash disable=SC2034
# Llama-3.2-3B (-Instruct) in Megatron's flags; to be sourced. A fine-tuned model may have another rotary base (see its
# config.json): set MODEL_ARGS_ROTARY_BASE, or append the flag: MODEL_ARGS+=(--rotary-base 5000000), the last one wins.
# Proven: checked against published configs (llama3.2-3B-Instruct.json).
MODEL_ARGS=(
   --swiglu
   --num-layers 28
   --hidden-size 3072
   --ffn-hidden-size 8192
   --num-attention-heads 24
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-500000}"
   --use-rope-scaling
   --rope-scaling-factor 32.0
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --vocab-size 128256
   --max-position-embeddings 131072
)
