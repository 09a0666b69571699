"""Flags of megatron-core for kinds of models that slimrl has no family for; each is refused with the reason."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag

_MAMBA = "Mamba layers have no table of weights here; use a transformer"
_BLOCKS = "layers of one's own shape each have no table of weights here; use a model of equal layers"
_MROPE = "multimodal models have no table of weights here; use the text model"
_LOOP = "it is megatron-core's own switch for its tests; leave it out"


@dataclasses.dataclass
class OtherModelArguments:
    """Models and modes of megatron-core that are not served."""

    is_hybrid_model: bool = flag(False, "a model with Mamba layers", not_served=_MAMBA)
    mamba_state_dim: int = flag(128, "Mamba: width of the state", not_served=_MAMBA)
    mamba_head_dim: int = flag(64, "Mamba: width of a head", not_served=_MAMBA)
    mamba_num_groups: int = flag(8, "Mamba: groups (count)", not_served=_MAMBA)
    mamba_num_heads: int | None = flag(None, "Mamba: heads (count)", not_served=_MAMBA)
    use_mamba_mem_eff_path: bool = flag(
        True,
        "Mamba: plain instead of memory saving kernel",
        only_off=True,
        off=("--disable-mamba-mem-eff-path",),
        not_served=_MAMBA,
    )
    heterogeneous_block_specs: bool = flag(False, "layers described one by one in a file", not_served=_BLOCKS)
    hetereogenous_dist_checkpoint: bool = flag(False, "store each layer under a key of its own", not_served=_BLOCKS)
    mrope_section: list[int] | None = flag(
        None, "rotary channels of time, height and width", nargs="+", not_served=_MROPE
    )
    mtp_standalone: bool = flag(False, "next-token layers on a pipeline stage of their own", not_served="leave it out")
    init_model_with_meta_device: bool = flag(
        False,
        "make weights without memory first",
        not_served="weights are loaded before Megatron-FSDP shares them out; leave it out",
    )
    test_mode: bool = flag(False, "megatron-core's test mode", not_served=_LOOP)
    config_logger_dir: str = flag("", "folder for megatron-core's log of configurations", not_served=_LOOP)
