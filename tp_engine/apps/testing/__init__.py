"""A kit for tests of programs that talk to a language model: a pytest plugin with a real server, or an ``LLM``.

pytest loads ``plugin`` through the entry point ``pytest11``; docs/ci.md has examples.  Neither pytest nor the engine is
imported before a test needs it.
"""

from __future__ import annotations

from tp_engine.apps.testing.server import TpServer

__all__ = ["TpServer"]
