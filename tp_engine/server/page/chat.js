// The conversation: sends what the user writes, shows the answer, stops it on request.

import { events, request } from "./api.js";
import { Images } from "./images.js";
import { Answer, question } from "./messages.js";
import { Stopwatch } from "./stopwatch.js";

const STREAM = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
const NO_TEMPLATE = "This model has no chat template: your text alone was continued.";

export class Chat {
    /** `onActivity` is called when an answer begins and ends. */
    constructor(settings, onActivity) {
        this.settings = settings;
        this.onActivity = onActivity;
        this.log = document.getElementById("log");
        this.prompt = document.getElementById("prompt");
        this.sendButton = document.getElementById("send");
        this.images = new Images(document.getElementById("composer"), document.getElementById("pictures"));
        this.turns = [];
        this.running = null;
        this.hasTemplate = true;
        this.listen();
    }

    listen() {
        document.getElementById("composer").addEventListener("submit", (event) => {
            event.preventDefault();
            if (this.running) this.stop();
            else this.submit();
        });
        document.getElementById("clear").addEventListener("click", () => this.clear());
        this.prompt.addEventListener("keydown", (event) => {
            if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
            event.preventDefault();
            if (!this.running) this.submit();
        });
        document.addEventListener("keydown", (event) => {
            if (event.key === "Escape") this.stop();
        });
    }

    submit() {
        const text = this.prompt.value;
        const images = this.images.urls;
        if (!text.trim() && !images.length) return;
        this.prompt.value = "";
        this.images.clear();
        this.ask(text, images);
    }

    stop() {
        this.running?.abort();
    }

    clear() {
        this.stop();
        this.turns = [];
        for (const message of this.log.querySelectorAll(".message")) message.remove();
        this.prompt.focus();
    }

    async ask(text, images = []) {
        const answer = new Answer();
        const watch = new Stopwatch();
        const turns = this.turns; // clear() begins new ones
        this.log.append(question(text, images), answer.root);
        this.follow(true);
        this.setRunning(new AbortController());
        const signal = this.running.signal;
        const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
        turns.push({ role: "user", content: parts.length ? [...parts, { type: "text", text }] : text });
        try {
            await this.receive(text, answer, watch, signal);
        } catch (error) {
            if (signal.aborted) watch.ending = "stopped";
            else answer.fail(error.message);
        }
        answer.begun();
        answer.figures(watch.line());
        if (watch.firstAt === null) turns.pop();
        else turns.push(answer.message());
        this.setRunning(null);
        this.follow();
    }

    async receive(text, answer, watch, signal) {
        let response;
        try {
            response = await this.send(text, signal);
        } catch (error) {
            if (error.code !== "no_chat_template") throw error;
            this.hasTemplate = false;
            response = await this.send(text, signal);
        }
        if (!this.hasTemplate) answer.note(NO_TEMPLATE);
        for await (const event of events(response)) {
            const first = event.choices.find((choice) => choice.index === 0);
            if (first) this.show(first, event.usage, answer, watch);
            watch.seeDrafts(event.usage);
            answer.figures(watch.line());
        }
    }

    send(text, signal) {
        const body = { ...this.settings.fields(), ...STREAM };
        if (!this.hasTemplate) return request("v1/completions", { body: { ...body, prompt: text }, signal });
        const system = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
        const turns = this.settings.remembers ? this.turns : this.turns.slice(-1);
        return request("v1/chat/completions", { body: { ...body, messages: [...system, ...turns] }, signal });
    }

    show(choice, usage, answer, watch) {
        const delta = choice.delta ?? { content: choice.text };
        const reasoning = delta.reasoning_content ?? delta.reasoning;
        const follows = this.isAtEnd();
        if (delta.content || reasoning || delta.tool_calls) {
            if (watch.firstAt === null) this.onActivity();
            watch.see(usage);
        }
        if (reasoning) answer.addReasoning(reasoning);
        if (delta.content) answer.addText(delta.content);
        for (const call of delta.tool_calls ?? []) answer.addCall(call);
        if (choice.finish_reason) watch.ending = choice.finish_reason;
        if (follows) this.follow(true);
    }

    setRunning(controller) {
        this.running = controller;
        this.sendButton.textContent = controller ? "Stop" : "Send";
        this.sendButton.classList.toggle("stops", controller !== null);
        this.onActivity();
    }

    isAtEnd() {
        return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    }

    /** Keep the end visible, unless the user reads further up. */
    follow(always = this.isAtEnd()) {
        if (always) this.log.scrollTop = this.log.scrollHeight;
    }
}
