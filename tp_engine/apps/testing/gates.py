"""What ``tp_eval`` and ``tp_bench`` do: the gates of ``tp-engine eval`` and ``tp-engine bench serve``, of the session's
server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp_engine.apps.gates.report import GateReport
    from tp_engine.apps.testing.server import TpServer


def ask_tasks(
    server: TpServer,
    *tasks: str,
    threshold: str | float | Mapping[str, str | float] | None = None,
    against: str | None = None,
    record: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    **options: Any,
) -> GateReport:
    """Ask ``server`` the questions of ``tasks``, as ``tp-engine eval`` does with these options.

    ``threshold`` is the least share of right answers, such as "90%" or 0.9, or one for each task.  ``ConfigError`` for
    orders that cannot work.
    """
    from pathlib import Path

    from tp_engine.api.server_client import ServerClient
    from tp_engine.apps.eval.asking import Asker
    from tp_engine.apps.eval.judging import Reference
    from tp_engine.apps.eval.options import EvalConfig
    from tp_engine.apps.eval.run import Demands, evaluate

    of_each = threshold if isinstance(threshold, Mapping) else {} if threshold is None else {"": threshold}
    thresholds = tuple(f"{task}={share}" if task else str(share) for task, share in of_each.items())
    config = EvalConfig(
        tasks=tasks, threshold=thresholds, against=against, num_fewshot=num_fewshot, limit=limit, **options
    )
    asker = Asker(
        client=ServerClient(server.url, api_key=server.api_key),
        model=server.model,
        as_chat=not config.completions,
        sampling=config.sampling or {},
        concurrency=config.concurrency,
    )
    report = evaluate(
        asker,
        config.loaded_tasks("sums"),
        Demands(
            thresholds=config.thresholds,
            reference=None if against is None else Reference.read(against),
            force=config.force,
        ),
        subject=server.model,
        num_fewshot=num_fewshot,
        limit=limit,
    )
    if record is not None:
        Path(record).write_text(report.as_json() + "\n", encoding="utf-8")
    report.write(junit=config.junit, markdown=config.markdown)
    return report


def measure_speed(server: TpServer, **options: Any) -> GateReport:
    """Measure ``server`` under load, as ``tp-engine bench serve`` does with these options under their names in Python;
    ``against`` or ``record`` is one of them."""
    from tp_engine.apps.bench.gate import SpeedGate
    from tp_engine.apps.bench.serving.command import measure_for
    from tp_engine.apps.bench.serving.options import parse_arguments
    from tp_engine.errors import ConfigError
    from tp_engine.model_config import load_model_config

    options = {"vocab_size": load_model_config(server.place)[0].vocab_size, **options}
    flags = [f"--{name.replace('_', '-')}" for name in options]
    pairs = [
        [flag] if value is True else [flag, str(value)] for flag, value in zip(flags, options.values(), strict=True)
    ]
    own = ["--base-url", server.url, "--api-key", server.api_key, "--model", server.model]
    args = parse_arguments(None, [*own, *(word for pair in pairs for word in pair)])
    gate = SpeedGate.of(args)
    if gate is None:
        raise ConfigError("tp_bench needs a baseline: give against, or record to write one")
    return measure_for(gate, args)
