"""A checkpoint that would run a program when it is opened is rejected by name, and nothing is run."""

from __future__ import annotations

import collections
import enum
import io
import os
import pickle
import runpy
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.enums import ModelType
from torch.distributed.checkpoint.planner import WriteItemType

from slimrl.megatron.checkpoint.folder import read_data_state
from slimrl.weights.convert.torch_dist_reader import TorchDistCheckpoint
from slimrl.weights.convert.torch_dist_writer import Blueprint, Piece, Weight, write_torch_dist
from slimrl.weights.safe_pickle import UnsafePickleError, check_extra_state, load_plain, read_metadata
from tests.weights.models import save_tiny

ROOT = Path(__file__).resolve().parents[2]


class Touch:
    """Unpickling it makes a file, as `touch` does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of one tensor."""
    folder = tmp_path / "release"
    folder.mkdir()
    values = torch.arange(6.0).reshape(2, 3)
    weight = Weight("decoder.w", (Piece("decoder.w", (0, 0), (2, 3), (2, 3), values.dtype),), lambda read: [read])
    write_torch_dist(folder, Blueprint((weight,), {"decoder.x._extra_state": b"small"}), lambda _: values)
    return folder


def test_genuine_metadata_file_is_read_like_by_torch(checkpoint: Path):
    with (checkpoint / ".metadata").open("rb") as file:
        theirs = pickle.load(file)
    ours = read_metadata(checkpoint)
    assert ours.state_dict_metadata == theirs.state_dict_metadata and ours.storage_data == theirs.storage_data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.float16])
def test_every_dtype_is_part_of_the_format(checkpoint: Path, dtype: torch.dtype):
    metadata = read_metadata(checkpoint)
    metadata.state_dict_metadata["decoder.w"].properties.dtype = dtype
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    assert read_metadata(checkpoint).state_dict_metadata["decoder.w"].properties.dtype is dtype


@pytest.mark.parametrize("hidden_in", ["the whole", "an attribute", "an argument"])
def test_metadata_that_would_run_a_program_is_rejected_by_file_and_function(checkpoint: Path, hidden_in: str):
    victim = checkpoint.parent / "made"
    metadata = read_metadata(checkpoint)
    metadata.planner_data = {"x": Touch(victim)}
    bad = {
        "the whole": Touch(victim),
        "an attribute": metadata,
        "an argument": collections.OrderedDict(a=Touch(victim)),
    }[hidden_in]
    (checkpoint / ".metadata").write_bytes(pickle.dumps(bad))
    with pytest.raises(UnsafePickleError, match=r"release/\.metadata asks for posix\.system.*take the"):
        TorchDistCheckpoint(checkpoint)
    assert not victim.exists()
    pickle.loads((checkpoint / ".metadata").read_bytes())
    assert victim.exists()  # the genuine one


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch", "hub.load"),
        ("torch.storage", "_load_from_bytes"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("pathlib", "Path.write_text"),
    ],
)
def test_no_other_name_is_allowed_even_through_an_allowed_one(checkpoint: Path, module: str, name: str):
    call = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)) + b"\x93)R."
    (checkpoint / ".metadata").write_bytes(call)
    with pytest.raises(UnsafePickleError, match=f"asks for {module}.{name}"):
        read_metadata(checkpoint)


def asks_for_attribute(module: str, name: str, attribute: str) -> bytes:
    """getattr(module.name, attribute), which is how Python 3.11.0 to 3.11.3 write a member of an enum."""

    def word(text: str) -> bytes:
        return b"\x8c" + bytes([len(text)]) + text.encode()

    callable_ = word("builtins") + word("getattr") + b"\x93"
    return b"\x80\x04" + callable_ + word(module) + word(name) + b"\x93" + word(attribute) + b"\x86R."


def test_enum_member_of_early_python_releases_is_found(checkpoint: Path):
    written = asks_for_attribute("torch.distributed.checkpoint.planner", "WriteItemType", "SHARD")
    assert pickle.loads(written) is WriteItemType.SHARD
    (checkpoint / ".metadata").write_bytes(written)
    with pytest.raises(ValueError, match="it holds WriteItemType"):  # it was created, and is not metadata
        read_metadata(checkpoint)


@pytest.mark.parametrize(
    ("module", "name", "attribute"),
    [
        ("torch.distributed.checkpoint.planner", "WriteItemType", "__init_subclass__"),
        ("torch.distributed.checkpoint.planner", "WriteItemType", "mro"),
        ("collections", "OrderedDict", "pop"),
        ("pathlib", "Path", "write_text"),
    ],
)
def test_no_other_attribute_is_looked_up(checkpoint: Path, module: str, name: str, attribute: str):
    (checkpoint / ".metadata").write_bytes(asks_for_attribute(module, name, attribute))
    with pytest.raises(UnsafePickleError, match=r"asks for builtins\.getattr"):
        read_metadata(checkpoint)


@pytest.mark.parametrize("name", ["../../secret.distcp", "/etc/passwd", "a/b.distcp", "..", ""])
def test_metadata_that_places_a_tensor_outside_the_folder_is_rejected(checkpoint: Path, name: str):
    metadata = read_metadata(checkpoint)
    for info in metadata.storage_data.values():
        info.relative_path = name
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"\.metadata says that decoder.* is in .*no file of this folder"):
        read_metadata(checkpoint)


