"""A Hugging Face hub on loopback: enough of its API for huggingface_hub 2.4 and for range reads."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from fakeserver import running

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """Repositories by id, what was asked of them, and how the hub misbehaves."""

    repositories: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    token: str | None = None
    ignores_ranges: bool = False
    requests: list[str] = field(default_factory=list)
    bytes_sent: int = 0
    url: str = ""


@contextmanager
def serving(**repositories: Path) -> Iterator[Hub]:
    """A hub with ``org__name=folder`` as the repository ``org/name``."""
    hub = Hub({name.replace("__", "/"): folder for name, folder in repositories.items()})

    class Handler(_Handler):
        pass

    Handler.hub = hub
    with running(Handler) as hub.url:
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        kinds = r"/api/(?:models|datasets)/([^/]+/[^/]+)"
        api = re.fullmatch(kinds + r"(/revision/[^/]+|/tree/[^/]+)?", path)
        file = re.fullmatch(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repo = (api or file or [None, ""])[1]
        folder = self.hub.repositories.get(repo)
        if folder is None:
            return self._refuse(401 if repo else 404, "RepoNotFound")
        if repo in self.hub.gated and self._token() != self.hub.token:
            return self._refuse(403, "GatedRepo")
        revision = (api[2] or "/x/main").split("/")[2] if api else file[2]
        if revision not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        if file:
            return self._file(folder / file[3])
        if api[2] and api[2].startswith("/tree"):
            return self._json([self._entry(f, folder) for f in _files(folder)])
        siblings = [
            {"rfilename": f.relative_to(folder).as_posix(), "size": f.stat().st_size}
            for f in _files(folder)
        ]
        return self._json({"id": repo, "sha": COMMIT, "siblings": siblings})

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _entry(self, file: Path, folder: Path) -> dict[str, Any]:
        name = file.relative_to(folder).as_posix()
        return {"type": "file", "path": name, "size": file.stat().st_size, "oid": _etag(file)}

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, path: Path) -> None:
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        data = path.read_bytes()
        headers = {
            "ETag": f'"{_etag(path)}"',
            "X-Repo-Commit": COMMIT,
            "X-Linked-Size": str(len(data)),
            "Accept-Ranges": "bytes",
        }
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if part is None or self.hub.ignores_ranges:
            return self._send(200, data, headers)
        first, last = int(part[1]), min(int(part[2] or len(data) - 1), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return self._send(206, data[first : last + 1], headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):  # the client has heard enough
                self.wfile.write(body)
                self.hub.bytes_sent += len(body)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
