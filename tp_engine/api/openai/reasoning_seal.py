"""Reasoning that a client keeps and sends back without reading it: the text, and a code that shows any change.

It is not secret, as answers also have the plain text: the code proves that this server wrote it.

::

    tpe1.  base64( code of 16 bytes | text in UTF-8 )
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
from hashlib import blake2b

_MARK = "tpe1."
_CODE_BYTES = 16


class ReasoningSeal:
    """Seals texts with a ``key``, and opens those sealed with the same key; None: a new key for this process."""

    def __init__(self, key: str | None = None) -> None:
        own = secrets.token_bytes(32) if key is None else key.encode(errors="surrogatepass")
        self._key = blake2b(own, digest_size=32).digest()

    def sealed(self, text: str) -> str:
        """``text``, sealed."""
        raw = text.encode(errors="replace")
        return _MARK + base64.urlsafe_b64encode(self._code(raw) + raw).decode()

    def signature(self, text: str) -> str:
        """The code of ``text`` alone."""
        return _MARK + base64.urlsafe_b64encode(self._code(text.encode(errors="replace"))).decode()

    def opened(self, sealed: str) -> str | None:
        """The text of ``sealed``; None if it was sealed with another key, or has been changed."""
        try:
            both = base64.b64decode(sealed.removeprefix(_MARK), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        code, raw = both[:_CODE_BYTES], both[_CODE_BYTES:]
        is_ours = sealed.startswith(_MARK) and hmac.compare_digest(code, self._code(raw))
        return raw.decode() if is_ours else None

    def _code(self, raw: bytes) -> bytes:
        return blake2b(raw, key=self._key, digest_size=_CODE_BYTES).digest()
