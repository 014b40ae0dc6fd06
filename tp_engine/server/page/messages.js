// The messages of the conversation as elements.

export function element(name, className = "", text = "") {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text) made.textContent = text;
    return made;
}

export function question(text, images = []) {
    const root = element("article", "message user", text);
    for (const url of images) root.append(picture(url));
    return root;
}

/** An image of a question, by its data URL. */
export function picture(url) {
    const shown = element("img", "picture");
    shown.src = url;
    shown.alt = "an image of this message";
    return shown;
}

/** An answer that grows: reasoning (folded), text, tool calls, a line of figures, an error. */
export class Answer {
    constructor() {
        this.root = element("article", "message assistant waiting");
        this.text = element("div", "text");
        this.footer = element("footer");
        this.root.append(this.text, this.footer);
        this.written = this.text.appendChild(new Text());
        this.calls = [];
    }

    addText(text) {
        this.begun();
        this.written.appendData(text);
    }

    addReasoning(text) {
        this.begun();
        if (!this.reasoning) {
            const fold = element("details", "reasoning");
            const shown = element("div", "text");
            this.reasoning = shown.appendChild(new Text());
            fold.append(element("summary", "", "Reasoning"), shown);
            this.root.prepend(fold);
        }
        this.reasoning.appendData(text);
    }

    /** A piece of a tool call: the name comes first, the arguments in pieces. */
    addCall({ index, id, function: called = {} }) {
        this.begun();
        if (!this.calls[index]) {
            const root = element("div", "call");
            const name = element("b");
            const shown = element("code");
            root.append(name, shown);
            this.root.insertBefore(root, this.footer);
            this.calls[index] = { id: "", name: "", arguments: "", shown: { name, arguments: shown } };
        }
        const call = this.calls[index];
        call.id ||= id ?? "";
        for (const part of ["name", "arguments"]) {
            call[part] += called[part] ?? "";
            call.shown[part].textContent = call[part];
        }
    }

    figures(text) {
        this.footer.textContent = text;
    }

    note(text) {
        this.root.insertBefore(element("p", "note", text), this.footer);
    }

    fail(text) {
        this.begun();
        const shown = element("p", "error", text);
        shown.setAttribute("role", "alert");
        this.root.insertBefore(shown, this.footer);
    }

    begun() {
        this.root.classList.remove("waiting");
    }

    /** As a message of the next request. */
    message() {
        const calls = this.calls.filter(Boolean).map((call) => ({
            id: call.id,
            type: "function",
            function: { name: call.name, arguments: call.arguments },
        }));
        return { role: "assistant", content: this.written.data, ...(calls.length ? { tool_calls: calls } : {}) };
    }
}
