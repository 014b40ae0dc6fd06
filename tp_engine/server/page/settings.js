// The settings of the playground: their fields in a request, and a line that summarises them.

const KEPT = "tp_engine.settings";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

export class Settings {
    constructor() {
        this.form = document.getElementById("settings-form");
        this.line = document.getElementById("settings-line");
        this.form.addEventListener("submit", (event) => event.preventDefault());
        this.form.addEventListener("input", () => this.changed());
        const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
        for (const [name, value] of Object.entries(kept)) this.field(name).value = value;
        this.changed();
    }

    field(name) {
        return this.form.elements[name];
    }

    get system() {
        return this.field("system").value.trim();
    }

    get remembers() {
        return this.field("remember").checked;
    }

    /** The names that the server answers to; the first one is chosen. */
    offer(names) {
        const options = names.map((name) => new Option(name, name));
        document.getElementById("models").replaceChildren(...options);
        if (!names.includes(this.field("model").value)) this.field("model").value = names[0];
        this.changed();
    }

    /** Fields of a request.  Invalid numbers are sent as they are: the server's error says what is allowed. */
    fields() {
        const fields = {};
        if (this.field("model").value) fields.model = this.field("model").value;
        for (const name of NUMBERS) {
            const text = this.field(name).value.trim();
            if (text) fields[name] = Number.isNaN(Number(text)) ? text : Number(text);
        }
        const more = this.field("more").value.trim();
        return more ? { ...fields, ...parsed(more) } : fields;
    }

    changed() {
        const texts = [...this.form.elements].filter((field) => field.name && field.type !== "checkbox");
        sessionStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(texts.map((field) => [field.name, field.value]))));
        const set = NUMBERS.filter((name) => this.field(name).value).map((name) => `${name} ${this.field(name).value}`);
        this.line.textContent = [this.field("model").value, ...set].filter(Boolean).join(" · ");
    }
}

function parsed(text) {
    let value;
    try {
        value = JSON.parse(text);
    } catch (error) {
        throw new Error(`More fields of the request: ${error.message}`);
    }
    if (value === null || typeof value !== "object" || Array.isArray(value)) {
        throw new Error('More fields of the request: write a JSON object, such as {"top_k": 20}');
    }
    return value;
}
