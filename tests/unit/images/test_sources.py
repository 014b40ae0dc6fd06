"""Where images may come from: data URLs always, hosts and folders only where the operator says so."""

from __future__ import annotations

import base64
import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.images import data_url, file_of, image_info, picture
from tp_engine.errors import ConfigError, RequestError
from tp_engine.images.fetching import fetch, parse_domains
from tp_engine.images.settings import ImageSettings
from tp_engine.images.sources import ImageSource, file_bytes, has_image_part, image_source

PICTURE = file_of(picture())


def settings(**limits: Any) -> ImageSettings:
    found = image_info(**limits).images
    assert found is not None
    return found


def read(url: str, **limits: Any) -> bytes:
    return file_bytes(ImageSource(where="input[0]", content=url), settings(**limits))


def test_a_data_url_is_read() -> None:
    """Oracle: the bytes that were encoded."""
    assert read(data_url(PICTURE)) == PICTURE
    assert read("DATA:image/png;name=a.png;BASE64," + data_url(PICTURE).partition(",")[2]) == PICTURE


def test_base64_is_read_as_browsers_read_it() -> None:
    """Oracle: the Fetch standard's steps for data URLs, by hand: white space goes, padding may be missing, escapes are
    undone; for every length of the last group, in time that grows with the length alone."""
    for data in (PICTURE, PICTURE + b"a", PICTURE + b"ab"):
        plain = base64.b64encode(data).decode()
        wrapped = base64.encodebytes(data).decode()
        for body in (
            wrapped,
            wrapped.replace("\n", "\r\n"),
            plain + "\n",
            " " + plain,
            plain.rstrip("="),
            wrapped.rstrip("=\n"),
            quote(plain, safe=""),
            quote(wrapped, safe=""),
            quote(plain, safe="").replace("%3D", "%3d").replace("%2F", "%2f"),
        ):
            assert read("data:image/png;base64," + body) == data
        assert read(" \n\tdata:image/png;base64," + plain) == data
    assert read("data:image/png;base64," + "%0A" * 1_000_000 + "YWJj") == b"abc"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "data:image/png;base64,YWJj"},
        {"type": "image", "url": "data:image/png;base64,YWJj"},
        {"type": "image", "base64": "YWJj"},
        {"type": "image", "base64": "data:image/png;base64,YWJj"},
        {"type": "computer_screenshot", "image_url": "data:image/png;base64,YWJj"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj", "detail": "medium"}},
        {"image_url": {"url": "data:image/png;base64,YWJj"}},
        {"type": "image", "data": "YWJj", "mimeType": "image/png"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "YWJj"}},
        {"type": "image", "source": {"type": "url", "url": "data:image/png;base64,YWJj"}},
    ],
)
def test_other_forms_of_parts_are_images_too(part: dict[str, Any]) -> None:
    """Oracle: the bytes; transformers' own message format, a computer's screenshot, a detail that others know, vLLM's
    part without a type, what MCP's tools answer, and Anthropic's block."""
    assert has_image_part([{"role": "user", "content": [part]}])
    assert file_bytes(image_source("input[0]", part), settings()) == b"abc"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "must be data:image/png;base64, and the file"),
        ("data:image/png,abc", "must be data:image/png;base64, and the file"),
        ("data:image/png;base64,@@@@", "not valid base64"),
        ("data:image/png;base64,abcde", "not valid base64"),
        ("data:image/png;base64,abc=====", "not valid base64"),
        ("data:image/png;base64,ab=c", "not valid base64"),
        ("data:image/png;base64,ab=", "not valid base64"),
        ("data:image/png;base64,ab-_", "not valid base64"),
        ("data:image/png;base64,ab%00", "not valid base64"),
        ("data:image/png;base64,\u00e9", "not valid base64"),
        ("ftp://host/a.png", "must begin with data:image/"),
        ("/etc/passwd", "must begin with data:image/"),
        ("", "must begin with data:image/"),
        ("https://example.com/a.png", "not fetched from other hosts.*--allowed-media-domains"),
        ("file:///etc/passwd", "files are not read.*--allowed-local-media-path"),
    ],
)
def test_other_urls_are_refused_with_the_remedy(url: str, message: str) -> None:
    """Oracle: the message names the image; by default no host is asked and no file is opened."""
    with pytest.raises(RequestError, match=rf"input\[0\]: .*{message}"):
        read(url)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, "has no URL in 'image_url'"),
        ({"type": "input_image", "file_id": "file-1"}, "files by their id are not stored here"),
        ({"type": "image_url", "image_url": {"url": 7}}, "has no URL"),
        ({"type": "image_url", "image_url": {"url": "data:", "detail": "extreme"}}, "detail is 'extreme'"),
        ({"type": "image_url", "image_url": "data:", "uuid": "1"}, "uuid names no image here"),
        ({"type": "image_pil", "image_pil": "data:"}, "must be an image of Pillow"),
        ({"type": "image"}, "has no URL in 'image' or 'url' or 'base64'"),
        ({"type": "image", "image": {"path": "a"}}, "has no URL in 'image' or 'url' or 'base64'"),
        ({"type": "image", "url": 7}, "has no URL in 'image' or 'url' or 'base64'"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "has no URL in 'image'"),
    ],
)
def test_parts_that_name_no_image_are_refused(part: dict[str, Any], message: str) -> None:
    """Oracle: the message."""
    with pytest.raises(RequestError, match=message):
        image_source("messages[0].content[0]", part)


