"""Flags of on-policy distillation and of a teacher."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag

_OPD = "distillation is not served in this version; use --use-kl-loss with the teacher as --ref-load"


@dataclasses.dataclass
class DistillationArguments:
    """On-policy distillation."""

    use_opd: bool = flag(False, "learn from a teacher's log-probabilities", not_served=_OPD)
    opd_type: str | None = flag(None, "where the teacher runs", choices=("sglang", "megatron"), not_served=_OPD)
    opd_kl_coef: float = flag(1.0, "weight of the reverse KL to the teacher", not_served=_OPD)
    opd_teacher_load: str | None = flag(None, "the teacher's checkpoint", not_served=_OPD)
    opd_teacher_ckpt_step: int | None = flag(None, "iteration to read from it", not_served=_OPD)