def test_any_damaged_metadata_is_reported_as_damaged(checkpoint: Path):
    whole = (checkpoint / ".metadata").read_bytes()
    refused = 0
    for place in range(0, len(whole), 3):
        (checkpoint / ".metadata").write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            read_metadata(checkpoint)
        except ValueError as error:
            assert ".metadata" in str(error)
            refused += 1
    assert refused > len(whole) // 12


def test_stored_objects_are_plain_data_or_rejected_by_function(tmp_path: Path):
    torch.save({"python": (3, (1, 2), None), "state": torch.ones(2)}, tmp_path / "good.pt")
    assert load_plain(tmp_path / "good.pt", "x")["python"] == (3, (1, 2), None)
    torch.save({"rng": Touch(tmp_path / "made")}, tmp_path / "data_state.pt")
    with pytest.raises(UnsafePickleError, match=r"data_state\.pt asks for posix\.system"):
        read_data_state(tmp_path)
    with pytest.raises(UnsafePickleError, match=r"the entry asks for posix\.system"):
        load_plain(io.BytesIO((tmp_path / "data_state.pt").read_bytes()), "the entry")
    assert not (tmp_path / "made").exists()


class Setting(enum.Enum):
    """A harmless class outside the table."""

    ON = 1


def through_a_file(value: object) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return load_plain(file, "the entry")


@pytest.mark.parametrize(
    "value",
    [
        numpy.float64(1.5),
        numpy.int64(-3),
        numpy.bool_(True),
        numpy.float32(0.25),
        numpy.str_("a"),
        ModelType.encoder_or_decoder,
    ],
)
def test_numpy_numbers_and_plain_classes_are_allowed_stored_objects(value: object):
    found = through_a_file({"value": value})["value"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("factory", [int, list])
def test_defaultdict_is_read_as_a_dict(factory: type):
    assert through_a_file([collections.defaultdict(factory, a=factory())]) == [{"a": factory()}]


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", "c16", "U2"])
def test_numpy_arrays_are_allowed_stored_objects(dtype: str):
    value = numpy.array([[0, 1], [1, 0]]).astype(dtype)
    found = through_a_file(value)
    assert found.dtype == value.dtype and numpy.array_equal(found, value)


def test_unknown_class_is_rejected_by_name_with_advice():
    with pytest.raises(
        UnsafePickleError, match=r"the entry asks for \S+\.Setting, which.*with plain values in that"
    ) as error:
        through_a_file({"value": Setting.ON, "n": numpy.float64(1.0), "d": collections.defaultdict(int)})
    assert "numpy" not in str(error.value) and "defaultdict" not in str(error.value)


class _Attribute:
    """Is written as a call of getattr with an allowed class."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (collections.OrderedDict, self.name)


@pytest.mark.parametrize("name", ["fromkeys", "__init__", "absent"])
def test_attribute_of_anything_but_an_enum_is_rejected(name: str):
    with pytest.raises(UnsafePickleError, match="getattr of something else than an enum"):
        through_a_file({"value": _Attribute(name)})


def test_object_array_is_rejected_without_advice_to_run_it():
    with pytest.raises(UnsafePickleError, match=r"the entry asks for more than plain data \(.*ObjectDType") as error:
        through_a_file(numpy.array([{}], dtype=object))
    assert "weights_only" not in str(error.value)


def test_allow_list_is_not_extended_globally():
    before = set(torch.serialization.get_safe_globals())
    through_a_file(numpy.float64(1.0))
    assert set(torch.serialization.get_safe_globals()) == before


def test_module_state_is_tensors_and_numbers_or_rejected(tmp_path: Path):
    def as_bytes(state: object) -> torch.Tensor:
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    check_extra_state(as_bytes({"scale_fwd": torch.ones(3), "recipe": {"margin": 0}}), "x")
    check_extra_state(torch.empty(0, dtype=torch.uint8), "x")
    inner = io.BytesIO()
    torch.save(Touch(tmp_path / "made"), inner)

    class Nested:
        def __reduce__(self):
            return torch.storage._load_from_bytes, (inner.getvalue(),)

    for state in (Touch(tmp_path / "made"), Nested()):
        with pytest.raises(UnsafePickleError, match=r"layer\._extra_state asks for posix\.system"):
            check_extra_state(as_bytes({"recipe": state}), "layer._extra_state")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("tool", "flags"),
    [
        ("check_checkpoint.py", ("--hf-checkpoint",)),
        ("convert_torch_dist_to_hf.py", ("--output-dir", "new", "--origin-hf-dir")),
    ],
)
def test_tools_reject_a_checkpoint_that_would_run_a_program(
    checkpoint: Path, tool: str, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    root = checkpoint.parent
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Touch(root / "made")))
    hf = save_tiny(root / "hf", "qwen3", tied=True)
    main = runpy.run_path(str(ROOT / "tools" / tool))["main"]
    flags = tuple(str(root / "new") if flag == "new" else flag for flag in flags)
    assert main(["--input-dir", str(checkpoint), *flags, str(hf)]) == 2
    assert ".metadata asks for posix.system" in capsys.readouterr().err
    assert not (root / "made").exists()
