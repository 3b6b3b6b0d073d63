"""macOS: system calls, one small function each, answering raw bytes or numbers.

Decoding is elsewhere and tested on recorded answers; nothing here could be tried without a Mac.
Signatures and constants: xnu-11417.101.15 (osfmk/mach, bsd/sys, libproc).
Each function raises ``OSError`` where the system refuses, or is not macOS.
"""

import ctypes
import errno
import os
from functools import cache
from typing import Any

from uma.system.darwin_memory import VM_STATISTICS64_SIZE
from uma.system.darwin_process import RUSAGE_SIZES, TASK_VM_INFO_SIZE

_SYSTEM = "/usr/lib/libSystem.B.dylib"
_HOST_VM_INFO64 = 4
_TASK_VM_INFO = 22
_SPARE = 512  # newer kernels have longer structures


@cache
def library(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path, use_errno=True)


def function(path: str, name: str, result: Any, *arguments: Any) -> Any:
    """A C function with its types.

    Raises:
        OSError: If this system has no such library or function.
    """
    try:
        found = getattr(library(path), name)
    except AttributeError:
        raise OSError(errno.ENOSYS, f"no {name} in {path}") from None
    found.restype, found.argtypes = result, list(arguments)
    return found


def sysctl(name: str) -> bytes:
    """The value of a ``sysctl``, as the kernel has it."""
    size = ctypes.c_size_t(0)
    call = function(
        _SYSTEM,
        "sysctlbyname",
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_void_p,
        ctypes.c_size_t,
    )
    if call(name.encode(), None, ctypes.byref(size), None, 0):
        raise _error()
    buffer = ctypes.create_string_buffer(size.value)
    if call(name.encode(), buffer, ctypes.byref(size), None, 0):
        raise _error()
    return buffer.raw[: size.value]


@cache
def _host() -> int:
    """The host's port; each call of ``mach_host_self`` would add a reference to it."""
    return int(function(_SYSTEM, "mach_host_self", ctypes.c_uint32)())


def page_size() -> int:
    """Bytes of a page of the kernel; Rosetta tells a program 4,096 where it has 16,384."""
    size = ctypes.c_size_t()
    call = function(
        _SYSTEM, "host_page_size", ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(ctypes.c_size_t)
    )
    _check(call(_host(), ctypes.byref(size)))
    return size.value


def host_statistics() -> bytes:
    """``vm_statistics64``; at most a few calls per second get fresh numbers (osfmk/kern/host.c)."""
    return _filled("host_statistics64", _host(), _HOST_VM_INFO64, VM_STATISTICS64_SIZE)


def own_vm_info() -> bytes:
    """``task_vm_info`` of this process; of others only root may ask."""
    task = ctypes.c_uint32.in_dll(library(_SYSTEM), "mach_task_self_").value
    return _filled("task_info", task, _TASK_VM_INFO, TASK_VM_INFO_SIZE)


def _filled(name: str, port: int, flavor: int, size: int) -> bytes:
    """What a Mach call that counts in 4-byte units wrote."""
    buffer = ctypes.create_string_buffer(size + _SPARE)
    count = ctypes.c_uint32(size // 4)
    call = function(
        _SYSTEM,
        name,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_uint32),
    )
    _check(call(port, flavor, buffer, ctypes.byref(count)))
    return buffer.raw[: 4 * count.value]


def rusage(pid: int) -> bytes:
    """``proc_pid_rusage`` of a process of this user: version 4, else 2, else 0."""
    call = function(
        _SYSTEM, "proc_pid_rusage", ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p
    )
    for version in (4, 2, 0):
        buffer = ctypes.create_string_buffer(RUSAGE_SIZES[version])
        if call(pid, version, buffer) == 0:
            return buffer.raw
        if ctypes.get_errno() != errno.EINVAL:  # a kernel that lacks a version answers EINVAL
            break
    raise _error()


def _check(result: int) -> None:
    if result:
        raise OSError(errno.EIO, f"the kernel answered {result}")


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
