// Every rank: what its memory holds, and how long its steps take.

import { bytes, count, percent, quantile, seconds } from "./format.js";
import { element } from "./messages.js";

// Lines of the ledger whose sum is the rank's memory, in the order of the bar.
const LINES = { weights: "weights", kv_cache: "KV cache", activations: "activations", non_torch: "other libraries",
    cuda_graphs: "CUDA graphs", tables: "tables", states: "recurrent states", adapters: "adapters" };
const MAX_STEPS = 1024;

export class Ranks {
    constructor() {
        this.root = document.getElementById("rank-rows");
        this.line = document.getElementById("ranks-line");
        this.rows = [];
        for (const [name, words] of Object.entries(LINES)) {
            const entry = document.getElementById("memory-legend").appendChild(element("span"));
            entry.append(element("i", name), words);
        }
    }

    update({ ranks, model, speculation }) {
        const steps = `${count(Math.max(0, ...ranks.map(({ steps }) => steps)))} steps on ${model.device}`;
        this.line.textContent = speculation?.runs ? `${steps} · ${accepted(speculation)}` : steps;
        ranks.forEach((rank, i) => (this.rows[i] ??= new Row(this.root)).update(rank));
    }
}

/** Of drafted runs, each of which brings one token more than were drafted right. */
function accepted({ runs, drafted, right }) {
    return `drafted runs bring ${(1 + right / runs).toFixed(1)} tokens a step, ${percent(right / drafted)} of draft tokens right`;
}

class Row {
    constructor(root) {
        this.name = element("b");
        this.bar = element("div", "bar");
        this.bar.setAttribute("role", "img");
        this.held = element("small");
        this.steps = element("p", "steps");
        this.parts = Object.keys(LINES).map((name) => this.bar.appendChild(element("span", name)));
        this.root = element("div", "rank");
        this.root.append(this.name, this.bar, this.held, this.steps);
        root.append(this.root);
        this.seen = 0;
        this.times = [];
    }

    update(rank) {
        this.name.textContent = rank.state === "ready" ? `rank ${rank.rank}` : `rank ${rank.rank}: ${rank.state}`;
        this.name.title = `process ${rank.pid} on ${rank.host_name}, last sign of life ${seconds(rank.heartbeat_age_s)} ago`;
        this.remember(rank);
        this.showMemory(rank.memory);
        this.showSteps(rank);
    }

    /** Add the steps that are new since the last report; the server reports the latest ones. */
    remember({ steps, recent_step_s: recent }) {
        const fresh = Math.min(Math.max(0, steps - this.seen), recent.length);
        this.times = [...this.times, ...recent.slice(recent.length - fresh)].slice(-MAX_STEPS);
        this.seen = steps;
    }

    showMemory(memory) {
        const held = Object.keys(LINES).map((name) => memory[name] ?? 0);
        const total = held.reduce((sum, value) => sum + value, 0);
        const words = Object.values(LINES).map((name, i) => `${name} ${bytes(held[i])}`);
        this.parts.forEach((part, i) => {
            part.style.flexGrow = total ? held[i] / total : 0;
            part.title = words[i];
        });
        this.bar.setAttribute("aria-label", words.join(", "));
        this.held.textContent = `${bytes(total)} of ${bytes(memory.requested)}`;
        this.held.title = `the rank may take ${bytes(memory.requested)}; the device has ${bytes(memory.total)}`;
    }

    showSteps(rank) {
        const sorted = [...this.times].sort((a, b) => a - b);
        const waits = rank.mean_plan_wait_s + rank.mean_collective_wait_s;
        const share = waits / (rank.mean_step_s + rank.mean_plan_wait_s || 1);
        const time = (at) => (sorted.length ? seconds(quantile(sorted, at)) : "–");
        const figures = [
            ["median", time(0.5), `of the last ${sorted.length} steps that this page saw`],
            ["p99", time(0.99), `of the last ${sorted.length} steps that this page saw`],
            ["waits", percent(share), "share of the time, since the start, without a plan or for the last rank to begin"],
        ];
        this.steps.replaceChildren(...figures.flatMap(([name, value, title]) => {
            const shown = element("b", "", value);
            shown.title = title;
            return [element("span", "", name), shown];
        }));
    }
}
