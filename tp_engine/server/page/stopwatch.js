// Times of one answer, as this browser sees them.

import { count, rate, seconds } from "./format.js";

// Within less time, arrivals show how the network bundles tokens, not how fast they were generated.
const SHORTEST_S = 0.05;

export class Stopwatch {
    constructor() {
        this.beganAt = performance.now();
        this.firstAt = this.lastAt = null;
        this.firstTokens = this.tokens = 0;
        this.ending = "";
        this.drafts = null;
    }

    /** Text has come; `usage` is the server's count so far. */
    see(usage) {
        this.lastAt = performance.now();
        this.tokens = usage?.completion_tokens ?? this.tokens + 1;
        if (this.firstAt === null) {
            this.firstAt = this.lastAt;
            this.firstTokens = this.tokens;
        }
    }

    /** The end of an answer tells how many of its tokens were drafted right, and wrong. */
    seeDrafts(usage) {
        const details = usage?.completion_tokens_details;
        if (details?.accepted_prediction_tokens === undefined) return;
        const right = details.accepted_prediction_tokens;
        this.drafts = `${count(right)} of ${count(right + details.rejected_prediction_tokens)} draft tokens right`;
    }

    /** Time to the first token, tokens, tokens per second after the first (if measurable), draft tokens, the reason of the end. */
    line() {
        if (this.firstAt === null) return this.ending;
        const parts = [`first token ${seconds((this.firstAt - this.beganAt) / 1e3)}`];
        parts.push(this.tokens === 1 ? "1 token" : `${count(this.tokens)} tokens`);
        const [tokens, time] = [this.tokens - this.firstTokens, (this.lastAt - this.firstAt) / 1e3];
        if (time >= SHORTEST_S) parts.push(`${rate(tokens / time)} tokens/s`);
        return [...parts, this.drafts, this.ending].filter(Boolean).join(" · ");
    }
}
