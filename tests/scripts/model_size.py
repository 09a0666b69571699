"""Parameter counts in closed form, from Megatron flags only: independent of slimrl's own tables."""

from __future__ import annotations

from slimrl.arguments import Arguments


def parameters(args: Arguments) -> tuple[int, int]:
    """(all parameters, those that one token meets); buffers such as the router's bias are not counted.

    `active` excludes the experts that were not chosen, and the input embedding if the output has its own (it is a
    lookup, not a multiplication).
    """
    hidden = args.hidden_size
    embedding = args.vocab_size * hidden
    total = active = embedding + hidden  # the final norm
    if args.untie_embeddings_and_output_weights:
        total += embedding
    for layer in range(args.num_layers):
        every_token = 2 * hidden + hidden * (args.post_self_attn_layernorm + args.post_mlp_layernorm)
        every_token += _linear_attention(args) if _is_linear(args, layer) else _attention(args)
        total += every_token
        active += every_token
        if _has_experts(args, layer):
            expert, shared = 3 * hidden * args.moe_ffn_hidden_size, _beside_the_experts(args)
            total += args.num_experts * expert + shared
            active += args.moe_router_topk * expert + shared
        else:
            total += 3 * hidden * args.ffn_hidden_size
            active += 3 * hidden * args.ffn_hidden_size
    return total, active


def tower_parameters(config: dict[str, int] | None) -> int:
    """Of the vision tower of Qwen2.5-VL or Qwen3-VL, from its config; 0 without one."""
    if config is not None and "deepstack_visual_indexes" in config:
        return _tower_of_levels(config)
    if config is None or "fullatt_block_indexes" not in config:
        return 0
    width, inner, merged = config["hidden_size"], config["intermediate_size"], 4 * config["hidden_size"]
    attention = 4 * width * (width + 1)
    feed_forward = 3 * width * inner + 2 * inner + width
    block = attention + feed_forward + 2 * width
    merger = width + merged * (merged + 1) + config["out_hidden_size"] * (merged + 1)
    return 3 * 2 * 14 * 14 * width + config["depth"] * block + merger


def _tower_of_levels(config: dict[str, int]) -> int:
    """Patches and positions with biases, blocks with layer norms, and a merger for the output and for each level."""
    width, inner, merged = config["hidden_size"], config["intermediate_size"], 4 * config["hidden_size"]
    block = 4 * width * (width + 1) + (2 * width + 1) * inner + width + 4 * width
    merger = merged * (merged + 1) + config["out_hidden_size"] * (merged + 1)
    mergers = merger + 2 * width + len(config["deepstack_visual_indexes"]) * (merger + 2 * merged)
    embedded = (3 * 2 * 16 * 16 + 1 + config["num_position_embeddings"]) * width
    return embedded + config["depth"] * block + mergers


def _attention(args: Arguments) -> int:
    if args.multi_latent_attention:
        return _latent_attention(args)
    hidden, width = args.hidden_size, args.kv_channels or args.hidden_size // args.num_attention_heads
    heads, groups = args.num_attention_heads, args.num_query_groups or args.num_attention_heads
    queries = heads * width * (2 if args.attention_output_gate else 1)
    count = hidden * (queries + 2 * groups * width) + heads * width * hidden
    if args.add_qkv_bias:
        count += (heads + 2 * groups) * width
    return count + (2 * width if args.qk_layernorm else 0)


def _latent_attention(args: Arguments) -> int:
    """Down projections to the latents, their norms, and up projections to all heads, of queries, keys and values."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    width = args.qk_head_dim + args.qk_pos_emb_head_dim
    latent = args.q_lora_rank
    count = hidden * heads * width if latent is None else latent * (hidden + 1 + heads * width)
    count += hidden * (args.kv_lora_rank + args.qk_pos_emb_head_dim) + args.kv_lora_rank
    count += args.kv_lora_rank * heads * (args.qk_head_dim + args.v_head_dim) + heads * args.v_head_dim * hidden
    if args.experimental_attention_variant == "dsa":
        indexer, width = args.dsa_indexer_n_heads, args.dsa_indexer_head_dim
        count += args.q_lora_rank * indexer * width + hidden * width + 2 * width + hidden * indexer
    return count


def _linear_attention(args: Arguments) -> int:
    """Gated delta rule: queries, keys, values and their gate; two scalars per head; convolution, norm, output."""
    hidden, value_heads = args.hidden_size, args.linear_num_value_heads
    keys, values = args.linear_num_key_heads * args.linear_key_head_dim, value_heads * args.linear_value_head_dim
    into = hidden * (2 * keys + 2 * values + 2 * value_heads) + (2 * keys + values) * args.linear_conv_kernel_dim
    return into + 2 * value_heads + args.linear_value_head_dim + values * hidden


def _beside_the_experts(args: Arguments) -> int:
    """The router, and the shared expert with its gate."""
    shared = args.moe_shared_expert_intermediate_size or 0
    gate = args.hidden_size if args.moe_shared_expert_gate else 0
    return args.hidden_size * args.num_experts + 3 * args.hidden_size * shared + gate


def _is_linear(args: Arguments, layer: int) -> bool:
    return args.linear_attention_freq is not None and (layer + 1) % args.linear_attention_freq != 0


def _has_experts(args: Arguments, layer: int) -> bool:
    if args.num_experts is None:
        return False
    pattern = args.moe_layer_freq
    return layer % pattern == 0 if isinstance(pattern, int) else pattern[layer] == 1
