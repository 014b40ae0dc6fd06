// The running requests with their block tables; pointing at one highlights its blocks.

import { count, ranges, seconds } from "./format.js";
import { element } from "./messages.js";

const MAX_ID = 13;

export class Running {
    /** `light` is called with the blocks of the request that is pointed at, or null. */
    constructor(light) {
        this.light = light;
        this.card = document.getElementById("running");
        this.body = this.card.querySelector("tbody");
        this.line = document.getElementById("running-line");
        this.rows = new Map();
        this.pointed = null;
    }

    update({ requests }) {
        const { shown, running, waiting, omitted } = requests;
        const words = [`${count(running)} running`];
        if (waiting) words.push(`${count(waiting)} waiting`);
        if (omitted) words.push(`${count(omitted)} not shown`);
        this.line.textContent = words.join(", ");
        this.card.classList.toggle("idle", shown.length === 0);
        const present = new Set(shown.map(keyOf));
        for (const [key, row] of this.rows) if (!present.has(key)) this.remove(key, row);
        for (const one of shown) this.row(keyOf(one)).fill(one);
        const pointed = this.rows.get(this.pointed);
        if (pointed) this.light(pointed.blocks);
    }

    row(key) {
        if (!this.rows.has(key)) {
            const row = new Row();
            for (const kind of ["pointerenter", "focus"]) row.root.addEventListener(kind, () => this.point(key));
            for (const kind of ["pointerleave", "blur"]) row.root.addEventListener(kind, () => this.point(null));
            this.rows.set(key, row);
            this.body.append(row.root);
        }
        return this.rows.get(key);
    }

    point(key) {
        this.pointed = key;
        this.light(key === null ? null : this.rows.get(key).blocks);
    }

    remove(key, row) {
        row.root.remove();
        this.rows.delete(key);
        if (this.pointed === key) this.point(null);
    }
}

function sampleOf({ index }) {
    return index ? ` #${index}` : "";
}

function keyOf({ id, index }) {
    return `${id} ${index}`;
}

class Row {
    constructor() {
        this.root = element("tr");
        this.root.tabIndex = 0;
        const names = ["id", "phase", "tokens number", "age number", "size number", "blocks"];
        this.cells = Object.fromEntries(names.map((name) => [name.split(" ")[0], element("td", name)]));
        this.pill = this.cells.phase.appendChild(element("span"));
        this.table = this.cells.blocks.appendChild(element("code"));
        this.root.append(...Object.values(this.cells));
        this.root.addEventListener("click", () => this.root.classList.toggle("open"));
        this.root.addEventListener("keydown", ({ key }) => key === "Enter" && this.root.click());
        this.blocks = [];
    }

    fill(one) {
        this.blocks = one.blocks;
        const { id, tokens, age, size, blocks } = this.cells;
        blocks.title = "Click, or press Enter, to see all of it";
        id.textContent = (one.id.length > MAX_ID ? `${one.id.slice(0, MAX_ID - 1)}…` : one.id) + sampleOf(one);
        id.title = `${one.id}${sampleOf(one)}, priority ${one.priority}`;
        this.pill.className = `pill ${one.phase}`;
        this.pill.textContent = one.phase;
        tokens.textContent = `${count(one.prompt_tokens)} + ${count(one.output_tokens)}`;
        tokens.title =
            `${one.prompt_tokens} of the prompt (${one.cached_tokens} of them from the cache), ` +
            `${one.output_tokens} generated, ${one.computed_tokens} with K/V, preempted ${one.preemptions} times`;
        age.textContent = seconds(one.age_s);
        this.table.textContent = ranges(one.blocks) + (one.num_blocks > one.blocks.length ? " …" : "");
        size.textContent = count(one.num_blocks) + (one.shared_blocks ? ` (${count(one.shared_blocks)})` : "");
    }
}
