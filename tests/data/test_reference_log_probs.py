"""Folders of a reference's log-probabilities: what is found again, and what is never read."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from slimrl.data.reference_log_probs import ReferenceFolder, ReferenceIdentity, claim, folder_fault, sample_key

REFERENCE = ReferenceIdentity("a", {"rollout_temperature": 1.0, "moe_layer_freq": (True, False)}, "here")
TOKENS = np.arange(10)


def values(*numbers: float) -> np.ndarray:
    return np.array(numbers, dtype=np.float32)


def opened(folder: Path, identity: ReferenceIdentity = REFERENCE) -> ReferenceFolder:
    claim(folder, identity)
    return ReferenceFolder(folder, identity)


def found(folder: ReferenceFolder, *keys: bytes) -> list[list[float] | None]:
    return [None if entry is None else entry.tolist() for entry in folder.find(keys)]


def test_values_are_found_by_another_process_and_by_one_that_was_already_there(tmp_path):
    one, other = opened(tmp_path / "new"), opened(tmp_path / "new")
    keys = [sample_key(TOKENS, length) for length in (1, 2, 3)]
    one.add({keys[0]: values(-1), keys[1]: values(-2, -3)})
    one.add({keys[2]: values(-4, -5, -6)})
    one.add({})
    expected = [[-4, -5, -6], [-1], None, [-2, -3]]
    for folder in (one, other, opened(tmp_path / "new")):
        assert found(folder, keys[2], keys[0], sample_key(TOKENS, 4), keys[1]) == expected and len(folder) == 3
    assert len(list((tmp_path / "new").iterdir())) == 3


def test_key_is_the_content_of_a_sample():
    assert sample_key(TOKENS, 3) == sample_key(TOKENS.copy(), 3) and len(sample_key(TOKENS, 3)) == 16
    changed = TOKENS.copy()
    changed[0] = 7
    others = [sample_key(TOKENS, 4), sample_key(TOKENS[1:], 3), sample_key(TOKENS[:-1], 3), sample_key(changed, 3)]
    assert len({sample_key(TOKENS, 3), *others}) == 5
    assert sample_key(np.stack([TOKENS, changed], 1)[:, 0], 3) == sample_key(TOKENS, 3)


@pytest.mark.parametrize("damage", ["cut in the data", "cut in the header", "changed value", "changed key", "empty"])
def test_damaged_file_is_not_read_and_the_others_are(damage, tmp_path, caplog):
    keys = [sample_key(TOKENS, length) for length in (1, 2)]
    folder = opened(tmp_path)
    folder.add({keys[0]: values(-1)})
    (path,) = tmp_path.glob("*.safetensors")
    folder.add({keys[1]: values(-2, -3)})
    content = bytearray(path.read_bytes())
    if damage.startswith("changed"):
        place = content.index(values(-1).tobytes() if damage == "changed value" else keys[0])
        content[place] ^= 1
    path.write_bytes(content[: {"cut in the data": -1, "cut in the header": 20, "empty": 0}.get(damage, len(content))])
    with caplog.at_level(logging.WARNING):
        again = opened(tmp_path)
    assert found(again, *keys) == [None, [-2, -3]]
    assert [str(path) in record.message for record in caplog.records] == [True]
    again.add({keys[0]: values(-1)})
    assert found(opened(tmp_path), *keys) == [[-1], [-2, -3]]


def test_unfinished_file_of_a_killed_run_is_ignored(tmp_path, caplog):
    folder = opened(tmp_path)
    folder.add({sample_key(TOKENS, 1): values(-1)})
    (path,) = tmp_path.glob("*.safetensors")
    path.rename(tmp_path / f".{path.name}.12.tmp")
    (tmp_path / "reference.json").rename(tmp_path / ".reference.json.12.tmp")
    assert len(opened(tmp_path)) == 0 and caplog.records == []


def test_file_that_disappears_is_computed_again(tmp_path, caplog):
    folder = opened(tmp_path)
    key = sample_key(TOKENS, 1)
    folder.add({key: values(-1)})
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert found(folder, key) == [None] and "can no longer be read" in caplog.text and len(folder) == 0


def test_file_of_another_reference_that_was_copied_here_is_not_read(tmp_path, caplog):
    key, own = sample_key(TOKENS, 1), opened(tmp_path / "own")
    for name, other in (("weights", {"weights": "b"}), ("settings", {"settings": {"rollout_temperature": 0.5}})):
        identity = ReferenceIdentity(**({"weights": "a", "settings": REFERENCE.settings} | other))
        opened(tmp_path / name, identity).add({key: values(-1)})
        (path,) = (tmp_path / name).glob("*.safetensors")
        shutil.copy(path, tmp_path / "own")
    assert found(own, key) == [None]
    assert caplog.text.count("has log-probabilities of another reference and is not read") == 2


def test_folder_of_another_reference_is_refused(tmp_path):
    claim(tmp_path, REFERENCE)
    with pytest.raises(ValueError, match="than --ref-load there, of the weights that here had"):
        claim(tmp_path, ReferenceIdentity("b", REFERENCE.settings, "there"))
    settings = {"rollout_temperature": 1.0, "moe_layer_freq": [True, True], "bf16": True}
    assert folder_fault(tmp_path, settings) == (
        "has log-probabilities that were computed with other settings (bf16 is null there and true here; moe_layer_freq"
        " is [true, false] there and [true, true] here): give the same ones, or another folder"
    )
    with pytest.raises(ValueError, match="other settings"):
        claim(tmp_path, ReferenceIdentity("a", settings))
    claim(tmp_path, ReferenceIdentity("a", REFERENCE.settings, "a copy elsewhere"))


def test_values_that_cannot_be_written_are_left_out_with_one_warning(tmp_path, caplog):
    folder = opened(tmp_path / "ref")
    shutil.rmtree(tmp_path / "ref")
    (tmp_path / "ref").write_text("a file in its place")
    for length in (1, 2):
        folder.add({sample_key(TOKENS, length): values(*range(length))})
    assert len(folder) == 0 and caplog.text.count("the run continues without it") == 1


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    def write(first: int) -> None:
        folder = opened(tmp_path)
        for number in range(first, first + 20):
            folder.add({sample_key(TOKENS, number): values(number)})

    writers = [threading.Thread(target=write, args=(20 * number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    keys = [sample_key(TOKENS, number) for number in range(80)]
    assert found(opened(tmp_path), *keys) == [[number] for number in range(80)]
