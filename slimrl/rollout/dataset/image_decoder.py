"""Decodes and resizes images in processes of their own: a bad or huge file costs such a process, and not the run.

`ImageDecoders` starts the processes on demand and keeps them: each decodes one image after another, in bounded time and
memory, and ends with its parent. It resizes them as the model's image processor does, so that all that follows (the
requests of engines, the patches of training) has the size of what the model sees. The program itself imports PIL alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import queue
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 100_000_000  # of a stored image; the processor scales it down to far fewer
TIME_LIMIT_S = 60.0
MEMORY_LIMIT_BYTES = 4 << 30  # of addresses


@dataclasses.dataclass(frozen=True)
class ImageSize:
    """How an image processor of Qwen-VL resizes: sides in multiples of `factor`, pixels within limits (inclusive)."""

    factor: int
    min_pixels: int
    max_pixels: int
    resample: int  # PIL's number of the method

    def of(self, height: int, width: int) -> tuple[int, int]:
        """The height and width that the processor chooses for an image of this one.

        As `smart_resize` of transformers, in the same floating-point operations: another order rounds some sides apart.
        """
        unit, sides = self.factor, (height, width)
        found = [round(side / unit) * unit for side in sides]
        if math.prod(found) > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            found = [max(unit, math.floor(side / shrink / unit) * unit) for side in sides]
        elif math.prod(found) < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            found = [math.ceil(side * grow / unit) * unit for side in sides]
        return found[0], found[1]

    def resized(self, image: Image) -> Image:
        """The image as the processor resizes it; as it is where that would resize the result once more."""
        height, width = self.of(image.height, image.width)
        if (image.height, image.width) == (height, width) or self.of(height, width) != (height, width):
            return image
        return image.resize((width, height), self.resample)


@dataclasses.dataclass(frozen=True)
class DecodedImage:
    """Its pixels in RGB, resized, as a PNG file; and the sizes that the file states."""

    png: bytes
    width: int
    height: int


class ImageDecoders:
    """Up to `most` processes. Threads may decode at once; each uses another process, or waits for one.

    Images get their `size`; without one they keep that of their file.
    """

    def __init__(self, most: int, time_limit_s: float = TIME_LIMIT_S, size: ImageSize | None = None) -> None:
        self._time_limit_s, self._size = time_limit_s, size
        self._free: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()  # None: not started yet
        for _ in range(most):
            self._free.put(None)
        self._end = weakref.finalize(self, _end_all, self._free)

    def decode(self, data: bytes) -> DecodedImage:
        """The image of a file. Raises ValueError, worded to follow its name."""
        process = self._free.get()
        try:
            if process is None or process.poll() is not None:
                process = _start(self._size)
            answer, png = _ask(process, data, self._time_limit_s)
        except TimeoutError:
            raise ValueError(f"takes more than {self._time_limit_s:g} s to decode: scale it down") from None
        except BrokenPipeError:
            code = None if process is None else process.wait()
            raise ValueError(f"cannot be read as an image (its process ended with code {code})") from None
        finally:
            self._free.put(process)
        if "fault" in answer:
            raise ValueError(answer["fault"])
        return DecodedImage(png, answer["width"], answer["height"])

    def close(self) -> None:
        """End the processes that decode nothing."""
        self._end()


def _start(size: ImageSize | None) -> subprocess.Popen[bytes]:
    # -P keeps this folder out of the import path: its modules would shadow others
    command = [sys.executable, "-P", str(Path(__file__)), *([] if size is None else [json.dumps(vars(size))])]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _end_all(processes: queue.LifoQueue[subprocess.Popen[bytes] | None]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            process = processes.get_nowait()
            if process is not None:
                process.kill()
                process.communicate()


def _ask(process: subprocess.Popen[bytes], data: bytes, time_limit_s: float) -> tuple[dict[str, Any], bytes]:
    """Its answer, and a PNG file. Raises TimeoutError, or BrokenPipeError if it has ended; any error ends it."""
    assert process.stdin is not None and process.stdout is not None  # PIPE
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(time_limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        process.stdin.write(b"%d\n" % len(data))
        process.stdin.write(data)
        process.stdin.flush()
        head = process.stdout.readline()
        answer: dict[str, Any] = json.loads(head) if head else {"bytes": 1}
        png = process.stdout.read(answer["bytes"])
        if len(png) < answer["bytes"]:
            raise BrokenPipeError
    except BaseException:
        process.kill()  # its next answer would be to this question
        process.wait()
        if is_late.is_set():
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()
    return answer, png


def open_image(data: bytes) -> Image:
    """The image of a file, in RGB. Raises ValueError, worded to follow its name."""
    import PIL.Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)  # the limit below is closer
            image = PIL.Image.open(io.BytesIO(data))
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"has {image.width} x {image.height} pixels, more than {MAX_PIXELS}: scale it down")
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")
    except (OSError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise ValueError(f"cannot be read as an image ({type(error).__name__}: {error})") from error


def png_of(image: Image) -> bytes:
    """The image, pixel by pixel, as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def main(requests: IO[bytes], replies: IO[bytes], size: ImageSize | None = None) -> None:
    """Answers files, each after its length in a line, until there are no more."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while line := requests.readline():
        answer, png = _answer(requests.read(int(line)), size)
        replies.write(json.dumps(answer | {"bytes": len(png)}).encode() + b"\n")
        replies.write(png)
        replies.flush()


def _answer(data: bytes, size: ImageSize | None) -> tuple[dict[str, Any], bytes]:
    try:
        image = open_image(data)
        resized = image if size is None else size.resized(image)
        return {"width": image.width, "height": image.height}, png_of(resized)
    except ValueError as error:
        return {"fault": str(error)}, b""
    except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError) as error:  # of a decoder
        return {"fault": f"cannot be read as an image ({type(error).__name__}: {str(error)[:200]})"}, b""


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer, *(ImageSize(**json.loads(word)) for word in sys.argv[1:]))
