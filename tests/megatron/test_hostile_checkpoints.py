"""Checkpoints that would run a program, or whose bytes changed, are rejected by every loading path of a trainer."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from slimrl.arguments import Arguments
from slimrl.weights.checkpoint_checksums import CHECKSUMS_NAME, CheckedFolder
from tests.megatron import ranks, tiny
from tests.megatron.launch import RankPool

pytestmark = pytest.mark.slow

DATA_STATE = {"offset": 3}
MANIFEST = "slimrl_checkpoint.json"


class Touch:
    """Unpickling it makes a file, as `touch` does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def unsealed(whole: Path, name: str) -> Path:
    """A copy without manifest and checksums, as an attacker would leave it."""
    folder = whole.with_name(name)
    shutil.copytree(whole, folder)
    for seal in (MANIFEST, CHECKSUMS_NAME):
        (folder / seal).unlink()
    return folder


def hostile_metadata(whole: Path, victim: Path) -> Path:
    folder = unsealed(whole, "metadata")
    (folder / ".metadata").write_bytes(pickle.dumps(Touch(victim)))
    return folder


def hostile_common(whole: Path, victim: Path) -> Path:
    import torch

    folder = unsealed(whole, "common")
    torch.save({"content_metadata": {"content": Touch(victim)}}, folder / "common.pt")
    return folder


def hostile_object(whole: Path, victim: Path) -> Path:
    """The random state, which is stored separately from the tensors."""
    import torch

    folder = unsealed(whole, "object")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    content = io.BytesIO()
    torch.save([Touch(victim)], content)
    (folder / "__9_0.distcp").write_bytes(content.getvalue())
    changed = 0
    for index, info in metadata.storage_data.items():
        if index.fqn.startswith("rng_state"):
            info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(content.getvalue())
            changed += 1
    assert changed
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def hostile_data_state(whole: Path, victim: Path) -> Path:
    import torch

    folder = unsealed(whole, "data_state")
    torch.save({"offset": Touch(victim)}, folder / "data_state.pt")
    return folder


def flipped(whole: Path, _: Path) -> Path:
    """Flips 4000 bytes of the tensor files without changing their lengths."""
    folder = whole.with_name("flipped")
    shutil.copytree(whole, folder)
    file = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    for place in random.Random(0).sample(range(2000, len(content)), 4000):
        content[place] ^= 0x20
    file.write_bytes(content)
    return folder


def flipped_objects(whole: Path, _: Path) -> Path:
    """Flips one byte of `common.pt`."""
    folder = whole.with_name("flipped_common")
    shutil.copytree(whole, folder)
    content = bytearray((folder / "common.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "common.pt").write_bytes(content)
    return folder


WAYS = {
    hostile_metadata: "metadata/.metadata asks for posix.system",
    hostile_common: "common.pt asks for posix.system",
    hostile_object: "rng_state/shard_0.0.0_1.1.1 asks for posix.system",
    hostile_data_state: "data_state.pt asks for posix.system",
    flipped: ".distcp is damaged, bytes ",
    flipped_objects: "common.pt is damaged, bytes 0 to",
}


def load_each(rank: int, world_size: int, init_method: str, args: Arguments) -> tuple[dict[str, str], str]:
    """Results of loading a genuine checkpoint, one without checksums, and each of `WAYS`; and the log."""
    import logging

    from slimrl.megatron.checkpoint import folder as folders
    from slimrl.megatron.checkpoint import start
    from slimrl.megatron.checkpoint import state as checkpoint

    log = io.StringIO()
    logging.getLogger("slimrl").addHandler(logging.StreamHandler(log))
    trainer = ranks.start(rank, world_size, init_method, args)
    trainer.train(0, ranks.share_of(trainer, tiny.recorded_rollout(0)))
    whole = trainer.save(0, DATA_STATE)
    trainer.finish_saves()
    log.truncate(0)
    state = trainer._training_state
    outcomes = {}

    def load(name: str, folder: Path) -> None:
        try:
            start.load_stages(trainer.stages, folder)
            found = folders.find_checkpoint(folder)
            data = checkpoint.load_training_state(state, found, load_optimizer=True, load_random_state=True)
            outcomes[name] = f"loaded {data}"
        except (ValueError, OSError) as error:
            outcomes[name] = str(error)

    load("genuine", whole)
    assert log.getvalue().strip("\0") == ""
    load("without checksums", unsealed(whole, "unsealed"))
    for make in WAYS:
        load(make.__name__, make(whole, whole.with_name("made")))
    trainer.close()
    return outcomes, log.getvalue()


@pytest.mark.parametrize("changes", [{}, {"async_save": True, "use_distributed_optimizer": True}], ids=str)
def test_hostile_or_damaged_checkpoint_is_rejected_without_running_code(
    models: Any, one_rank: RankPool, tmp_path: Path, changes: dict[str, Any]
):
    args = tiny.tiny_args(
        **(dict(ref_load=str(models.policy), hf_checkpoint=str(models.policy_hf), save=str(tmp_path)) | models.flags),
        **changes,
    )
    ((outcomes, log),) = one_rank.run(load_each, args)
    assert outcomes["genuine"] == outcomes["without checksums"] == f"loaded {DATA_STATE}"
    for way, complaint in WAYS.items():
        assert complaint in outcomes[way.__name__], outcomes
    assert not (tmp_path / "made").exists()
    assert f"{tmp_path}/unsealed has no checksums" in log
    whole = CheckedFolder.open(tmp_path / "iter_0000000")
    assert {".metadata", "common.pt", "metadata.json", "data_state.pt", "__0_0.distcp"} <= set(whole.names)
    whole.check()
