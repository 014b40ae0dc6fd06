// The last minutes as lines: one sample per second, now at the right edge.

import { blank, colour } from "./drawing.js";
import { count, percent, rate } from "./format.js";

const SPANS_S = [60, 120, 300, 600];
const TOP = 14;

export class Charts {
    constructor() {
        this.rate = new Chart("rate", rate);
        this.load = new Chart("load", count);
        this.usage = new Chart("usage", percent);
    }

    update(page) {
        const { history, pool, requests } = page;
        const total = page.model.num_blocks;
        const share = (values) => values.map((value) => value / total);
        const generated = history.generation_tokens_per_s;
        this.rate.update(history.age_s, [
            { values: history.prompt_tokens_per_s, colour: "quiet" },
            { values: generated, colour: "used", filled: true },
        ]);
        this.load.update(history.age_s, [
            { values: history.waiting, colour: "shared" },
            { values: history.running, colour: "used", filled: true },
        ]);
        this.usage.update(history.age_s, [
            { values: share(history.used.map((used, i) => used + history.cached[i])), colour: "cached", filled: true },
            { values: share(history.used), colour: "used", filled: true },
        ]);
        this.rate.say(rate(generated.at(-1) ?? 0));
        this.load.say(requests.waiting ? `${requests.running} + ${count(requests.waiting)}` : count(requests.running));
        this.usage.say(percent(pool.used / total));
    }
}

class Chart {
    constructor(name, format) {
        this.canvas = document.getElementById(`${name}-chart`);
        this.number = document.getElementById(name);
        this.format = format;
    }

    /** The present figure, beside the title. */
    say(text) {
        this.number.textContent = text;
        const title = this.number.parentElement.firstChild.textContent.trim();
        this.canvas.setAttribute("aria-label", `${title}: ${text} now, at most ${this.format(this.highest)}`);
    }

    update(ages, lines) {
        const { context, width, height } = blank(this.canvas);
        this.highest = Math.max(0, ...lines.flatMap(({ values }) => values));
        const scale = (height - TOP - 2) / (this.highest || 1);
        const span = SPANS_S.find((seconds) => (ages[0] ?? 0) <= seconds + 5) ?? SPANS_S.at(-1);
        const x = (age) => width * (1 - age / span);
        const y = (value) => height - 1 - value * scale;
        context.fillStyle = colour("line");
        context.fillRect(0, height - 1, width, 1);
        for (const { values, colour: name, filled } of lines) {
            const points = values.map((value, i) => [x(ages[i]), y(value)]);
            draw(context, points, height, colour(name), filled);
        }
        label(context, width, this.highest ? `max ${this.format(this.highest)}` : "", `${span / 60} min`);
    }
}

function draw(context, points, height, ink, filled) {
    if (!points.length) return;
    const line = new Path2D();
    points.forEach(([x, y], i) => (i ? line.lineTo(x, y) : line.moveTo(x, y)));
    if (filled) {
        const area = new Path2D(line);
        area.lineTo(points.at(-1)[0], height);
        area.lineTo(points[0][0], height);
        context.globalAlpha = 0.16;
        context.fillStyle = ink;
        context.fill(area);
        context.globalAlpha = 1;
    }
    context.strokeStyle = ink;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke(line);
}

function label(context, width, highest, span) {
    context.fillStyle = colour("muted");
    context.font = "10.5px system-ui, sans-serif";
    context.textBaseline = "top";
    context.textAlign = "left";
    context.fillText(highest, 0, 0);
    context.textAlign = "right";
    context.fillText(span, width, 0);
}
