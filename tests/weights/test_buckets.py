"""Bucketing: bounded, gapless, in order, each tensor once."""

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from slimrl.weights.update.buckets import BucketSpace, DoubleBuffer, ReusedBuffer, iter_buckets

CPU = torch.device("cpu")


def test_tensors_are_contiguous_and_only_the_last_bucket_is_marked_last():
    tensors = [("a", torch.arange(3.0)), ("b", torch.arange(2.0).view(2, 1)), ("c", torch.arange(4.0))]
    seen = []
    for bucket in iter_buckets(iter(tensors), 20, ReusedBuffer(CPU)):
        seen.append(([(e.name, e.shape, e.start, e.end) for e in bucket.entries], bucket.flat.numel(), bucket.last))
    assert seen == [([("a", (3,), 0, 12), ("b", (2, 1), 12, 20)], 20, False), ([("c", (4,), 0, 16)], 16, True)]


def test_tensor_larger_than_the_bucket_is_sent_alone():
    sizes = [("small", 2), ("large", 100), ("next", 2)]
    tensors = ((name, torch.ones(n)) for name, n in sizes)
    names = [[e.name for e in bucket.entries] for bucket in iter_buckets(tensors, 16, ReusedBuffer(CPU))]
    assert names == [["small"], ["large"], ["next"]]


def test_buffer_memory_is_reused():
    tensors = ((str(n), torch.full((4,), float(n))) for n in range(5))
    places = {bucket.flat.data_ptr() for bucket in iter_buckets(tensors, 16, ReusedBuffer(CPU))}
    assert len(places) == 1


def test_tensor_of_a_wider_dtype_is_aligned():
    tensors = [("half", torch.ones(3, dtype=torch.bfloat16)), ("full", torch.full((2,), 1.5))]
    for bucket in iter_buckets(iter(tensors), 64, ReusedBuffer(CPU)):
        for name, tensor in bucket.tensors():
            assert torch.equal(tensor, dict(tensors)[name])


def test_invalid_sizes_and_an_empty_model_are_rejected():
    with pytest.raises(ValueError, match="--update-weight-buffer-size is 0"):
        next(iter_buckets(iter([("a", torch.ones(1))]), 0, ReusedBuffer(CPU)))
    with pytest.raises(ValueError, match="no weights"):
        next(iter_buckets(iter([]), 8, ReusedBuffer(CPU)))


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.float64])), min_size=1
    ),
    st.integers(1, 100),
)
def test_every_tensor_arrives_once_in_order_unchanged(specs, max_bytes):
    tensors = [(str(i), torch.randn(n, dtype=torch.float64).to(dtype)) for i, (n, dtype) in enumerate(specs)]
    arrived, lasts = [], []
    for bucket in iter_buckets(iter(tensors), max_bytes, ReusedBuffer(CPU)):
        assert bucket.flat.numel() <= max_bytes or len(bucket.entries) == 1
        arrived += [(name, tensor.clone()) for name, tensor in bucket.tensors()]
        lasts.append(bucket.last)
    assert [name for name, _ in arrived] == [name for name, _ in tensors]
    assert all(a.dtype == b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(arrived, tensors, strict=True))
    assert lasts == [False] * (len(lasts) - 1) + [True]


def test_grouped_tensors_share_a_bucket_even_when_it_is_too_small():
    shared = torch.empty(3)

    def tensors():
        for number, name in enumerate(("a", "b", "c", "d")):  # each one overwrites the previous one, as exporters may
            yield name, shared.fill_(number)

    for max_bytes, expected in ((24, [["a"], ["b", "c"], ["d"]]), (12, [["a"], ["b", "c"], ["d"]])):
        names, values = [], {}
        for bucket in iter_buckets(tensors(), max_bytes, ReusedBuffer(CPU), fuse_with_next={"b"}):
            names.append([entry.name for entry in bucket.entries])
            values |= {name: tensor[0].item() for name, tensor in bucket.tensors()}
        assert names == expected and values == {"a": 0, "b": 1, "c": 2, "d": 3}
    with pytest.raises(ValueError, match="d must be in the same bucket as the next tensor"):
        list(iter_buckets(tensors(), 64, ReusedBuffer(CPU), fuse_with_next={"d"}))


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40), st.booleans()), min_size=1),
    st.integers(1, 1000),
    st.integers(0, 3),
)
@example([(1, 1, False), (2, 1, True)], 25, 2)  # the second row begins at 4 bytes
@example([(1, 4, True)] * 3, 1000, 1)  # the row after a fused tensor must not be joined in that tensor's place
def test_rows_joined_in_the_bucket_itself_arrive_unchanged(rows, max_bytes, fused):
    expected = {f"{row}.{part}": row + part / 4 for row, (parts, _, _) in enumerate(rows) for part in range(parts)}
    places = []

    def tensors(space: BucketSpace):
        """As an exporter: the parts of a row are joined in the memory that it is given, or are the model's own."""
        for row, (parts, length, joined) in enumerate(rows):
            memory = space.take(parts * length * 4) if joined else torch.empty(parts * length * 4, dtype=torch.uint8)
            for part, tensor in enumerate(memory.view(torch.float32).view(parts, length)):
                tensor.fill_(row + part / 4)
                places.append(tensor.data_ptr())
            for part, tensor in enumerate(memory.view(torch.float32).view(parts, length)):
                yield f"{row}.{part}", tensor

    space = BucketSpace(CPU)
    together = {f"{fused}.0"} - {f"{len(rows) - 1}.{rows[-1][0] - 1}"}  # not the last one
    arrived, opened = {}, set()
    for bucket in iter_buckets(tensors(space), max_bytes, ReusedBuffer(CPU), together, space=space):
        for name, tensor in bucket.tensors():
            assert tensor.eq(expected[name]).all()
            arrived[name] = tensor[0].item()
            opened.add(tensor.data_ptr())
    assert arrived == expected and list(arrived) == list(expected)
    if max_bytes > 8 * sum(parts * length for parts, length, _ in rows) and not together & expected.keys():
        # one bucket, and every row but the first one is written where it is sent, if it begins at a multiple of 8 bytes
        starts = itertools.accumulate(parts * length for parts, length, _ in rows)  # in elements, of the next row
        own = [row[0] for row, start in zip(rows[1:], starts, strict=False) if row[2] and start % 2 == 0]
        assert len(opened & set(places)) >= sum(own)


def test_tensors_that_receivers_open_take_no_room():
    tensors = {name: torch.full((4,), float(number)) for number, name in enumerate("abcde")}
    opens = lambda tensor: tensor[0] in (0.0, 1.0, 3.0)  # noqa: E731
    found = list(iter_buckets(tensors.items(), 16, DoubleBuffer(*[ReusedBuffer(CPU)] * 2), opens=opens))
    assert [[entry.name for entry in bucket.entries] for bucket in found] == [["a", "b", "c", "d"], ["e"]]
    assert [(bucket.flat.numel(), bucket.nbytes) for bucket in found] == [(16, 64), (16, 16)]
    first = dict(found[0].tensors())
    assert all(first[name].data_ptr() == tensors[name].data_ptr() for name in "abd")


def test_two_buffers_alternate_from_the_first():
    class Named:
        def __init__(self, value: int) -> None:
            self.value = value

        def take(self, num_bytes: int) -> torch.Tensor:
            return torch.full((num_bytes,), self.value, dtype=torch.uint8)

    both = DoubleBuffer(Named(1), Named(2))
    assert [int(both.take(1)) for _ in range(3)] == [1, 2, 1]
    both.rewind()
    assert int(both.take(1)) == 1
