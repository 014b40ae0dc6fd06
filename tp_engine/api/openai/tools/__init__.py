"""Tool calls: what requests say of them, and parsers that find them in generated text.

A parser is a small state machine: text pieces in, events out (``events.py``), whatever the split of the text.  It knows
nothing of HTTP, tokens or requests.
"""
