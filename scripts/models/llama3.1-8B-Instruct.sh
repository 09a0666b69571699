# shellcheck shell=bash disable=SC2034
# Llama-3.1-8B (-Instruct) in Megatron's flags; to be sourced. A fine-tuned model may have another rotary base (see its
# config.json): set MODEL_ARGS_ROTARY_BASE, or append the flag: MODEL_ARGS+=(--rotary-base 5000000), the last one wins.
# Proven: checked against published configs (llama3.1-8B-Instruct.json).
MODEL_ARGS=(
   --swiglu
   --num-layers 32
   --hidden-size 4096
   --ffn-hidden-size 14336
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-500000}"
   --use-rope-scaling
   --rope-scaling-factor 8.0
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --vocab-size 128256
   --max-position-embeddings 131072
   --untie-embeddings-and-output-weights
)
