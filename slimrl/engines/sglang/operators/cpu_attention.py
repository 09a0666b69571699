"""Attention of a server on a CPU, batched over requests: reads the paged KV cache of SGLang's torch-native backend.

SGLang's own functions call torch's attention once per request and layer, and give each call as many queries as the
request has keys. Here one token per request (`Ragged`, float32) takes two calls of sparse kernels, which read keys and
values where they lie; several tokens, and half precision, are cut into blocks of queries (`Group`), and blocks of
similar size share one call. The size to which anything is padded depends on its request alone, and torch computes the
rows of a sparse matrix and the members of a batch one by one, so a request's result is the same bits whatever else is
in the batch.

`install` is called by `cpu_patches` in the server's process. SGLang's functions still run for encoders, cross
attention, attention without a causal mask, models with separate caches of window and full layers, and unknown options.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

QUERIES_PER_BLOCK = 64
LEAST_KEYS = 32
ALIGNMENT = 64
CHUNK_BYTES = 1 << 20  # keys of one call, so that they stay in the core's cache until they are multiplied
KEPT_MASK = 1 << 20  # numbers in the mask of a group that is kept for the next layers
OPTIONS = {"scaling", "enable_gqa", "causal", "is_cross_attn", "sliding_window_size"}  # that this module knows


class Block(NamedTuple):
    """Consecutive queries of one request, and the keys [first_key, end_key) that the last of them sees."""

    request: int
    first_query: int
    queries: int
    first_key: int
    end_key: int


@dataclasses.dataclass(frozen=True)
class Group:
    """Blocks that are padded to the same number of queries and of keys.

    `slots` [blocks, keys]: where the keys lie in the cache. `rows` [blocks, queries]: which of all queries these are;
    a padded one repeats the block's last. `positions` [blocks, queries] of the queries within `slots`. `outputs`: which
    of the flattened padded queries are real, and `targets`, which of all queries these are.
    """

    slots: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    outputs: torch.Tensor
    targets: torch.Tensor
    window: int | None

    def mask(self, start: int, stop: int) -> torch.Tensor:
        """[blocks, queries, keys] of 0 where a query sees a key, else -inf."""
        kept = self._whole_mask
        return self._mask(start, stop) if kept is None else kept[start:stop]

    @functools.cached_property
    def _whole_mask(self) -> torch.Tensor | None:
        blocks, queries = self.rows.shape
        fits = blocks * queries * self.slots.shape[1] <= KEPT_MASK
        return self._mask(0, blocks) if fits else None

    def _mask(self, start: int, stop: int) -> torch.Tensor:
        positions = self.positions[start:stop, :, None]
        keys = torch.arange(self.slots.shape[1])
        hidden = keys > positions
        if self.window is not None:
            hidden |= keys < positions - self.window
        return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def padded_keys(keys: int) -> int:
    """`keys` rounded up to one of four sizes per doubling, at most a quarter too many, and never below LEAST_KEYS."""
    step = max(LEAST_KEYS, 1 << max(keys.bit_length() - 3, 0))
    return -(-keys // step) * step


def blocks_of(lengths: Sequence[int], new: Sequence[int], window: int | None) -> Iterator[Block]:
    """The blocks of requests with `lengths` tokens, the last `new` of which are queries; queries lie in their order.

    With `window`, keys that none of a block's queries sees are left out.
    """
    first_query = 0
    for request, (length, queries) in enumerate(zip(lengths, new, strict=True)):
        for start in range(0, queries, QUERIES_PER_BLOCK):
            count = min(QUERIES_PER_BLOCK, queries - start)
            position = length - queries + start
            first_key = 0 if window is None else max(0, position - window)
            yield Block(request, first_query + start, count, first_key, position + count)
        first_query += queries


def groups_of(blocks: Iterator[Block], tables: torch.Tensor, requests: torch.Tensor, window: int | None) -> list[Group]:
    """The blocks in groups of equal padded size. `tables` [all requests, tokens]: slots of the tokens of `requests`."""
    shared: dict[tuple[int, int], list[Block]] = {}
    for block in blocks:
        queries = 1 << (block.queries - 1).bit_length()
        shared.setdefault((queries, padded_keys(block.end_key - block.first_key)), []).append(block)
    return [_group(members, *size, tables, requests, window) for size, members in shared.items()]


def _group(
    members: list[Block], queries: int, keys: int, tables: torch.Tensor, requests: torch.Tensor, window: int | None
) -> Group:
    request, first_query, count, first_key, end_key = torch.tensor(members).T[:, :, None]
    first, end = first_key[:, 0], end_key[:, 0]
    slots, _ = _slots(tables, requests[request[:, 0]], first, end, torch.full_like(first, keys))
    real = torch.arange(queries) < count
    within = torch.minimum(torch.arange(queries), count - 1)
    row, position = first_query + within, end_key - first_key - count + within
    return Group(slots.view(-1, keys), row, position, real.flatten().nonzero()[:, 0], row[real], window)


def attend(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    groups: Sequence[Group],
    scaling: float | None,
) -> None:
    """Writes the attention of `query` [queries, heads, size] over the cached keys into `output` [.., .., value size].

    `k_cache` [slots, KV heads, size], `v_cache` [slots, KV heads, value size].
    """
    size, value_size = k_cache.shape[2], v_cache.shape[2]
    # the products of one block must begin at addresses that are as aligned as those of any other
    numbers = ALIGNMENT // query.element_size()
    width = -(-max(size, value_size) // numbers) * numbers
    scale = size**-0.5 if scaling is None else scaling
    within_keys = _is_front_of(v_cache, k_cache)
    for group in groups:
        blocks, keys = group.slots.shape
        step = max(1, CHUNK_BYTES // (keys * k_cache.shape[1] * width * query.element_size()))
        results = []
        for start in range(0, blocks, step):
            stop = min(start + step, blocks)
            slots = group.slots[start:stop].flatten()
            key = _gathered(k_cache, slots, stop - start, query.dtype, width)
            value = key if within_keys else _gathered(v_cache, slots, stop - start, query.dtype, width)
            rows = query[group.rows[start:stop].flatten()]
            if size < width:
                rows = torch.nn.functional.pad(rows, (0, width - size))
            rows = rows.view(stop - start, -1, *rows.shape[1:])
            results.append(_attention(rows, key, value, group.mask(start, stop).to(query.dtype), scale))
        output[group.targets] = torch.cat(results).flatten(0, 1)[group.outputs, :, :value_size]


@dataclasses.dataclass(frozen=True)
class Ragged:
    """One query per request: a sparse matrix with a row per query and head, and a column per slot and KV head.

    Rows are sorted by their padded number of keys; `order` of the requests. `pattern` has the matrix and room for its
    scores, which every layer overwrites. `mask` [entries] is -inf where a row is padded, else 0. `parts`: first and
    last entry of the rows with the same number of keys, and this number.
    """

    order: torch.Tensor
    pattern: torch.Tensor
    mask: torch.Tensor
    parts: list[tuple[int, int, int]]


def ragged_of(
    lengths: Sequence[int],
    tables: torch.Tensor,
    requests: torch.Tensor,
    window: int | None,
    cache: torch.Tensor,
    heads: int,
) -> Ragged:
    """The matrix of requests with `lengths` tokens for keys as in `cache` [slots, KV heads, size].

    `tables` [all requests, tokens]: slots of the tokens of `requests`.
    """
    kv_heads = cache.shape[1]
    first_keys = [0 if window is None else max(0, length - 1 - window) for length in lengths]
    sizes = [padded_keys(length - first) for length, first in zip(lengths, first_keys, strict=True)]
    ordered = sorted(range(len(lengths)), key=sizes.__getitem__)
    order = torch.tensor(ordered)
    bounds = torch.tensor([(first_keys[one], lengths[one], sizes[one]) for one in ordered])
    slots, padding = _slots(tables, requests[order], *bounds.T)
    entries = len(slots) * heads
    columns, mask, parts = torch.empty(entries, dtype=torch.int32), torch.empty(entries), []
    kv_head = (torch.arange(heads, dtype=torch.int32) // (heads // kv_heads))[:, None]
    start = 0
    for keys, members in itertools.groupby(sizes[one] for one in ordered):
        stop = start + keys * len(list(members))
        shape, part = (-1, heads, keys), slice(start * heads, stop * heads)
        torch.add(kv_head, slots[start:stop].view(-1, 1, keys), alpha=kv_heads, out=columns[part].view(shape))
        mask[part].view(shape).copy_(padding[start:stop].view(-1, 1, keys))
        parts.append((part.start, part.stop, keys))
        start = stop
    pattern = torch.sparse_csr_tensor(
        torch.nn.functional.pad(bounds[:, 2].repeat_interleave(heads).cumsum(0), (1, 0)).int(),
        columns,
        torch.zeros(entries),
        size=(len(lengths) * heads, cache.shape[0] * kv_heads),
        check_invariants=False,
    )
    return Ragged(order, pattern, mask, parts)


def _slots(
    tables: torch.Tensor, rows: torch.Tensor, first: torch.Tensor, end: torch.Tensor, sizes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of the tokens [first, end) of every row, each padded to its size, one row after another; -inf where padded.

    Padding repeats the first token, whose values are finite: 0 times what another slot holds could be NaN.
    """
    row = torch.repeat_interleave(sizes)  # index_select takes a quarter of the time of indexing
    offsets = torch.arange(len(row)).sub_((sizes.cumsum(0) - sizes).index_select(0, row))
    hidden = offsets >= (end - first).index_select(0, row)
    places = (rows * tables.shape[1] + first).index_select(0, row).add_(offsets.masked_fill_(hidden, 0))
    return tables.view(-1).index_select(0, places), torch.zeros(len(row)).masked_fill_(hidden, float("-inf"))


