# shellcheck shell=bash disable=SC2034
# Qwen3.5-9B (text) in Megatron's flags; to be sourced. A fine-tuned model may have another rotary base (see its
# config.json): append the flag, the last one wins, MODEL_ARGS+=(--rotary-base 5000000), or set MODEL_ARGS_ROTARY_BASE.
# slimrl refuses this model for now: it has no table of weights for layers of linear attention.
# Proven: not run (refused: no table of weights for linear attention).
MODEL_ARGS=(
   --swiglu
   --num-layers 32
   --hidden-size 4096
   --ffn-hidden-size 12288
   --num-attention-heads 16
   --group-query-attention
   --num-query-groups 4
   --kv-channels 256
   --qk-layernorm
   --attention-output-gate
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000000}"
   --rotary-percent 0.25
   --apply-layernorm-1p
   --disable-bias-linear
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --vocab-size 248320
   --max-position-embeddings 262144
   --untie-embeddings-and-output-weights

   --experimental-attention-variant gated_delta_net
   --linear-attention-freq 4
   --linear-conv-kernel-dim 4
   --linear-key-head-dim 128
   --linear-value-head-dim 128
   --linear-num-key-heads 16
   --linear-num-value-heads 32
)
