"""Flags of rotary positions, in Megatron-LM's spelling."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class PositionArguments:
    """Rotary positions and their scaling to long contexts."""

    position_embedding_type: str = flag(
        "rope",
        "kind of position embedding",
        choices=("rope", "yarn", "none", "learned_absolute", "mrope", "relative"),
        not_served="every family here has rotary positions; leave it out",
        served=("yarn",),
    )
    add_position_embedding: bool = flag(
        True,
        "older way to say that no positions are learned; rotary positions stay",
        only_off=True,
        off=("--no-position-embedding",),
    )
    use_rotary_position_embeddings: bool = flag(False, "older spelling of --position-embedding-type rope")
    rotary_base: int = flag(10000, "theta of the rotary embedding", at_least=1)
    rotary_percent: float = flag(1.0, "part of each head that is rotated (fraction)", above=0, at_most=1)
    rotary_interleaved: bool = flag(False, "rotate neighbouring channels instead of the two halves")
    rotary_seq_len_interpolation_factor: int | None = flag(
        None,
        "positions are divided by this (linear interpolation; none)",
        at_least=1,
        not_served="no family here stretches positions that way; leave it out",
    )
    use_rope_scaling: bool = flag(False, "Llama 3 scaling of the rotary frequencies")
    rope_scaling_factor: float = flag(8.0, "factor of --use-rope-scaling", at_least=1)
    rope_type: str | None = flag(
        None, "MLA: plain or YaRN rotary positions (yarn with --multi-latent-attention)", choices=("rope", "yarn")
    )
    rotary_scaling_factor: float = flag(1.0, "YaRN: how much longer than in pre-training contexts are", at_least=1)
    original_max_position_embeddings: int = flag(4096, "YaRN: context of the pre-training (tokens)", at_least=1)
    beta_fast: float = flag(32.0, "YaRN: channels with more turns than this in a context stay as they are", above=0)
    beta_slow: float = flag(1.0, "YaRN: channels with fewer turns than this are stretched in full", above=0)
    mscale: float = flag(1.0, "YaRN: factor of the attention temperature")
    mscale_all_dim: float = flag(0.0, "YaRN: the same over all channels (0: none)")
