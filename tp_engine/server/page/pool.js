// The KV pool as a grid: a cell is a block (or several neighbours in a large pool), its colour the state.  Below it how
// full the tiers on the host and on disk are.

import { blank, colour } from "./drawing.js";
import { count, percent } from "./format.js";

const MAX_HEIGHT = 190;
const SIZES = [16, 14, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3];
const DIMMED = 0.28;

export class Pool {
    constructor() {
        this.canvas = document.getElementById("pool-grid");
        this.line = document.getElementById("pool-line");
        this.hint = document.getElementById("pool-hint");
        this.numbers = document.querySelectorAll("#pool [data-state]");
        this.tiers = document.querySelectorAll("#pool .tier");
        this.states = new Uint8Array();
        this.names = [];
        this.perCell = 1;
        this.lit = null;
        this.shown = [];
        this.canvas.addEventListener("pointermove", (event) => this.point(event));
        this.canvas.addEventListener("pointerleave", () => (this.hint.textContent = ""));
        new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    }

    update(page) {
        const { pool, model } = page;
        this.states = unpack(pool.grid);
        this.names = pool.grid.states;
        this.perCell = pool.grid.blocks_per_cell;
        this.shown = page.requests.shown;
        const shared = Math.min(pool.used, this.perCell * this.states.filter((state) => state === 3).length);
        const counts = { free: pool.free, cached: pool.cached, used: pool.used - shared, shared };
        for (const number of this.numbers) number.textContent = count(counts[number.dataset.state]);
        const cell = this.perCell > 1 ? `, ${this.perCell} per cell` : "";
        this.line.textContent = `${count(model.num_blocks)} blocks of ${model.block_size} tokens${cell}`;
        const words = Object.entries(counts).map(([state, number]) => `${count(number)} ${state}`);
        this.canvas.setAttribute("aria-label", `KV pool: ${words.join(", ")} blocks`);
        this.draw();
        for (const row of this.tiers) showTier(row, page.tiers[row.dataset.tier]);
    }

    /** Highlight these blocks; null for none. */
    light(blocks) {
        this.lit = blocks && new Set(blocks.map((block) => Math.floor(block / this.perCell)));
        this.draw();
    }

    draw() {
        const number = this.states.length;
        if (!number) return;
        const width = this.canvas.clientWidth;
        const columns = (size) => Math.max(1, Math.floor(width / size));
        const height = (size) => Math.ceil(number / columns(size)) * size;
        const size = SIZES.find((size) => height(size) <= MAX_HEIGHT) ?? SIZES.at(-1);
        const { context } = blank(this.canvas, height(size));
        const gap = size > 6 ? 2 : 1;
        this.columns = columns(size);
        this.pitch = { x: (width + gap) / this.columns, y: size };
        const inks = this.names.map(colour);
        for (let cell = 0; cell < number; cell++) {
            context.globalAlpha = this.lit && !this.lit.has(cell) ? DIMMED : 1;
            context.fillStyle = inks[this.states[cell]];
            const column = cell % this.columns;
            const [x, end] = [Math.round(column * this.pitch.x), Math.round((column + 1) * this.pitch.x)];
            context.beginPath();
            context.roundRect(x, Math.floor(cell / this.columns) * size, end - x - gap, size - gap, size > 8 ? 2 : 0);
            context.fill();
        }
    }

    point(event) {
        const column = Math.floor(event.offsetX / this.pitch.x);
        const cell = Math.floor(event.offsetY / this.pitch.y) * this.columns + column;
        const known = column < this.columns && cell < this.states.length;
        this.hint.textContent = known ? this.describe(cell) : "";
    }

    describe(cell) {
        const first = cell * this.perCell;
        const last = first + this.perCell - 1;
        const holders = this.shown.filter(({ blocks }) => blocks.some((block) => first <= block && block <= last));
        const name = this.perCell > 1 ? `blocks ${first}–${last}` : `block ${first}`;
        const held = holders.length ? `, held by ${holders.slice(0, 3).map(({ id }) => id).join(", ")}` : "";
        return `${name}: ${this.names[this.states[cell]]}${held}${holders.length > 3 ? " …" : ""}`;
    }
}

/** The share of a tier's slots that hold a block; no row without such a tier. */
function showTier(row, tier) {
    row.hidden = !tier;
    if (!tier) return;
    row.querySelector(".bar span").style.flexBasis = percent(tier.used / tier.slots);
    row.querySelector("b").textContent = `${count(tier.used)} of ${count(tier.slots)} blocks`;
}

/** One state per cell; four cells lie in a byte. */
function unpack(grid) {
    const packed = Uint8Array.from(atob(grid.cells), (byte) => byte.charCodeAt(0));
    return Uint8Array.from({ length: grid.num_cells }, (_, cell) => (packed[cell >> 2] >> (2 * (cell & 3))) & 3);
}
