"""macOS: one difference of IOReport's counters; a private library, no root needed.

Nothing here could be tried without a Mac. Signatures and ownership (Copy and Create give a
reference to release, Get lends one) as in vladkens/macmon 6919d77, ``src_lib/sources.rs``.
"""

import ctypes
import errno
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from uma.system.darwin_native import function

_REPORT = "/usr/lib/libIOReport.dylib"
_CF = "/System/Library/Frameworks/CoreFoundation.framework/CoreFoundation"
_UTF8 = 0x08000100
_SIMPLE, _STATE = 1, 2
_NOTHING = "IOReport has no such channels on this Mac"
_P, _U64 = ctypes.c_void_p, ctypes.c_uint64


@dataclass(frozen=True, slots=True)
class Channel:
    """What a channel counted: a number in ``unit``, or time by the name of each state."""

    name: str
    unit: str
    value: int | None = None
    states: dict[str, int] = field(default_factory=dict)


def difference(group: str, subgroup: str | None, seconds: float) -> tuple[list[Channel], float]:
    """What the channels of a subgroup counted, and the seconds between the two samples.

    Raises:
        OSError: If this Mac has no such channels, or does not allow it.
    """
    with ExitStack() as held:
        channels, subscription = _subscribe(group, subgroup, held)
        first, began = _sample(subscription, channels, held), time.monotonic()
        time.sleep(seconds)
        last, ended = _sample(subscription, channels, held), time.monotonic()
        delta = _hold(
            held, function(_REPORT, "IOReportCreateSamplesDelta", _P, _P, _P, _P)(first, last, None)
        )
        return list(_channels(delta)), ended - began


def _subscribe(group: str, subgroup: str | None, held: ExitStack) -> tuple[Any, Any]:
    copy = function(_REPORT, "IOReportCopyChannelsInGroup", _P, _P, _P, _U64, _U64, _U64)
    names = [_string(group, held), None if subgroup is None else _string(subgroup, held)]
    wanted = _hold(held, copy(*names, 0, 0, 0))
    create = function(
        _REPORT, "IOReportCreateSubscription", _P, _P, _P, ctypes.POINTER(_P), _U64, _P
    )
    given = _P()
    subscription = _hold(held, create(None, wanted, ctypes.byref(given), 0, None))
    if not given.value:
        raise OSError(errno.ENOTSUP, _NOTHING)
    return given.value, subscription  # whether it is ours to release is not documented: it is kept


def _sample(subscription: Any, channels: Any, held: ExitStack) -> Any:
    create = function(_REPORT, "IOReportCreateSamples", _P, _P, _P, _P)
    return _hold(held, create(subscription, channels, None))


def _channels(sample: Any) -> Iterator[Channel]:
    with ExitStack() as held:
        get = function(_CF, "CFDictionaryGetValue", _P, _P, _P)
        array = get(sample, _string("IOReportChannels", held))
        if not array:
            return
        count = function(_CF, "CFArrayGetCount", ctypes.c_long, _P)(array)
        item = function(_CF, "CFArrayGetValueAtIndex", _P, _P, ctypes.c_long)
        for index in range(count):
            yield _channel(item(array, index))


def _channel(channel: Any) -> Channel:
    name = _text(function(_REPORT, "IOReportChannelGetChannelName", _P, _P)(channel))
    unit = _text(function(_REPORT, "IOReportChannelGetUnitLabel", _P, _P)(channel))
    kind = function(_REPORT, "IOReportChannelGetFormat", ctypes.c_int, _P)(channel)
    if kind == _SIMPLE:
        read = function(_REPORT, "IOReportSimpleGetIntegerValue", ctypes.c_int64, _P, ctypes.c_int)
        return Channel(name, unit, value=read(channel, 0))
    if kind != _STATE:
        return Channel(name, unit)
    label = function(_REPORT, "IOReportStateGetNameForIndex", _P, _P, ctypes.c_int)
    time_in = function(_REPORT, "IOReportStateGetResidency", ctypes.c_int64, _P, ctypes.c_int)
    count = function(_REPORT, "IOReportStateGetCount", ctypes.c_int, _P)(channel)
    states = {_text(label(channel, i)): time_in(channel, i) for i in range(count)}
    return Channel(name, unit, states=states)


def _hold(held: ExitStack, reference: Any) -> Any:
    """``reference``, to be released at the end; it is an error if it is null."""
    if not reference:
        raise OSError(errno.ENOTSUP, _NOTHING)
    held.callback(function(_CF, "CFRelease", None, _P), reference)
    return reference


def _string(text: str, held: ExitStack) -> Any:
    create = function(_CF, "CFStringCreateWithCString", _P, _P, ctypes.c_char_p, ctypes.c_uint32)
    return _hold(held, create(None, text.encode(), _UTF8))


def _text(reference: Any) -> str:
    buffer = ctypes.create_string_buffer(512)
    get = function(
        _CF, "CFStringGetCString", ctypes.c_ubyte, _P, ctypes.c_char_p, ctypes.c_long,
        ctypes.c_uint32,
    )  # fmt: skip
    if not reference or not get(reference, buffer, len(buffer), _UTF8):
        return ""
    return buffer.value.decode(errors="replace").strip()
