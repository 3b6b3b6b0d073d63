"""Where this machine gets Python packages from: the settings of pip and uv, and the simple index.

Read here rather than by pip, which an environment made by uv or pipx does not have. The simple
index is that of PEP 503 (HTML) and PEP 691 (JSON).
"""

import json
import os
import re
import ssl
import sys
from collections.abc import Iterator, Mapping
from configparser import Error as ConfigError
from configparser import RawConfigParser
from dataclasses import dataclass
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import url2pathname

PYPI = "https://pypi.org/simple"
TIMEOUT_S = 15
MAX_PAGE_BYTES = 16 << 20
NETWORK_ERRORS = (OSError, HTTPException, ValueError)  # urllib's URLError is an OSError
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5, */*;q=0.1"


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Where to look for packages: pages and folders of files first, then simple indexes."""

    find_links: tuple[str, ...]
    indexes: tuple[str, ...]
    cert: str | None = None
    proxy: str | None = None


def read_settings(environ: Mapping[str, str] = os.environ) -> IndexSettings:
    """What pip's and uv's variables and files say, variables first; PyPI if they name no index."""
    pip = _pip_options(environ)
    uv = _uv_options(environ)
    main = [environ.get("UV_DEFAULT_INDEX"), environ.get("UV_INDEX_URL"), pip.get("index-url")]
    extra = [environ.get("UV_INDEX"), environ.get("UV_EXTRA_INDEX_URL"), pip.get("extra-index-url")]
    links = _words(pip.get("find-links"), environ.get("UV_FIND_LINKS", "").replace(",", " "))
    indexes = (_words(*main) or uv["main"] or [PYPI]) + _words(*extra) + uv["extra"]
    if _is_true(pip.get("no-index")) or _is_true(environ.get("UV_NO_INDEX")):
        indexes = []
    cert = pip.get("cert") or next(
        filter(None, map(environ.get, ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"))),
        None,
    )
    return IndexSettings(
        tuple(dict.fromkeys(links + uv["links"])),
        tuple(dict.fromkeys(indexes)),
        cert,
        pip.get("proxy"),
    )


def _words(*texts: str | None) -> list[str]:
    """The words of all ``texts``, without uv's ``name=`` in front of an address."""
    words = [word for text in texts for word in (text or "").split()]
    return [re.sub(r"^[\w.-]+=(?=\w+:)", "", word) for word in words]


def _is_true(text: str | None) -> bool:
    return (text or "").lower() in ("1", "true", "yes", "on", "y", "t")


def _pip_options(environ: Mapping[str, str]) -> dict[str, str]:
    """pip's options: those of its files in rising order of precedence, then ``PIP_*``."""
    options: dict[str, str] = {}
    for path in pip_files(environ):
        parser = RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (ConfigError, UnicodeDecodeError):
            continue
        for section in ("global", "download", "install"):
            if parser.has_section(section):
                options |= {k.replace("_", "-"): v for k, v in parser.items(section)}
    for name, value in environ.items():
        if name.startswith("PIP_") and value:
            options[name[4:].lower().replace("_", "-")] = value
    return options


def pip_files(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Files that pip reads, in its order (pip 25, ``Configuration.iter_config_files``).

    PIP_CONFIG_FILE replaces the user's own, or all if it is the null device.
    """
    own = environ.get("PIP_CONFIG_FILE", "")
    if own == os.devnull:
        return []
    home = Path.home()
    if sys.platform == "win32":
        system = [Path(environ.get("PROGRAMDATA", "C:/ProgramData")) / "pip/pip.ini"]
        user = [home / "pip/pip.ini", Path(environ.get("APPDATA", home)) / "pip/pip.ini"]
        site = Path(sys.prefix) / "pip.ini"
    else:
        folders = environ.get("XDG_CONFIG_DIRS") or "/etc/xdg"
        system = [Path(folder) / "pip/pip.conf" for folder in folders.split(os.pathsep)]
        config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
        support = Path("Library/Application Support/pip")
        if sys.platform == "darwin":
            system = [Path("/") / support / "pip.conf"]
            config = home / support.parent if (home / support).is_dir() else config
        system.append(Path("/etc/pip.conf"))
        user = [home / ".pip/pip.conf", config / "pip/pip.conf"]
        site = Path(sys.prefix) / "pip.conf"
    replaced = bool(own) and Path(own).exists()
    return [*system, *([] if replaced else user), site, *([Path(own)] if own else [])]


def _uv_options(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Addresses in uv's user and system files (uv.toml): ``main``, ``extra`` and ``links``."""
    import tomllib

    config = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    own = environ.get("UV_CONFIG_FILE")
    files = [Path(own)] if own else [config / "uv/uv.toml", Path("/etc/uv/uv.toml")]
    found: dict[str, list[str]] = {"main": [], "extra": [], "links": []}
    for path in files:
        try:
            tables = tomllib.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            continue
        for table in (tables, tables.get("pip", {})):
            found["main"] += [table["index-url"]] if "index-url" in table else []
            found["extra"] += table.get("extra-index-url", [])
            found["links"] += table.get("find-links", [])
        for index in tables.get("index", []):
            found["main" if index.get("default") else "extra"] += [index.get("url", "")]
    return found


def without_credentials(url: str) -> str:
    """``url`` without user name and password, for messages."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def reason(error: Exception) -> str:
    """Why a request failed, in a few words."""
    return str(getattr(error, "reason", None) or error) or type(error).__name__


def open_url(url: str, settings: IndexSettings, headers: Mapping[str, str] | None = None) -> Any:
    """The open response to a request for ``url`` (http, https, or file).

    Raises:
        OSError: If there is none; ``urllib.error.URLError`` is one.
    """
    from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

    request = Request(without_credentials(url), headers=dict(headers or {}))
    login = _login(url)
    if login:  # kept from other hosts that the index may redirect to
        request.add_unredirected_header("Authorization", f"Basic {login}")
    proxies = {"http": settings.proxy, "https": settings.proxy} if settings.proxy else None
    opener = build_opener(ProxyHandler(proxies), HTTPSHandler(context=_ssl_context(settings.cert)))
    return opener.open(request, timeout=TIMEOUT_S)


def _ssl_context(cert: str | None) -> ssl.SSLContext:
    if cert:
        folder = os.path.isdir(cert)
        return ssl.create_default_context(
            cafile=None if folder else cert, capath=cert if folder else None
        )
    context = ssl.create_default_context()
    try:
        import certifi  # python.org's Python for macOS trusts nobody until it is told to
    except ImportError:
        return context
    context.load_verify_locations(certifi.where())
    return context


def _login(url: str) -> str | None:
    """Base64 of ``user:password`` from the address, else from the user's netrc file."""
    import base64
    import netrc

    parts = urlsplit(url)
    user, password = parts.username, parts.password
    if user is None and parts.hostname:
        try:
            entry = netrc.netrc().authenticators(parts.hostname)
        except (OSError, netrc.NetrcParseError):
            entry = None
        user, password = (entry[0], entry[2]) if entry else (None, None)
    if user is None:
        return None
    return base64.b64encode(f"{unquote(user)}:{unquote(password or '')}".encode()).decode()


class _Page(HTMLParser):
    """The targets of all links of a page."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href")
        if target and tag == "base":
            self.base = urljoin(self.base, target)
        elif target and tag == "a":
            self.urls.append(urljoin(self.base, target))


def links_of_page(raw: bytes, content_type: str, base: str) -> list[str]:
    """Addresses of the files that a page of a simple index lists, as JSON or HTML.

    Raises:
        ValueError: If it is neither.
    """
    if "json" in content_type:
        page = json.loads(raw)
        try:
            return [urljoin(base, file["url"]) for file in page["files"]]
        except (KeyError, TypeError):
            raise ValueError("the index answered JSON of another layout") from None
    parser = _Page(base)
    parser.feed(raw.decode("utf-8", "replace"))
    return parser.urls


def _links_of_folder(folder: Path) -> list[str]:
    """Addresses of what lies in a local folder, and of what its ``index.html`` links to."""
    urls = [path.resolve().as_uri() for path in sorted(folder.iterdir())]
    page = folder / "index.html"
    if page.is_file():
        urls += links_of_page(page.read_bytes(), "text/html", page.resolve().as_uri())
    return urls


def _links(place: str, settings: IndexSettings) -> list[str]:
    """Addresses that ``place`` lists: a page's address, or a local page or folder."""
    if urlsplit(place).scheme in ("http", "https"):
        with open_url(place, settings, {"Accept": ACCEPT}) as response:
            raw = response.read(MAX_PAGE_BYTES)
            kind = response.headers.get("Content-Type", "")
            urls = links_of_page(raw, kind, response.url)
            return [_same_login(url, place) for url in urls if url.startswith("http")]
    local = Path(url2pathname(urlsplit(place).path) if place.startswith("file:") else place)
    if local.is_dir():
        return _links_of_folder(local)
    return links_of_page(local.read_bytes(), "text/html", local.resolve().as_uri())


def _same_login(url: str, page: str) -> str:
    """``url`` with the login of ``page`` if both are on the same host."""
    login, at, host = urlsplit(page).netloc.rpartition("@")
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=login + at + host)) if parts.netloc == host else url


def find_file(
    project: str, filename: str, settings: IndexSettings, tried: list[str]
) -> Iterator[str]:
    """Addresses of the file ``filename`` of ``project``, one per place that has it.

    Why each other place was of no use is added to ``tried``.
    """
    places = [*settings.find_links]
    places += [f"{index.rstrip('/')}/{project}/" for index in settings.indexes]
    for place in places:
        try:
            urls = _links(place, settings)
        except NETWORK_ERRORS as error:
            tried.append(f"{without_credentials(place)}: {reason(error)}")
            continue
        named = [url for url in urls if unquote(urlsplit(url).path).endswith(f"/{filename}")]
        if named:
            yield named[0]
        else:
            tried.append(f"{without_credentials(place)}: does not list {filename}")
