// Numbers as people read them.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function count(value) {
    return whole.format(value);
}

/** One digit below ten, none above. */
export function rate(value) {
    return value > 0 && value < 10 ? value.toFixed(1) : count(value);
}

export function percent(share) {
    return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
}

export function bytes(value) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (value >= 1024 && unit < units.length - 1) {
        value /= 1024;
        unit += 1;
    }
    return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function seconds(value) {
    if (value < 1e-3) return `${Math.round(value * 1e6)} µs`;
    if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 2 : value < 0.1 ? 1 : 0)} ms`;
    return value < 100 ? `${value.toFixed(1)} s` : `${count(value)} s`;
}

/** [3, 4, 5, 9] becomes "3-5 9". */
export function ranges(numbers) {
    const runs = [];
    for (const number of numbers) {
        const last = runs.at(-1);
        if (last && number === last[1] + 1) last[1] = number;
        else runs.push([number, number]);
    }
    return runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(" ");
}

/** The value below which a share of the sorted numbers lies; there is at least one. */
export function quantile(sorted, share) {
    return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}