def test_files_below_the_allowed_folder_are_read_and_no_other(tmp_path: Path) -> None:
    """Oracle: the file's bytes; links, parents, devices and other hosts lead nowhere, with one message for all."""
    allowed, secret = tmp_path / "a", tmp_path / "secret.png"
    allowed.mkdir()
    secret.write_bytes(PICTURE)
    (allowed / "with space.png").write_bytes(PICTURE)
    (allowed / "link.png").symlink_to(secret)
    (allowed / "inner.png").symlink_to(allowed / "with space.png")
    (allowed / "loop.png").symlink_to(allowed / "loop.png")
    limits = {"allowed_path": str(allowed)}
    assert read(f"file://{allowed}/with%20space.png", **limits) == PICTURE
    assert read(f"file://localhost{allowed}/inner.png", **limits) == PICTURE
    for url in (
        f"file://{allowed}/link.png",
        f"file://{allowed}/../secret.png",
        f"file://{allowed}/%2e%2e/secret.png",
        f"file://{allowed}/loop.png",
        f"file://{allowed}",
        f"file://{allowed}/absent.png",
        f"file://{allowed}x/secret.png",
        f"file://other{allowed}/inner.png",
        "file:///dev/zero",
        "file:///%00",
        "file:relative.png",
    ):
        with pytest.raises(RequestError, match="not below --allowed-local-media-path, or cannot be read"):
            read(url, **limits)


class Handler(http.server.BaseHTTPRequestHandler):
    """A picture, redirects, a slow and a large answer, by the path."""

    def do_GET(self) -> None:
        kind = self.path.strip("/")
        if kind.startswith("to="):
            self.send_response(302)
            self.send_header("Location", kind[3:])
            self.end_headers()
            return
        if kind == "drip":
            with contextlib.suppress(OSError):
                for _ in range(200):
                    self.wfile.write(b"H")
                    self.wfile.flush()
                    time.sleep(0.02)
            return
        self.send_response(404 if kind == "absent" else 200)
        if kind in ("parts", "cut"):
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n" % len(PICTURE) + PICTURE + (b"\r\n0\r\n\r\n" if kind == "parts" else b""))
            return
        if kind == "short":
            self.send_header("Content-Length", str(len(PICTURE) + 9))
        if kind == "packed":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(b"x" * 10_000 if kind == "large" else PICTURE)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server of images, at a free port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as one:
        one.daemon_threads = True
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{one.server_port}"
        one.shutdown()
        thread.join()


