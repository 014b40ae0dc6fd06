"""HTTPS over a Unix socket: one server process covers both, TLS and Unix sockets."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.e2e.frontend import running_server
from tp_engine.server.config import ServerConfig

REQUEST = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost")
ALTERNATIVE = ("-addext", "subjectAltName=DNS:localhost")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate, and is not here")
def test_https_over_a_unix_socket(tmp_path: Path) -> None:
    """Oracle: a client that trusts this certificate gets answers and streams; a client without trust gets none."""
    key, certificate, path = tmp_path / "key.pem", tmp_path / "certificate.pem", tmp_path / "socket"
    files = ("-keyout", str(key), "-out", str(certificate))
    subprocess.run(["openssl", *REQUEST, *ALTERNATIVE, *files], check=True, capture_output=True, timeout=30)
    config = ServerConfig(uds=str(path), ssl_keyfile=str(key), ssl_certfile=str(certificate))
    with running_server(config=config, verify=ssl.create_default_context(cafile=str(certificate))) as server:
        assert server.url == "https://localhost"
        assert server.post("/v1/completions", {"prompt": "abc"}).json()["choices"][0]["text"] == "abc"
        assert server.post("/v1/completions", {"prompt": "abc", "stream": True}).text.endswith("data: [DONE]\n\n")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as stranger, pytest.raises(httpx.ConnectError):
            stranger.get("https://localhost/health")
