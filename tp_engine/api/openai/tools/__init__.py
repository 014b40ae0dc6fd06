"""Tool calls: the tools of a request, and parsers that find calls in generated text.

Pieces of text go in, events (``events.py``) come out.  All parsers share one base (``text_parser.py``).  To add a
format, write a row of ``TOOL_FORMATS`` (``formats.py``).
"""
