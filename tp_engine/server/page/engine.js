// The live view: asks the server about once a second, as long as the page is visible.

import { request } from "./api.js";
import { Charts } from "./charts.js";
import { count } from "./format.js";
import { Pool } from "./pool.js";
import { Ranks } from "./ranks.js";
import { Running } from "./running.js";

const INTERVAL_MS = 1000;
const PATIENCE_MS = 10000;

export class Engine {
    constructor() {
        this.panel = document.getElementById("engine");
        this.status = document.getElementById("status");
        this.modelLine = document.getElementById("model-line");
        this.pool = new Pool();
        this.parts = [this.pool, new Charts(), new Running((blocks) => this.pool.light(blocks)), new Ranks()];
        this.page = null;
        this.wake = () => {};
        document.addEventListener("visibilitychange", () => this.look());
    }

    /** Ask the server now instead of at the next second. */
    look() {
        this.wake();
    }

    redraw() {
        if (this.page) for (const part of this.parts) part.update(this.page);
    }

    async run() {
        for (;;) {
            if (this.isSeen()) await this.poll();
            await new Promise((resolve) => {
                this.wake = resolve;
                setTimeout(resolve, INTERVAL_MS);
            });
        }
    }

    isSeen() {
        return document.visibilityState === "visible" && this.panel.getClientRects().length > 0;
    }

    async poll() {
        try {
            const response = await request("engine", { signal: this.page && AbortSignal.timeout(PATIENCE_MS) });
            this.page = await response.json();
            this.redraw();
            this.introduce(this.page.model);
            this.say("live", "live");
        } catch (error) {
            this.say("away", error.status ? error.message : "the server does not answer");
        }
        this.panel.classList.toggle("stale", this.status.dataset.state === "away");
    }

    introduce(model) {
        const size = model.tensor_parallel_size;
        const ranks = size === 1 ? "1 rank" : `${size} ranks`;
        const length = `${count(model.max_model_len)} tokens`;
        this.modelLine.textContent = [model.name, ranks, model.device, model.dtype, length].join(" · ");
    }

    say(state, words) {
        this.status.dataset.state = state;
        const shown = this.status.querySelector(".words");
        if (shown.textContent !== words) shown.textContent = words;
    }
}
