"""What the bytes of a JPEG say before anything is decoded: size, kind of coding, EXIF orientation.

Markers as in ITU-T T.81, annex B; orientation as in EXIF 2.3, section 4.6.4. Every length is the file's own claim, so
each read is bounded by the bytes that are there.
"""

from __future__ import annotations

from dataclasses import dataclass

START_OF_FRAME = frozenset((*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)))
# Baseline, extended and progressive DCT with Huffman codes: what every decoder reads, to the same pixels.
COMMON = frozenset((0xC0, 0xC1, 0xC2))
START_OF_SCAN, END, APP1 = 0xDA, 0xD9, 0xE1
ORIENTATION = 0x0112
MAX_SEGMENTS = 10_000  # and fill bytes before the frame; real files have a few dozen


@dataclass(frozen=True, slots=True)
class Frame:
    """Frame header of a JPEG, sizes in pixels as stored."""

    height: int
    width: int
    components: int  # 1 = grey, 3 = colour, 4 = CMYK or YCCK
    common: bool  # 8 bits, and a coding of ``COMMON``
    orientation: int  # EXIF, 1 = upright


def parse(data: bytes) -> Frame | None:
    """Frame of a JPEG file, or None when the bytes are no JPEG or end before its frame header is complete."""
    if data[:3] != b"\xff\xd8\xff":
        return None
    at, orientation = 2, 1
    for _ in range(MAX_SEGMENTS):
        if data[at : at + 2] == b"\xff\xff":  # a fill byte
            at += 1
            continue
        if len(data) < at + 4 or data[at] != 0xFF:
            return None
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if length < 2 or marker in (START_OF_SCAN, END):
            return None
        if marker == APP1 and orientation == 1:
            orientation = exif_orientation(data[at + 4 : at + 2 + length])
        if marker in START_OF_FRAME:
            return _frame(data[at + 4 : at + 2 + length], marker, orientation)
        at += 2 + length
    return None


def _frame(body: bytes, marker: int, orientation: int) -> Frame | None:
    if len(body) < 6:
        return None
    height, width = int.from_bytes(body[1:3], "big"), int.from_bytes(body[3:5], "big")
    if not height or not width:
        return None
    return Frame(height, width, body[5], body[0] == 8 and marker in COMMON, orientation)


def exif_orientation(block: bytes) -> int:
    """Orientation in the first directory of an EXIF block; 1 where it has none, or none that makes sense."""
    tiff = block.removeprefix(b"Exif\0\0")
    if tiff[:4] not in (b"II*\0", b"MM\0*"):
        return 1

    def number(at: int, size: int) -> int:
        return int.from_bytes(tiff[at : at + size], "little" if tiff[:1] == b"I" else "big")

    directory = number(4, 4)
    for entry in range(directory + 2, directory + 2 + 12 * number(directory, 2), 12):
        if entry + 12 > len(tiff):
            return 1
        if number(entry, 2) == ORIENTATION:
            value = number(entry + 8, 2)
            return value if 1 <= value <= 8 else 1
    return 1