def test_an_allowed_host_is_asked(server: str) -> None:
    """Oracle: the server's file, also behind redirects; an address in the list may be a private one."""
    assert fetch(f"{server}/a.png", [server], 1 << 20) == PICTURE
    assert fetch(f"{server}/to=/to=/a.png", [server], 1 << 20) == PICTURE
    assert fetch(f"{server}/parts", [server], 1 << 20) == PICTURE  # in chunks, with no length
    assert read(f"{server}/a.png", allowed_domains=(server,)) == PICTURE


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent", "its server answered 404"),
        ("short", "could not be fetched"),
        ("packed", "sent it compressed"),
        ("large", "more than 5,000 bytes"),
        ("to=http://169.254.169.254/latest/meta-data", "not fetched from '169.254.169.254'"),
        ("to=http://localhost/", "not fetched from 'localhost'"),
        ("to=file:///etc/passwd", "must be https://HOST"),
        ("to=//169.254.169.254/latest", "not fetched from '169.254.169.254'"),
        ("to=http://2130706433/", "not fetched from '2130706433'"),
        ("cut", "could not be fetched"),
        ("to=/to=/to=/to=/to=/a.png", "more than 3 redirects"),
    ],
)
def test_what_a_host_answers_is_bounded(server: str, path: str, message: str) -> None:
    """Oracle: the message; a redirect is checked as the first URL is."""
    with pytest.raises(RequestError, match=message):
        fetch(f"{server}/{path}", [server], 5000)


def test_a_slow_host_ends_at_the_deadline(server: str) -> None:
    """Oracle: the error; the server would send one byte after the other for much longer."""
    with pytest.raises(RequestError, match=r"could not be fetched \(its server took longer than 0.3 s\)"):
        fetch(f"{server}/drip", [server], 5000, timeout_s=0.3)


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "127.0.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::1", "fe80::1%eth0", "fc00::1",
     "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "fec0::1", "64:ff9b:1::1", "::127.0.0.1", "168.63.129.16",
     "::ffff:168.63.129.16", "64:ff9b::a83f:8110", "192.0.0.192", "192.88.99.1", "100.100.100.200", "198.18.0.1",
     "255.255.255.255", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "fd00:ec2::254", "ff02::1", "2001:db8::1", "3fff::1",
     "100::1", "5f00::1", "2600:1f18::5efe:a00:1", "2600:1f18::200:5efe:7f00:1"],
)  # fmt: skip
def test_a_name_that_leads_to_a_private_address_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Oracle: no connection is made, although the host is allowed, and one of its two addresses is public."""

    def resolve(*_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", (one, 443)) for one in ("93.184.216.34", address)]

    def connect(*_: Any, **__: Any) -> Any:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(RequestError, match="its address is not a public one"):
        fetch("https://images.example.com/a.png", ["images.example.com"], 5000)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "2606:4700::1", "64:ff9b::5db8:d822", "::ffff:93.184.216.34", "2002:5db8:d822::1"]
)
def test_a_name_that_leads_to_a_public_address_is_connected_to(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """By hand: addresses of the public internet, also those that a network translates."""
    asked: list[Any] = []

    def connect(place: Any, *_: Any, **__: Any) -> Any:
        asked.append(place)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (address, 443))])
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(RequestError, match="ConnectionRefusedError"):
        fetch("https://images.example.com/a.png", ["images.example.com"], 5000)
    assert asked == [(address, 443)]


@pytest.mark.parametrize(
    "url",
    [
        "https://images.example.com.evil.org/a.png",
        "https://evil.org/images.example.com",
        "https://user@images.example.com/a.png",
        "https://images.example.com@evil.org/a.png",
        "https://images.example.com\\@evil.org/a.png",
        "https://images.example.com./a.png",
        "http://images.example.com/a.png",
        "https://images.example.com:8443/a.png",
        "https://images.example.com:x/a.png",
        "https://images.example.com /a.png",
        "https:///a.png",
        "https://[::1/a.png",
        "https://\u0069mages.example.com\u3002/a.png",
    ],
)
def test_urls_that_only_look_like_an_allowed_host_are_refused(url: str) -> None:
    """Oracle: the error; nothing is looked up."""
    with pytest.raises(RequestError, match=r"not fetched from|must be https://HOST"):
        fetch(url, ["images.example.com"], 5000)


def test_entries_of_the_list_name_hosts() -> None:
    """Oracle: scheme and port by default; other entries are refused by name."""
    assert parse_domains(["A.example", "http://b.example", "c.example:8443"]) == parse_domains(
        ["https://a.example:443", "http://b.example:80", "https://c.example:8443/"]
    )
    for wrong in ("*", "a.example/path", "", "ftp://a.example", "u@a.example"):
        with pytest.raises(ConfigError, match="allowed_media_domains has"):
            parse_domains([wrong])
