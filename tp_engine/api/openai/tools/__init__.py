"""Tool calls: the tools of a request, and parsers that find calls in generated text.

Pieces of text go in, events come out (``events.py``).  All parsers share one base (``text_parser.py``).  To add a
format, write a row of ``TOOL_FORMATS`` (``formats.py``).
"""
