"""Turns the pages of an anonymous file into large ones (2 MiB), which other processes map almost for free.

A receiver maps a bucket anew each time, and with pages of 4 KiB that costs it more than the copying: it was measured to
read 6 GB/s instead of 16. Large pages are asked for explicitly (Linux 6.1 and later), so that the machine's setting for
shared memory, mostly "never", does not matter. Called by the shared-memory buffer.
"""

from __future__ import annotations

import ctypes
import mmap
import os

LARGE = 2 * 1024**2
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def collapse(descriptor: int, begin: int) -> int:
    """Collapses what has been written of the file from byte `begin` on, in whole large pages; returns their end.

    The file must have been written from its start without gaps, and nobody may be reading. Content stays as it is, also
    where the kernel has no large pages to give: then the file merely keeps its small ones.
    """
    end = os.fstat(descriptor).st_blocks * 512 // LARGE * LARGE
    if end <= begin:
        return begin
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    # a mapping at a multiple of the large page: reserved with room to spare, then laid into that
    reserved = libc.mmap(None, end - begin + LARGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _FAILED:
        return end
    start = -(-reserved // LARGE) * LARGE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mmap(start, end - begin, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor, begin) != _FAILED:
        libc.madvise(start, end - begin, _MADV_COLLAPSE)
    libc.munmap(reserved, end - begin + LARGE)
    return end
