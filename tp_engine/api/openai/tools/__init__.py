"""Tool calls: the tools of a request, and parsers that find calls in generated text.

A parser is a small state machine: pieces of text in, events out (``events.py``).  To add a format, write a module with
a ``FORMAT`` and name it in ``chat/options.TOOL_FORMATS``.
"""
