"""Chat templates: Jinja programs of a model or of the operator, run in a sandbox, in processes that may be killed.

A template may use what transformers' ``apply_chat_template`` offers: filters, ``raise_exception``, ``strftime_now``,
``generation`` blocks and loop controls.  ::

    ChatTemplate.render             a fork that has compiled the template (template_process.py)
    any thread ---- variables ----> renders
               <--- the prompt ----
               <--- its end -------  too much time or memory: a refusal; the next rendering has a new one

A fork for each rendering would cost milliseconds; a lasting one costs tenths of one.
"""

import json
import queue
import re
import socket
import threading
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from tp_engine.api.openai.chat import template_process
from tp_engine.api.openai.chat.template_process import TemplateRefusal, parse_template
from tp_engine.errors import again
from tp_engine.system.isolation.cancellation import Cancellation, cancelled_by
from tp_engine.system.isolation.process import CallError, IsolatedProcess, Limits
from tp_engine.system.units import MIB

__all__ = ["ChatTemplate", "TemplateRefusal"]

MAX_RENDER_S = 10.0
MAX_PROMPT_CHARACTERS = 64 << 20
# Of the process, until it has compiled the template; then ``template_process.py`` limits each rendering.
_LIMITS = Limits(cpu_s=MAX_RENDER_S, memory_bytes=512 * MIB, wall_s=15 * 86400.0)
_DIES_LATER_S = 1.0  # after the time at which a loop of the template is stopped with a message
_WALL_PER_CPU, _GRACE_S = 10.0, 20.0
_MAX_RENDERING = 4  # of one template at a time, as many as there are kinds of threads that prepare requests
_END_S = 60.0
_PROCESS = IsolatedProcess(prepare=(template_process.prepare, ""), max_calls=256)


class ChatTemplate:
    """A template.  Raises ``ConfigError`` for text that is not one.  For any thread."""

    def __init__(self, text: str) -> None:
        parse_template(text)
        self._text = text
        # Not ``threading.Semaphore``: an exception set by another thread may leave its lock taken.
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(_MAX_RENDERING):
            self._places.put(None)
        self._idle: list[_Fork] = []
        weakref.finalize(self, _close_all, self._idle)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text; raises ``TemplateRefusal`` if the template raises, takes too long or writes too much."""
        return self.timed(variables, MAX_RENDER_S)[0]

    def timed(self, variables: Mapping[str, Any], cpu_s: float, now: str | None = None) -> tuple[str, float]:
        """The text and the seconds of processor time that it took, at most ``cpu_s``; a refusal has them as its
        ``cpu_s``.  ``now`` is an ISO time for templates that ask for it."""
        limits = {"cpu_s": cpu_s, "dies_s": cpu_s + _DIES_LATER_S, "max_characters": MAX_PROMPT_CHARACTERS}
        try:
            data = json.dumps({"variables": variables, "now": now, **limits}, default=str).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateRefusal(f"what it gets cannot be written as JSON ({error})") from error
        self._places.get()
        try:
            took_s, is_prompt, text = self._rendered(data, cpu_s)
        finally:
            self._places.put(None)
        if not is_prompt:
            raise TemplateRefusal(text, cpu_s=took_s)
        return text, took_s

    def _rendered(self, data: bytes, cpu_s: float) -> tuple[float, bool, str]:
        """A process's answer to a job: its time, and the prompt or the reason why not."""
        fork = self._idle.pop() if self._idle else _Fork(self._text)
        try:
            wall_s = cpu_s * _WALL_PER_CPU + _GRACE_S
            if not (answer := fork.ask(data, wall_s)):  # it was old
                fork = _Fork(self._text)
                answer = fork.ask(data, wall_s)
            took_s, is_prompt, text = json.loads(answer)
        except CallError as error:
            raise TemplateRefusal(f"the template {error}", cpu_s=cpu_s) from error
        except BaseException:  # after an exception in the wait, the next job would get this one's answer
            fork.close()
            raise
        self._idle.append(fork)
        return took_s, is_prompt, text

    def mentions(self, word: str) -> bool:
        """Whether the template's source has the word, not just within a longer one."""
        return re.search(rf"\b{re.escape(word)}\b", self._text) is not None


class _Fork:
    """One process that renders."""

    def __init__(self, text: str) -> None:
        ours, theirs = socket.socketpair()
        self._link = Connection(ours.detach())
        self._end: Exception | None = None
        self._cancellation = Cancellation()
        self._thread = threading.Thread(target=self._run, args=(text, theirs), name="chat-template", daemon=True)
        self._thread.start()

    def ask(self, data: bytes, timeout_s: float) -> bytes:
        """The answer to a job; empty if the process has ended normally; raises for any other end."""
        try:
            self._link.send_bytes(data)
            if self._link.poll(timeout_s):
                return self._link.recv_bytes()
        except TimeoutError:  # set by another thread: the link itself raises none
            raise
        except (EOFError, OSError):
            pass
        self._cancellation.cancel()
        self.close()
        self._thread.join(_END_S)
        if self._end is not None:
            raise again(self._end)
        return b""

    def close(self) -> None:
        """Have the process end."""
        self._link.close()

    def _run(self, text: str, theirs: socket.socket) -> None:
        """Wait for the end of the process, and report it through the other end of the link."""
        with theirs, cancelled_by(self._cancellation):
            files = [theirs.fileno()]
            try:
                _PROCESS.call(template_process.serve, text.encode(), _LIMITS, descriptors=files, repeats=False)
            except Exception as error:
                self._end = error


def _close_all(forks: list[_Fork]) -> None:
    for fork in forks:
        fork.close()
