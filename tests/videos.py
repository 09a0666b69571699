"""Video files for tests."""

from __future__ import annotations

import io

import numpy as np


def video(frames: int, width: int, height: int, *, rate: int = 8, seed: int = 0, codec: str = "libx264") -> bytes:
    """An mp4 file of a moving square on noise."""
    import av

    buffer = io.BytesIO()
    draw = np.random.default_rng(seed)
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            pixels = draw.integers(0, 80, (height, width, 3), dtype=np.uint8)
            at = number * max(1, (width - 12)) // frames
            pixels[8:20, at : at + 12] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()