def attend_ragged(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    ragged: Ragged,
    scaling: float | None,
) -> None:
    """As `attend` for one query of every request, in float32."""
    heads, size = query.shape[1:]
    scale = size**-0.5 if scaling is None else scaling
    keys = k_cache.view(-1, size)
    values = keys if _is_front_of(v_cache, k_cache) else v_cache.view(-1, v_cache.shape[2])
    pattern = ragged.pattern
    rows = query[ragged.order].view(-1, size)
    scores = pattern.values().copy_(ragged.mask)
    torch.sparse.sampled_addmm(pattern, rows, keys.t(), alpha=scale, out=pattern)  # adds to what the pattern holds
    weights = torch.empty_like(scores)
    for start, stop, count in ragged.parts:
        torch.softmax(scores[start:stop].view(-1, count), -1, out=weights[start:stop].view(-1, count))
    result = torch.nn.functional.embedding_bag(
        pattern.col_indices(),
        values,
        pattern.crow_indices(),
        mode="sum",
        per_sample_weights=weights,
        include_last_offset=True,
    )
    output[ragged.order] = result.view(len(ragged.order), heads, -1)[..., : v_cache.shape[2]]


def _is_front_of(v_cache: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Latent attention: the values are the first numbers of the keys."""
    return v_cache.data_ptr() == k_cache.data_ptr() and v_cache.stride() == k_cache.stride()


def _gathered(cache: torch.Tensor, slots: torch.Tensor, blocks: int, dtype: torch.dtype, width: int) -> torch.Tensor:
    """[blocks, KV heads, keys, width] of the cache."""
    chosen = cache.index_select(0, slots).to(dtype)
    if cache.shape[2] < width:
        chosen = torch.nn.functional.pad(chosen, (0, width - cache.shape[2]))
    return chosen.view(blocks, -1, *chosen.shape[1:]).transpose(1, 2)


def _attention(
    rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """`rows` [blocks, queries, heads, size] over `key` and `value` [blocks, KV heads, keys, size]; as `rows`."""
    blocks, queries, heads, size = rows.shape
    kv_heads, shared = key.shape[1], heads // key.shape[1]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    if queries == 1:  # the heads that share a KV head are the rows of one product
        result, _ = flash(
            rows.view(blocks, kv_heads, shared, size),
            key,
            value,
            attn_mask=mask[:, None].expand(-1, 1, shared, -1),
            scale=scale,
        )
        return result.reshape(blocks, 1, heads, size)
    by_head = rows.transpose(1, 2)
    if kv_heads == 1:
        key, value, shared = key.expand(-1, heads, -1, -1), value.expand(-1, heads, -1, -1), 1
    result = torch.empty_like(by_head)
    for head in range(shared):
        part, _ = flash(by_head[:, head::shared], key, value, attn_mask=mask[:, None], scale=scale)
        result[:, head::shared] = part
    return result.transpose(1, 2)


def install(backend: Any) -> None:
    """Puts the batched attention into SGLang's class of the torch-native backend, in front of its own functions."""
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    backend.init_forward_metadata = _forgetting(backend.init_forward_metadata)
    backend._run_sdpa_forward_decode = _decode(backend._run_sdpa_forward_decode)
    backend._run_sdpa_forward_extend = _extend(backend._run_sdpa_forward_extend)


def _forgetting(own: Callable[..., None]) -> Callable[..., None]:
    """`init_forward_metadata`, after which the groups of the batch before are not used again."""

    def init_forward_metadata(self: Any, forward_batch: Any) -> None:
        own(self, forward_batch)
        self.forward_metadata = None

    return init_forward_metadata


def _decode(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`_run_sdpa_forward_decode`: the last token of every request is its query."""

    def run(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        tables = (req_to_token, req_pool_indices, seq_lens)
        if not _covered(self, query, encoder_lens, options):
            return own(self, query, output, k_cache, v_cache, *tables, encoder_lens, **options)
        window, scaling = options.get("sliding_window_size"), options.get("scaling")
        if query.dtype == k_cache.dtype == torch.float32:
            ragged = _shared_by_layers(
                self,
                seq_lens,
                ("ragged", window, k_cache.shape, query.shape[1]),
                lambda: ragged_of(seq_lens.tolist(), req_to_token, req_pool_indices, window, k_cache, query.shape[1]),
            )
            attend_ragged(query, output, k_cache, v_cache, ragged, scaling)
        else:
            groups = _groups(self, tables, torch.ones_like(seq_lens), window)
            attend(query, output, k_cache, v_cache, groups, scaling)
        return output

    return run


def _extend(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`_run_sdpa_forward_extend`: new tokens behind a prefix that is cached, or behind none."""

    def run(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        tables = (req_to_token, req_pool_indices, seq_lens)
        if not (_covered(self, query, encoder_lens, options) and options.get("causal")):
            lengths = (extend_prefix_lens, extend_seq_lens, encoder_lens)
            return own(self, query, output, k_cache, v_cache, *tables, *lengths, **options)
        groups = _groups(self, tables, extend_seq_lens, options.get("sliding_window_size"))
        attend(query, output, k_cache, v_cache, groups, options.get("scaling"))
        return output

    return run


def _covered(backend: Any, query: torch.Tensor, encoder_lens: torch.Tensor | None, options: dict[str, Any]) -> bool:
    known = options.keys() <= OPTIONS and query.device.type == "cpu" and encoder_lens is None
    return known and not (options.get("is_cross_attn") or backend.use_sliding_window_kv_pool)


def _groups(
    backend: Any, tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor], new: torch.Tensor, window: int | None
) -> list[Group]:
    req_to_token, req_pool_indices, seq_lens = tables

    def make() -> list[Group]:
        blocks = blocks_of(seq_lens.tolist(), new.tolist(), window)
        return groups_of(blocks, req_to_token, req_pool_indices, window)

    return _shared_by_layers(backend, seq_lens, ("groups", window), make)


def _shared_by_layers(backend: Any, seq_lens: torch.Tensor, key: Any, make: Callable[[], Any]) -> Any:
    """What `make` gives for this batch, made by the first layer that asks for `key`."""
    known = backend.forward_metadata
    if not isinstance(known, dict) or known["seq_lens"] is not seq_lens or not known["lengths"].equal(seq_lens):
        known = backend.forward_metadata = {"seq_lens": seq_lens, "lengths": seq_lens.clone()}
    if key not in known:
        known[key] = make()
    return known[key]
