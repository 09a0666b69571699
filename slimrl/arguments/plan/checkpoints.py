"""Which checkpoints a run will start from: looks at folders and names, never into tensors.

Says the same as the trainer's own search (`slimrl.megatron.checkpoint_folder`), without torch. The rules have passed,
so whatever is named is there.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from slimrl.arguments.checkpoint_files import REPLACED, TRACKER_NAME, folder_name, is_hf_model, iteration_of, placed
from slimrl.arguments.namespace import Arguments

_COMPLETE = "metadata.json"


@dataclasses.dataclass(frozen=True)
class Found:
    """One checkpoint; `iteration` is the last rollout it was trained on, None for a converted model."""

    folder: Path
    iteration: int | None

    @property
    def name(self) -> str:
        """What it is, in words."""
        return "weights to start from" if self.iteration is None else f"after rollout {self.iteration}"


@dataclasses.dataclass(frozen=True)
class Start:
    """Where the weights come from and with which rollout the run begins.

    `resumed` is True where optimizer and random state go on too; `reference` is None where no reference is needed;
    `load` is --load as given.
    """

    weights: Found | None
    flag: str
    reference: Found | None
    first_rollout: int
    resumed: bool
    load: str | None

    @property
    def sentence(self) -> str:
        """Where the run begins, for its log."""
        if self.resumed:
            return f"resuming from {self.weights.folder} with rollout {self.first_rollout}"
        source = f"a fresh start from {self.flag} {self.weights.folder}, with rollout {self.first_rollout}"
        if self.flag == "--load" or self.load is None:
            return source
        return f"--load {self.load} holds no checkpoint yet: {source}"


def find(folder: str | None, step: int | None) -> Found | None:
    """The checkpoint in `folder`: iteration `step`, or the one that its tracker file names; None for a fresh folder."""
    if folder is None:
        return None
    root = Path(folder)
    if (root / _COMPLETE).is_file():
        return Found(root, iteration_of(root.name.removesuffix(REPLACED)))
    if is_hf_model(root):
        return Found(root, None)
    if step is None:
        tracker = root / TRACKER_NAME
        if not tracker.is_file():
            return None
        name = tracker.read_text().strip()
        step = None if name == "release" else int(name)
    return Found(placed(root, folder_name(step)) or root / folder_name(step), step)


def start_of(args: Arguments) -> Start:
    """From checked flags: --load where it holds a checkpoint, else --ref-load."""
    reference = find(args.ref_load, args.ref_ckpt_step)
    loaded = find(args.load, args.ckpt_step)
    resumed = loaded is not None and loaded.iteration is not None and not args.finetune
    first = loaded.iteration + 1 if resumed else 0
    return Start(
        weights=loaded or reference,
        flag="--ref-load" if loaded is None else "--load",
        reference=reference if args.use_reference and not args.only_evaluates else None,
        first_rollout=first if args.start_rollout_id is None else args.start_rollout_id,
        resumed=resumed,
        load=args.load,
    )
