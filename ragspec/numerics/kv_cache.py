"""The KV cache: one pool of slots for all sequences, allocated in pages of 16.

A slot holds one position of one sequence, in every layer. Pages serve to find free slots and to read keys; a sequence's positions
may lie in any order of slots, so keeping a path through a tree only changes its slot list and copies nothing.

Sequences and the prefix cache hold slots. A slot without holders is free; a page is free when all its 16 slots are.
"""

import functools
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.disk import saving
from ragspec.errors import EngineError
from ragspec.numerics.attention import PAGE, AttentionShape, Ints, padded
from ragspec.numerics.compiled import address_of, array_at, compiled, inner
from ragspec.numerics.torch.transfer import to_device, to_host


def _zeros_on_disk(folder: Path, shape: tuple[int, ...], dtype: type[np.generic]) -> Any:
    """An array in a file without a name: nobody else can open it, and it ends with the process. Raises: SaveError.

    Why all of its room is taken now: a later write on a full disk would end the process.
    """
    with saving(folder), tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, math.prod(shape) * np.dtype(dtype).itemsize)
        return np.asarray(np.memmap(file, dtype, "r+", shape=shape))


class OutOfSlots(Exception):
    """The pool has no free page; the scheduler evicts or preempts, users never see this."""


class KvPool:
    """The slots of one target. Memory: `2 * layers * KV heads * padded head_dim` numbers a slot, touched when used.

    `allocate`: zeros of a layer where a device has them, with a spare page; None: numbers of `dtype` in main memory, where uint16
    holds bfloat16. `folder`: has a file for the numbers, which the system pages.

    Raises: SaveError if the disk of `folder` has no room for all slots.
    """

    def __init__(
        self,
        layers: list[AttentionShape],
        num_slots: int,
        allocate: Callable[[int], Any] | None = None,
        dtype: type[np.generic] = np.float32,
        folder: str = "",
    ) -> None:
        self.num_pages = -(-num_slots // PAGE)
        self.num_slots = self.num_pages * PAGE
        self.shapes, self._widths = layers, [s.num_kv_heads * padded(s.head_dim) for s in layers]
        self._is_on_device = allocate is not None
        zeros = functools.partial(_zeros_on_disk, Path(folder)) if folder else np.zeros
        self.keys, self.values = (self._layers(self._widths, allocate, zeros, dtype) for _ in range(2))
        self.stamps = np.zeros(self.num_slots, np.int64)
        """A slot's stamp rises when the slot gets a new position: data stored beside the slot is then outdated."""
        self._holders = np.zeros(self.num_slots, np.int32)
        self._held_in_page = np.zeros(self.num_pages, np.int32)
        self._free_pages = list(range(self.num_pages - 1, -1, -1))

    def _layers(
        self,
        widths: list[int],
        allocate: Callable[[int], Any] | None,
        zeros: Callable[..., Any],
        dtype: type[np.generic],
    ) -> Any:
        """One array a layer; layers alike are rows of one array. Shapes: [slots * width] each."""
        if allocate is not None:
            return [allocate((self.num_slots + PAGE) * width) for width in widths]
        if len(set(widths)) == 1:
            return zeros((len(widths), self.num_slots * widths[0]), dtype)
        return [zeros((self.num_slots * width,), dtype) for width in widths]

    def fits(self, layer: int, shape: AttentionShape) -> bool:
        """Whether a layer's shape is the one that the pool was made for."""
        return self._widths[layer] == shape.num_kv_heads * padded(shape.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of a slot in all layers."""
        return 2 * sum(self._widths) * int(self.keys[0].itemsize)

    def read(self, slots: Ints) -> NDArray[np.uint8]:
        """The bytes of some slots on the host. Shapes: int32 [T] -> [T, token_bytes]."""
        rows = [array[index].reshape(len(slots), -1) for array, index in self._places(slots)]
        if self._is_on_device:
            return to_host(torch.cat(rows, 1).view(torch.uint8))
        return np.concatenate(rows, 1).view(np.uint8)

    def keys_of(self, layer: int, head: int, slots: Ints) -> NDArray[np.float32]:
        """The rotated keys of one KV head in some slots, on the host. Shapes: int32 [T] -> [T, padded head_dim]."""
        dims = self.shapes[layer].num_kv_heads, padded(self.shapes[layer].head_dim)
        if self._is_on_device:
            index = to_device(slots.astype(np.int64), self.keys[0].device)
            return to_host(self.keys[layer].view(-1, *dims)[index, head].float())
        rows = self.keys[layer].reshape(-1, *dims, PAGE)[slots // PAGE, head, :, slots % PAGE]
        return np.asarray((rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows)

    def write(self, slots: Ints, rows: NDArray[np.uint8]) -> None:
        """Put back what `read` gave, into any slots. Shapes: int32 [T], [T, token_bytes]."""
        first: Any = self.keys[0]
        numbers: Any = (to_device(rows, first.device) if self._is_on_device else rows).view(first.dtype)
        end = 0
        for array, index in self._places(slots):
            heads, dim = array.shape[1], array.shape[2]
            begin, end = end, end + heads * dim
            array[index] = numbers[:, begin:end].reshape(-1, heads, dim)

    def _places(self, slots: Ints) -> Iterator[tuple[Any, Any]]:
        """The keys, then the values of each layer as an array, and an index under which it has [T, KV heads, padded head_dim]."""
        dims = [(s.num_kv_heads, padded(s.head_dim)) for s in self.shapes]
        if self._is_on_device:
            index = to_device(slots.astype(np.int64), self.keys[0].device)
            yield from ((layer.view(-1, *dim), index) for layer, dim in zip(self.keys, dims, strict=True))
            yield from ((layer.view(-1, *dim), index) for layer, dim in zip(self.values, dims, strict=True))
            return
        pages, lanes, whole = slots // PAGE, slots % PAGE, slice(None)
        for layer, dim in zip(self.keys, dims, strict=True):
            yield layer.reshape(-1, *dim, PAGE), (pages, whole, whole, lanes)
        for layer, (heads, width) in zip(self.values, dims, strict=True):
            yield layer.reshape(-1, heads, PAGE, width).swapaxes(2, 3), (pages, whole, whole, lanes)

    @property
    def spare_slot(self) -> int:
        """On a device: a slot that no sequence has, for the rows that pad a forward."""
        return self.num_slots

    @property
    def num_free_pages(self) -> int:
        return len(self._free_pages)

    def take_page(self) -> int:
        """A free page; the taker holds all its slots. Raises: OutOfSlots."""
        if not self._free_pages:
            raise OutOfSlots
        page = self._free_pages.pop()
        self._holders[page * PAGE : (page + 1) * PAGE] = 1
        self.stamps[page * PAGE : (page + 1) * PAGE] += 1
        self._held_in_page[page] = PAGE
        return page

    def hold(self, slots: Ints) -> None:
        """Add a holder to each of these slots, which must have a holder already."""
        assert (self._holders[slots] > 0).all()
        self._holders[slots] += 1

    def num_freed_pages(self, slots: Ints, num_dropped: Counter[int]) -> int:
        """Pages that would be freed if each of these distinct slots lost a holder.

        `num_dropped`: slots of each page that lose their last one; counts those of earlier calls, and gets these.
        """
        pages, counts = np.unique(slots[self._holders[slots] == 1] // PAGE, return_counts=True)
        num_dropped.update(dict(zip(pages.tolist(), counts.tolist(), strict=True)))
        return sum(num_dropped[page] == self._held_in_page[page] for page in pages.tolist())

    def all_shared(self, slots: Ints) -> bool:
        """Whether each of these slots has more than one holder."""
        return bool((self._holders[slots] > 1).all())

    def release(self, slots: Ints) -> None:
        """Remove one holder from each of these distinct slots."""
        self._holders[slots] -= 1
        freed = slots[self._holders[slots] == 0]
        if not len(freed):
            return
        pages, counts = np.unique(freed // PAGE, return_counts=True)
        self._held_in_page[pages] -= counts.astype(np.int32)
        self._free_pages.extend(pages[self._held_in_page[pages] == 0].tolist())

    def check_integrity(self, held: Iterable[Ints]) -> None:
        """Compare the holders of every slot with `held`, the slots of each holder; free pages must have no holder.

        Raises: EngineError that names the first slot, or the pages, that differ.
        """
        expected = np.zeros(self.num_slots, np.int32)
        for slots in held:
            expected[slots] += 1
        wrong = np.flatnonzero(expected != self._holders)
        if len(wrong):
            slot = int(wrong[0])
            raise EngineError(f"KV slot {slot} counts {self._holders[slot]} holders and has {expected[slot]}")
        held_in_page = np.count_nonzero(expected.reshape(-1, PAGE), axis=1)
        is_counted = np.array_equal(held_in_page, self._held_in_page)
        if not is_counted or sorted(self._free_pages) != np.flatnonzero(held_in_page == 0).tolist():
            raise EngineError("the free pages of the KV pool are not the pages without holders")


_ADDRESS, _ROOM, LENGTH, _NUM_SPARE, NUM_PAGES, _NUM_COLUMNS = range(6)
"""Columns at `SequenceSlots.address`: where its arrays lie, how long each is, and how much of them is in use."""


@inner
def arrays_at(address: int) -> Any:
    """In compiled code: a sequence's state, and its arrays: slots, index, spare indices, pages."""
    state = array_at(address, (_NUM_COLUMNS,), np.int64)
    slots, index, spare, pages = array_at(state[_ADDRESS], (4, state[_ROOM]), np.int32)
    return state, slots, index, spare, pages


@compiled(nogil=True)
def reserve_rows(addresses: Any, row_start: Any, slots: Any, index: Any) -> None:
    """Reserve the rows [row_start[n], row_start[n + 1]) for sequence n, which has room for them.

    Shapes: addresses int64 [B], row_start int64 [B + 1]; slots, index int32 [N].
    """
    for n, address in enumerate(addresses):
        state, _, _, spare, pages = arrays_at(address)
        assert row_start[n + 1] - row_start[n] <= state[_NUM_SPARE]
        for row in range(row_start[n], row_start[n + 1]):
            state[_NUM_SPARE] -= 1
            index[row] = spare[state[_NUM_SPARE]]
            slots[row] = pages[index[row] // PAGE] * PAGE + index[row] % PAGE


@compiled(nogil=True)
def keep_rows(
    addresses: Any, row_start: Any, slots: Any, index: Any, num_known: Any, chosen: Any, chosen_start: Any
) -> None:
    """Keep each sequence's first `num_known` rows, then its `chosen` rows, in this order, as its next positions; all other rows
    are spare again. Shapes: as in `reserve_rows`; num_known int64 [B], chosen_start int64 [B + 1]."""
    for n, address in enumerate(addresses):
        state, own_slots, own_index, spare, _ = arrays_at(address)
        first, is_kept = row_start[n], np.zeros(row_start[n + 1] - row_start[n], np.bool_)
        for k in range(num_known[n] + chosen_start[n + 1] - chosen_start[n]):
            row, at = k if k < num_known[n] else chosen[chosen_start[n] + k - num_known[n]], state[LENGTH]
            own_slots[at], own_index[at] = slots[first + row], index[first + row]
            state[LENGTH], is_kept[row] = at + 1, True
        for row in range(len(is_kept) - 1, -1, -1):
            if not is_kept[row]:
                spare[state[_NUM_SPARE]] = index[first + row]
                state[_NUM_SPARE] += 1


class SequenceSlots:
    """One sequence's part of the pool, in arrays that compiled code reads and writes at `address`.

    `slots[p]` is where logical position p lives, `index[p]` the same as rank of its page in `pages` * 16 + lane. Positions
    [0, length) are kept; slots reserved for a step are kept or given back at its end. Spare slots are indices in own pages,
    falling: the lowest are taken first. The arrays have room for the slots of all pages; with more pages they move, `address`
    stays.
    """

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self._state = np.zeros(_NUM_COLUMNS, np.int64)
        self.address = address_of(self._state)
        self._arrays = np.empty((4, 0), np.int32)
        self._num_shared = 0
        self._make_room(1)

    def _make_room(self, num_pages: int) -> None:
        """Arrays for so many pages: twice as long as before, or longer."""
        room = self._arrays.shape[1]
        if num_pages * PAGE <= room:
            return
        arrays = np.empty((4, max(num_pages * PAGE, 2 * room)), np.int32)
        arrays[:, :room] = self._arrays
        self._arrays = arrays
        self._slots, self._index, self._spare, self._pages = arrays
        self._state[_ADDRESS], self._state[_ROOM] = address_of(arrays), arrays.shape[1]

    @property
    def length(self) -> int:
        return int(self._state.item(LENGTH))

    @property
    def slots(self) -> Ints:
        return self._slots[: self.length]

    @property
    def index(self) -> Ints:
        return self._index[: self.length]

    @property
    def pages(self) -> Ints:
        return self._pages[: self._state.item(NUM_PAGES)]

    def share(self, slots: Ints) -> None:
        """Start from the slots of a prefix that is already computed."""
        assert self.length == 0 and not len(self.pages)
        self.pool.hold(slots)
        pages, rank = np.unique(slots // PAGE, return_inverse=True)
        self._make_room(len(pages))
        self._pages[: len(pages)], self._slots[: len(slots)] = pages, slots
        self._index[: len(slots)] = rank * PAGE + slots % PAGE
        self._state[NUM_PAGES], self._state[LENGTH], self._num_shared = len(pages), len(slots), len(slots)

    def num_new_pages(self, num_slots: int) -> int:
        """Pages that `reserve(num_slots)` would take."""
        return -(-max(0, num_slots - self._state.item(_NUM_SPARE)) // PAGE)

    def take_pages(self, num_slots: int) -> None:
        """Take the pages that reserving so many slots needs. Raises: OutOfSlots, with nothing taken."""
        needed, first = self.num_new_pages(num_slots), self._state.item(NUM_PAGES)
        if needed > self.pool.num_free_pages:
            raise OutOfSlots
        if needed:
            self._make_room(first + needed)
            self._pages[first : first + needed] = [self.pool.take_page() for _ in range(needed)]
            self._state[NUM_PAGES] += needed
            self._add_spare(np.arange(first * PAGE, (first + needed) * PAGE, dtype=np.int32))

    def reserve(self, num_slots: int) -> tuple[Ints, Ints]:
        """Slots for the rows of one step: (slots, index). Raises: OutOfSlots, with nothing taken."""
        self.take_pages(num_slots)
        slots, index = np.empty(num_slots, np.int32), np.empty(num_slots, np.int32)
        reserve_rows(np.array([self.address]), np.array([0, num_slots]), slots, index)
        return slots, index

    def keep(self, slots: Ints, index: Ints, chosen: list[int]) -> None:
        """Keep `chosen` of one step's reserved slots, in this order, as the next positions; all others are spare again."""
        rows = np.zeros(1, np.int64), np.array(chosen, np.int64), np.array([0, len(chosen)])
        keep_rows(np.array([self.address]), np.array([0, len(slots)]), slots, index, *rows)

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` positions, which include all shared positions."""
        assert self._num_shared <= length <= self.length
        self.pool.stamps[self.slots[length:]] += 1
        self._add_spare(self.index[length:])
        self._state[LENGTH] = length

    def _add_spare(self, indices: Ints) -> None:
        num = self._state.item(_NUM_SPARE) + len(indices)
        self._spare[:num] = np.sort(np.concatenate([self._spare[: self._state.item(_NUM_SPARE)], indices]))[::-1]
        self._state[_NUM_SPARE] = num

    def held_slots(self) -> Ints:
        """Every slot that this sequence holds: the shared ones, and all slots of its own pages."""
        shared = self.slots[: self._num_shared]
        own = self.pages[~np.isin(self.pages, np.unique(shared // PAGE))]
        slots = own[:, None] * PAGE + np.arange(PAGE)  # [pages, 16]
        return np.concatenate([shared, slots.reshape(-1)]).astype(np.int32)

    def release(self) -> None:
        """Give everything back."""
        self.pool.release(self.held_slots())
        self._state[LENGTH] = self._state[_NUM_SPARE] = self._state[NUM_PAGES] = self._num_shared = 0
