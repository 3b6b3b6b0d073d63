"""macOS: the machine's memory in pages, from the kernel's structures or the tools' text.

Everything here is pure. What a structure or a text lacks is left out of the result, so that a cut,
localized or newer answer costs a figure and not the rest; a number counts only with what follows
it, since it may be cut too. Page counts have ``vm_stat``'s names.
"""

import re
import struct
from collections.abc import Mapping

from uma.units import GIB, KIB, MIB, TIB

# struct vm_statistics64 (xnu-11417.101.15, osfmk/mach/vm_statistics.h): where each count begins,
# and its width. Newer kernels append to it; older ones are as long as this.
VM_STATISTICS64_SIZE = 152
_VM_STATISTICS64 = {
    "free_count": (0, "I"),
    "pages_active": (4, "I"),
    "pages_inactive": (8, "I"),
    "pages_wired_down": (12, "I"),
    "pages_zero_filled": (16, "Q"),
    "pages_reactivated": (24, "Q"),
    "pageins": (32, "Q"),
    "pageouts": (40, "Q"),
    "translation_faults": (48, "Q"),
    "pages_copy_on_write": (56, "Q"),
    "pages_purged": (80, "Q"),
    "pages_purgeable": (88, "I"),
    "pages_speculative": (92, "I"),
    "decompressions": (96, "Q"),
    "compressions": (104, "Q"),
    "swapins": (112, "Q"),
    "swapouts": (120, "Q"),
    "pages_occupied_by_compressor": (128, "I"),
    "pages_throttled": (132, "I"),
    "file_backed_pages": (136, "I"),
    "anonymous_pages": (140, "I"),
    "pages_stored_in_compressor": (144, "Q"),
}
XSW_USAGE_SIZE = 32  # bsd/sys/sysctl.h: total, available, used, then page size and "encrypted"

_UNITS = {"B": 1, "K": KIB, "M": MIB, "G": GIB, "T": TIB}
_DIGITS = "[0-9]{1,18}"
_DECIMAL = r"[0-9]{1,15}(?:[.,][0-9]{1,6})?"


def decode_host_statistics(buffer: bytes, page_size: int) -> dict[str, int]:
    """Counts of a ``vm_statistics64``, as long as the kernel filled it; ``page_size`` in bytes.

    The kernel's free pages include the speculative ones, which ``vm_stat`` and this take off.
    """
    pages = {
        name: struct.unpack_from(f"<{width}", buffer, offset)[0]
        for name, (offset, width) in _VM_STATISTICS64.items()
        if offset + struct.calcsize(width) <= len(buffer)
    }
    free = pages.pop("free_count", None)
    if free is not None and "pages_speculative" in pages:
        pages["pages_free"] = max(0, free - pages["pages_speculative"])
    return {"page_size": page_size, **pages}


def parse_vm_stat(text: str) -> dict[str, int]:
    """Counts of ``vm_stat`` by name in lower case, words joined by underscores.

    >>> parse_vm_stat("(page size of 16384 bytes)\\nPages wired down:   5.\\n")
    {'page_size': 16384, 'pages_wired_down': 5}
    """
    head = re.search(rf"page size of ({_DIGITS}) bytes", text)
    lines = re.findall(
        rf'^[ \t]*"?([A-Za-z][^":\n]*)"?:[ \t]+({_DIGITS})\.[ \t]*$', text, re.MULTILINE
    )
    pages = {"page_size": int(head[1])} if head else {}
    return pages | {_name(label): int(count) for label, count in lines}


def parse_memory_pressure(text: str) -> dict[str, int]:
    """Counts of ``memory_pressure``, with ``memsize`` in bytes and ``free_percentage``.

    That percentage is all but wired and compressed memory (``kern.memorystatus_level``): far more
    than what is free.
    """
    found = {}
    head = re.search(
        rf"The system has ({_DIGITS}) \(({_DIGITS}) pages with a page size of ({_DIGITS})\)", text
    )
    if head:
        found = dict(zip(("memsize", "pages", "page_size"), map(int, head.groups()), strict=True))
    labels = "Pages [a-z ]+|Swapins|Swapouts|Pageins|Pageouts"
    for label, count in re.findall(rf"^({labels}):[ \t]*({_DIGITS})[ \t]*\n", text, re.MULTILINE):
        found[_name(label)] = int(count)
    percent = re.search(r"System-wide memory free percentage:[ \t]*([0-9]{1,3})%", text)
    return found | ({"free_percentage": int(percent[1])} if percent else {})


def _name(label: str) -> str:
    return re.sub(r"[^a-z]+", "_", label.lower()).strip("_")


def decode_swapusage(buffer: bytes) -> dict[str, int]:
    """Bytes of a ``struct xsw_usage``: ``total``, ``free``, ``used``; empty where it is cut."""
    if len(buffer) < XSW_USAGE_SIZE:
        return {}
    total, free, used = struct.unpack_from("<3Q", buffer)
    return {"total": total, "used": used, "free": free}


def parse_swapusage(text: str) -> dict[str, int]:
    """Bytes of ``sysctl vm.swapusage``; M is 1,048,576, and some locales write a comma.

    >>> parse_swapusage("total = 2048,00M  used = 1,50M  free = 2046,50M")["used"]
    1572864
    """
    found = re.findall(rf"(total|used|free) = ({_DECIMAL})([BKMGT])(?!\w)", text)
    return {name: _bytes(value, unit) for name, value, unit in found}


def parse_top_physmem(text: str) -> dict[str, int]:
    """Bytes of the ``PhysMem`` line of ``top -l1``; its "used" contains caches."""
    line = re.search(r"^PhysMem:.*$", text, re.MULTILINE)
    found = re.findall(
        rf"({_DECIMAL})([BKMGT]) (used|wired|compressor|unused)\b", line[0] if line else ""
    )
    return {name: _bytes(value, unit) for value, unit, name in found}


def _bytes(value: str, unit: str) -> int:
    return round(float(value.replace(",", ".")) * _UNITS[unit])


def figures(pages: Mapping[str, int]) -> dict[str, int | None]:
    """Bytes by kind, as Activity Monitor divides memory; ``None`` where a count is missing.

    ``app`` is anonymous memory that cannot be dropped, ``cached`` what can be: files, and data its
    owner marked purgeable. ``reclaimable`` adds the free pages to it. Wired pages are in neither
    (active, inactive and speculative pages are exactly the anonymous and file-backed ones), so
    nothing is counted twice. Source: exelban/stats 1ab6adb, ``Modules/RAM/readers.swift``.
    """
    kinds = {
        "app": ("anonymous_pages", "-pages_purgeable"),
        "wired": ("pages_wired_down",),
        "compressed": ("pages_occupied_by_compressor",),
        "compressed_logical": ("pages_stored_in_compressor",),
        "cached": ("file_backed_pages", "pages_purgeable"),
        "free": ("pages_free",),
        "used": (
            "anonymous_pages",
            "-pages_purgeable",
            "pages_wired_down",
            "pages_occupied_by_compressor",
        ),
        "reclaimable": ("pages_free", "file_backed_pages", "pages_purgeable"),
    }
    return {kind: _sum(pages, names) for kind, names in kinds.items()}


def _sum(pages: Mapping[str, int], names: tuple[str, ...]) -> int | None:
    """The pages of these names in bytes, those with a minus taken off."""
    if "page_size" not in pages or any(name.lstrip("-") not in pages for name in names):
        return None
    counts = (-pages[name[1:]] if name[0] == "-" else pages[name] for name in names)
    return pages["page_size"] * max(0, sum(counts))
