"""Record how llama.cpp spreads models over cards: tests/data/llama_split.csv.

    python scripts/record_llama_split.py SOURCE BUILD

SOURCE and BUILD as for ``record_llama_cpp.py``. The cards are devices of llama.cpp's RPC backend,
behind a server on the loopback that has so much memory and computes nothing: ``llama-fit-params``
places and reserves everything as on CUDA (asynchronous, with events), and asks no device to hold
it. The rows are what it prints for each device, in MiB.
"""

import argparse
import csv
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

from record_llama_cpp import SURVEYED  # noqa: E402

GIB = 1 << 30
CARDS = ((24, 12), (24, 24), (24, 24, 48), (16, 16, 16, 16))
OPTIONS = ("-c 8192", "-c 32768", "-c 8192 -ub 2048", "-c 16384 -np 4")
QUANT = "Q4_K_M"

# ggml/src/ggml-rpc/ggml-rpc.cpp, enum rpc_cmd.
ALLOC, ALIGNMENT, MAX_SIZE, BASE, FREE, CLEAR = range(6)
SET_HASH, COPY, MEMORY, INIT, ALLOC_SIZE, HELLO, COUNT = 7, 9, 11, 12, 13, 14, 15
PROTOCOL = (7, 0, 0)  # ggml/include/ggml-rpc.h

PRELOADED = """
#include <cstdlib>
extern "C" void * ggml_backend_load(const char *);
__attribute__((constructor)) static void load() { ggml_backend_load(std::getenv("RPC_LIBRARY")); }
"""


class Cards:
    """A server of llama.cpp's RPC protocol for cards that hold nothing."""

    def __init__(self, memory: tuple[int, ...]) -> None:
        self.memory, self.pointer = memory, 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self.socket.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as file:
            while head := file.read(9):
                command, size = struct.unpack("<BQ", head)
                answer = self.answer(command, file.read(size))
                if answer is not None:
                    client.sendall(struct.pack("<Q", len(answer)) + answer)

    def answer(self, command: int, data: bytes) -> bytes | None:
        if command == HELLO:
            return bytes((*PROTOCOL, 0)) + bytes(len(data))
        if command == COUNT:
            return struct.pack("<I", len(self.memory))
        if command == MEMORY:
            size = self.memory[struct.unpack_from("<I", data)[0]]
            return struct.pack("<QQ", size, size)
        if command == ALLOC:
            self.pointer += 1 << 44
            return struct.pack("<QQ", self.pointer, struct.unpack_from("<Q", data, 4)[0])
        if command == ALLOC_SIZE:
            return struct.pack("<Q", tensor_bytes(data[4:]))
        fixed = {ALIGNMENT: 128, MAX_SIZE: 1 << 62, BASE: self.pointer}
        if command in fixed:
            return struct.pack("<Q", fixed[command])
        return {FREE: b"", CLEAR: b"", INIT: b"", SET_HASH: b"\1", COPY: b"\1"}.get(command)


def tensor_bytes(serialized: bytes) -> int:
    """Bytes of a tensor of whole rows: its identity, type and buffer, then extents and strides."""
    extents = struct.unpack_from("<4I", serialized, 20)
    strides = struct.unpack_from("<4I", serialized, 36)
    return strides[1] + sum((n - 1) * s for n, s in zip(extents[1:], strides[1:], strict=True))


def compiled(source: Path, build: Path, folder: Path) -> dict[str, str]:
    """The environment in which BUILD's programs have the RPC backend."""
    base, library, preloaded = source / "ggml", folder / "libggml-rpc.so", folder / "preloaded.so"
    flags = ["c++", "-std=c++17", "-O1", "-fPIC", "-shared", f"-L{build}/bin"]
    rpath = f"-Wl,-rpath,{build}/bin"
    defines = ["BACKEND_DL", "BACKEND_SHARED", "BACKEND_BUILD", "SHARED"]
    files = [str(base / "src/ggml-rpc" / name) for name in ("ggml-rpc.cpp", "transport.cpp")]
    include = [f"-I{base}/include", f"-I{base}/src", f"-I{base}/src/ggml-rpc"]
    backend = [*flags, *(f"-DGGML_{one}" for one in defines), *include, "-o", str(library), *files]
    subprocess.run([*backend, "-lggml-base", rpath], check=True)
    (folder / "preloaded.cpp").write_text(PRELOADED)
    loader = [*flags, "-o", str(preloaded), str(folder / "preloaded.cpp"), "-lggml", rpath]
    subprocess.run(loader, check=True)
    return os.environ | {"RPC_LIBRARY": str(library), "LD_PRELOAD": str(preloaded)}


def rows(source: Path, build: Path, folder: Path) -> Iterator[list[Any]]:
    from record_llama_cpp import written

    sizes = ("model_mib", "context_mib", "compute_mib")
    yield ["model", "quant", "options", "cards_gib", "card", *sizes]
    environment = compiled(source, build, folder)
    for cards in CARDS:
        server = Cards(tuple(size * GIB for size in cards))
        for model in SURVEYED:
            path = written(folder, model, QUANT)
            for options in OPTIONS:
                flags = ["-m", str(path), "--rpc", f"127.0.0.1:{server.port}", *options.split()]
                flags += ["-fitp", "on", "--no-repack", "-ngl", "999", "-sm", "layer"]
                command = [str(build / "bin/llama-fit-params"), *flags]
                command += [] if "-np" in options else ["-np", "1"]
                ran = subprocess.run(
                    command, env=environment, check=True, capture_output=True, text=True
                )
                printed = [line.split() for line in ran.stdout.splitlines()]
                for card in range(len(cards)):
                    found = next(line[1:] for line in printed if line[:1] == [f"RPC{card}"])
                    gib = " ".join(map(str, cards))
                    yield [model, QUANT, options, gib, card, *found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("build", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = list(rows(options.source.resolve(), options.build.resolve(), Path(name)))
    with (ROOT / "tests/data/llama_split.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(found)
    print(f"{len(found) - 1} rows")


if __name__ == "__main__":
    main()
