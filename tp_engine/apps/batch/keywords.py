"""The keywords of ``run_batch`` beside those of ``LLM``, for editors and type checkers: the fields of
``BatchConfig``.

``scripts/generate`` writes this file.  What each keyword means is in its field's ``option(...)`` and in
docs/flags_server.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from tp_engine.api.keywords import EngineOptions


class BatchOptions(EngineOptions, total=False):
    """The types that a caller may give; other spellings of vLLM and SGLang are taken too."""

    enable_auto_tool_choice: bool
    tool_call_parser: str
    reasoning_parser: str
    reasoning_key: str | None
    error_file: str | None
    output_order: str
    shard: str
    resume: bool
    validate_only: bool
    strict: bool
    served_model_name: Sequence[str] | str
    max_in_flight: int | None
    max_body_bytes: int | str
    summary_file: str | None
    errors_exit_code: int | None
    progress_bar: bool
