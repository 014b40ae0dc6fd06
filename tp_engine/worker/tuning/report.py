"""What was found of kernels, as text: a line per shape, or the table that a user sends."""

from collections.abc import Iterator

from tp_engine.worker.tuning.table import RIGHT, Tried, TunedShape, TunedTable, shown


def chosen(one: TunedShape) -> str:
    """Return the choice of a shape in words."""
    if one.choice == one.default:
        return f"{shown(one.choice)}, the code's own choice"
    return f"{shown(one.choice)}; the code's own choice is {shown(one.default)}"


def as_summary(table: TunedTable) -> str:
    """Return a line for each shape."""
    if not table.shapes:
        return "this model has no product with several kernels on this device"
    lines = [f"{one.key}: {chosen(one)}" for one in table.shapes]
    faults = [f"{one.key}: {tried.candidate} {tried.verdict}" for one in table.shapes for tried in _faults(one)]
    return "\n".join((*lines, *faults))


def as_report(table: TunedTable) -> str:
    """Return the whole table.  It has no path, host or model name, because users send it."""
    facts = ", ".join(f"{name} {value}" for name, value in table.device.items())
    lines = [f"tp-engine {table.product}, {table.date}", facts]
    for one in table.shapes:
        lines += ["", f"{one.key}, of {one.count} weights", f"  {chosen(one)}", *_rows(one)]
        if one.clocks:
            lines.append(f"  clocks: {one.clocks}")
    lines += ["", "Microseconds of a call (ratio to the code's own choice); errors are parts of what is allowed."]
    return "\n".join(lines)


def _rows(one: TunedShape) -> Iterator[str]:
    """The candidates of a shape, a column for each number of rows."""
    sizes = sorted({size for tried in one.tried for size in tried.microseconds})
    width = max(len(tried.candidate) for tried in one.tried)
    if sizes:
        yield f"  {'rows':{width}}" + "".join(f"{size:>18,}" for size in sizes)
    for tried in one.tried:
        cells = "".join(f"{_cell(tried, size):>18}" for size in sizes)
        verdict = f"right, error {tried.error:.2f}" if tried.verdict == RIGHT else tried.verdict
        yield f"  {tried.candidate:{width}}{cells}   {verdict}"


def _cell(tried: Tried, size: int) -> str:
    if size not in tried.microseconds:
        return "-"
    ratio = tried.ratios.get(size)
    return f"{tried.microseconds[size]:,.1f}" + ("" if ratio is None else f" ({ratio:.2f})")


def _faults(one: TunedShape) -> list[Tried]:
    return [tried for tried in one.tried if tried.is_fault]
