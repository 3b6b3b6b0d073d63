"""TensorBoard's event files, written without TensorBoard.

A record is its length, a masked CRC-32C of that, the bytes, and a masked CRC-32C of them
(TensorFlow, ``lib/io/record_writer.cc``); the bytes are an ``Event`` message (``event.proto``,
``summary.proto``).
"""

import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import BinaryIO

_POLYNOMIAL = 0x82F63B78  # of CRC-32C (Castagnoli), its bits reversed
_MASK = 0xA282EAD8


class EventFile:
    """An open event file; every record reaches the disk when it is written."""

    def __init__(self, folder: Path, wall_time: float, process: int) -> None:
        name = f"events.out.tfevents.{wall_time:.0f}.uma.{process}.0"
        self._file: BinaryIO = (folder / name).open("xb")
        self._file.write(record(_double(1, wall_time) + _bytes(3, b"brain.Event:2")))

    def write(self, wall_time: float, step: int, scalars: Mapping[str, float]) -> None:
        self._file.write(record(event(wall_time, step, scalars)))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def event(wall_time: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """An ``Event`` message with a summary of scalars."""
    values = (
        _bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in scalars.items()
    )
    return _double(1, wall_time) + _varint(2 << 3) + _varint(step) + _bytes(5, b"".join(values))


def record(data: bytes) -> bytes:
    """A message as it stands in the file."""
    length = struct.pack("<Q", len(data))
    return length + _checked(length) + data + _checked(data)


def _checked(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _table()[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF)


@cache
def _table() -> tuple[int, ...]:
    rows = []
    for row in range(256):
        for _ in range(8):
            row = (row >> 1) ^ (_POLYNOMIAL if row & 1 else 0)
        rows.append(row)
    return tuple(rows)


def _varint(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)
