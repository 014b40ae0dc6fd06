"""Who may do what: the keys of clients and of operators, and the folders that requests may name.

::

    who                                       generate, read   abort            see what others have   act on the engine
    no key configured, on this machine        yes              all              yes                    yes
    no key configured, from other machines    yes              by id            yes                    no
    a key of api_key                          yes              its own          no                     no
    a key of admin_api_key                    yes              all              yes                    yes
    no key where only admin_api_key is set    yes              by id            no                     no

*What others have* are requests that run, files and batches.  Those without a key have one set of files and batches.
*To act on the engine* is to pause, reload, profile or empty it: what ``admins_only`` guards.
"""

import hashlib
import hmac
import ipaddress
import os
import stat
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from tp_engine.api.openai.errors import HttpError
from tp_engine.errors import RequestError, shown
from tp_engine.server.config import ServerConfig
from tp_engine.server.listener import is_local
from tp_engine.system.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request.

    ``owner`` tells the keys of ``api_key`` apart, and is None for all others.  ``place`` is where the connection comes
    from: an address, or of IPv6 the network of 64 bits that one client has.  ``remedy`` is for those who may not act.
    """

    owner: bytes | None = None
    place: str = ""
    sees_all: bool = False
    acts: bool = False
    remedy: str = ""

    @property
    def client(self) -> str:
        """The name under which requests take turns: the key, else the place."""
        return self.place if self.owner is None else self.owner.hex()

    def may_end(self, owner: bytes | None) -> bool:
        """Whether the caller may end a request of ``owner``."""
        return self.acts or self.owner == owner

    @property
    def stored_owner(self) -> str | None:
        """What is stored with the files and batches of the caller: a digest, never the key."""
        return None if self.owner is None else self.owner.hex()

    def may_see(self, owner: str | None) -> bool:
        """Whether the caller may see what ``owner`` has stored."""
        return self.sees_all or owner == self.stored_owner

    def check_admin(self, what: str) -> None:
        """Raise ``HttpError`` 403 unless the caller may act on the engine."""
        if not self.acts:
            raise HttpError(403, f"{what} is for operators: {self.remedy}", code="admins_only")


_CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039 (frozen)


def current_caller() -> Caller:
    """The sender of this task's request."""
    return _CALLER.get()


def act_for(owner: str | None) -> None:
    """Do the rest of this task on behalf of an owner, given as ``Caller.stored_owner`` gives it."""
    _CALLER.set(Caller(owner=None if owner is None else bytes.fromhex(owner)))


async def admins_only(request: Request) -> None:
    """Guard routes that act on the engine, as their dependency."""
    current_caller().check_admin(f"{request.method} {request.url.path}")


class KeyGuard:
    """Raises 401 for a missing or wrong key, on every path but ``open_paths``, and notes the caller.

    It compares all digests, in constant time, so that the time of an answer reveals nothing about the keys.
    """

    def __init__(self, config: ServerConfig, open_paths: Iterable[str]) -> None:
        self._open_paths = frozenset(open_paths)
        self._keys = [_digest(key.encode()) for key in config.api_keys]
        self._admin_keys = [_digest(key.encode()) for key in config.admin_api_keys]
        has_keys = bool(self._keys or self._admin_keys)
        remedy = "send a key of --admin-api-key" if self._admin_keys else "start the server with --admin-api-key"
        self._nobody = Caller(remedy=remedy)
        self._without_key = replace(self._nobody, sees_all=not has_keys, acts=not has_keys and is_local(config))

    def __call__(self, scope: Scope) -> None:
        caller = self._caller(scope)
        if caller is None:
            text = "missing or wrong API key; send Authorization: Bearer <key>, or x-api-key: <key>"
            raise HttpError(401, text, code="invalid_api_key")
        _CALLER.set(replace(caller, place=_place(scope)))

    def _caller(self, scope: Scope) -> Caller | None:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # as OpenAI's clients send theirs, and Anthropic's
        keys_sent = [key] * (scheme.lower() == "bearer") + headers.getlist("x-api-key")[:1]
        given = [_digest(one.strip().encode("latin-1")) for one in keys_sent]
        is_key, is_admin = (
            [one for one in given if sum(hmac.compare_digest(one, expected) for expected in keys)]
            for keys in (self._keys, self._admin_keys)
        )
        if is_admin:
            return Caller(sees_all=True, acts=True)
        if is_key:
            return replace(self._nobody, owner=is_key[0])
        if not self._keys:
            return self._without_key
        return self._nobody if scope["path"] in self._open_paths else None


def _place(scope: Scope) -> str:
    address: str = scope["client"][0].removeprefix("::ffff:") if scope.get("client") else ""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.IPv6Network((address.partition("%")[0], 64), strict=False))
    except ValueError:
        return address


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class ModelDirs:
    """The folders below which a request may name weights and adapters.

    These are the ``allowed`` ones, or else the model's and those of the adapters given at the start.  A folder outside
    is refused with the same words whether it exists or not, and is not looked at.
    """

    def __init__(self, allowed: Sequence[str], model: str, adapters: Iterable[str]) -> None:
        self._model = model
        folders = [_absolute(folder) for folder in (allowed or (model, *adapters))]
        self._real = [folder.resolve() for folder in folders]
        self._spelled = [*folders, *self._real]

    def check(self, folder: str, param: str) -> None:
        """Raise ``RequestError`` unless ``folder``, of field ``param``, is the model itself or below such a folder.

        Links are followed: what they lead to must be below one, too.
        """
        if folder == self._model:
            return
        spelled = os.path.expanduser(folder)
        if (
            "\0" in folder
            or not _is_below(_absolute(spelled), self._spelled)
            or not _is_below(Path(spelled).resolve(), self._real)
        ):
            raise RequestError(
                f"{param} is {shown(folder, 200)}, which is not below a folder that requests may name; start the "
                "server with --allowed-model-dirs FOLDER",
                param=param,
            )


def _absolute(folder: str) -> Path:
    """The folder with ``..`` resolved, without a look at the disk."""
    return Path(os.path.abspath(os.path.expanduser(folder)))


def _is_below(place: Path, folders: Iterable[Path]) -> bool:
    return any(place.is_relative_to(folder) for folder in folders)


def warn_of_exposure(config: ServerConfig) -> None:
    """Log settings that let others use the server or see its keys."""
    if not is_local(config) and not config.api_keys:
        logger.warning(
            "everybody who reaches %s can use this server: it has no --api-key; what acts on the engine needs an "
            "--admin-api-key (docs/keys.md)",
            config.host,
        )
    for path in filter(None, (config.api_key_file, config.admin_api_key_file)):
        mode = stat.S_IMODE(Path(path).expanduser().stat().st_mode)
        if mode & 0o077:
            logger.warning("the keys in %s can be read by other users (mode %03o): chmod 600 it", path, mode)
