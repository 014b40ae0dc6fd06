"""KV events: the option ``kv_events_config``, with vLLM's names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tp_engine.errors import ConfigError, shown
from tp_engine.options.fields import checked, json_object, key

CONFIG_NAME = "kv_events_config"
_LARGEST = 10**9
_LONGEST_TOPIC = 1024
_ENDPOINT = re.compile(r"(?:tcp://(?P<host>[^\s/]+):(?P<port>\*|\d{1,5})|(?:ipc|inproc)://\S+)")
_BOUND = re.compile(r"(?:ipc|inproc)://.*|.*(?:\*|::).*|tcp://(?:0\.0\.0\.0|lo):.*")
_OF_THIS_HOST = re.compile(r"(?:ipc|inproc)://.*|tcp://(?:lo|localhost|127\.[\d.]+|\[::1\]):.*")


@checked(CONFIG_NAME)
@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Where and how the prefix cache's content is told to routers.

    ``publisher`` is ``zmq`` or ``null`` (none).  Events are on with ``enable_kv_cache_events``, or if it is left out
    and ``publisher`` is ``zmq``.

    A PUB socket binds ``endpoint`` if it is on the interface ``lo``, on any address (``*``, ``::``, ``0.0.0.0``), ipc
    or inproc, and connects to it otherwise.  ``topic`` is the first frame of each message.  ``hwm`` is the number of
    messages that wait for a slow subscriber; further ones are dropped for it.

    A ROUTER socket at ``replay_endpoint`` sends the last ``buffer_steps`` messages again to who asks.

    ``max_queue_size`` changes of the cache may wait for the thread that publishes them.

    ``event_format`` ``map``: an event is a map of its fields; ``array``: a list of their values, which older routers
    read.  ``publish_salted``: blocks of prompts with a ``cache_salt`` are told too, with their salts.

    Raises ``ConfigError`` for what cannot be.
    """

    enable_kv_cache_events: bool | None = None
    publisher: str | None = key(None, choices=("zmq", "null"))
    endpoint: str = "tcp://lo:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = key(10_000, least=0, most=_LARGEST)
    hwm: int = key(100_000, least=1, most=_LARGEST)
    max_queue_size: int = key(100_000, least=1, most=_LARGEST)
    topic: str = ""
    event_format: str = key("map", choices=("map", "array"))
    publish_salted: bool = False

    def __post_init__(self) -> None:
        if len(self.topic) > _LONGEST_TOPIC or not self.topic.isprintable():
            raise ConfigError(
                f"{CONFIG_NAME} has the topic {shown(self.topic)}; it must be a text of at most {_LONGEST_TOPIC} "
                "characters"
            )
        _check_endpoint("endpoint", self.endpoint, binds=self.binds)
        if self.replay_endpoint is not None:
            _check_endpoint("replay_endpoint", self.replay_endpoint, binds=True)
            if self.replay_endpoint == self.endpoint and not self.endpoint.endswith((":*", ":0")):
                raise ConfigError(
                    f"{CONFIG_NAME} has {shown(self.endpoint)} as endpoint and as replay_endpoint; give two of them"
                )

    @classmethod
    def of(cls, given: KVEventsConfig | Mapping[str, Any] | str) -> KVEventsConfig:
        """Return the record of the option's JSON object, as text or as a mapping.  Raises ``ConfigError``."""
        if isinstance(given, KVEventsConfig):
            return given
        known = [spec.name for spec in dataclasses.fields(cls)]
        return cls(**json_object(CONFIG_NAME, given, known, example='{"enable_kv_cache_events":true}'))

    @property
    def is_on(self) -> bool:
        """Whether there are any events."""
        wanted = self.publisher == "zmq" if self.enable_kv_cache_events is None else self.enable_kv_cache_events
        return wanted and self.publisher != "null"

    @property
    def binds(self) -> bool:
        """Whether the PUB socket binds its endpoint; else it connects to it."""
        return _BOUND.fullmatch(self.endpoint) is not None


def is_of_this_host(endpoint: str) -> bool:
    """Return whether only processes of this host reach ``endpoint``."""
    return _OF_THIS_HOST.fullmatch(endpoint) is not None


def _check_endpoint(name: str, endpoint: str, *, binds: bool) -> None:
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or int((found["port"] or "1").replace("*", "0")) > 65535:
        raise ConfigError(
            f"{CONFIG_NAME} has the {name} {shown(endpoint)}; it must be tcp://HOST:PORT with a port up to 65535, "
            "ipc://PATH or inproc://NAME, such as tcp://lo:5557"
        )
    if not binds and found["port"] == "0":
        raise ConfigError(
            f"{CONFIG_NAME} has the {name} {shown(endpoint)}, to which the engine connects; it must name a port, or be "
            "on lo or on any address, such as tcp://*:5557, so that the engine binds it"
        )
