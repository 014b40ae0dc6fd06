// Requests to this server: the key, errors in the server's own words, streams.

const KEY = "tp_engine.api_key";
let asking = null;

export class ApiError extends Error {
    constructor(error, status) {
        super(error.message ?? `the server answered ${status}`);
        this.status = status;
        this.code = error.code ?? null;
    }
}

/**
 * Request `path`, relative to this page, by POST if there is a body; returns the Response of a successful request.
 * If the key is missing, ask the user for it and repeat the request.
 */
export async function request(path, { body, signal } = {}) {
    for (;;) {
        const sent = sessionStorage.getItem(KEY);
        const headers = sent ? { Authorization: `Bearer ${sent}` } : {};
        if (body) headers["Content-Type"] = "application/json";
        const method = body ? "POST" : "GET";
        const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
        if (response.ok) return response;
        const error = new ApiError(await errorOf(response), response.status);
        if (response.status !== 401) throw error;
        if (sent === sessionStorage.getItem(KEY)) await askForKey(sent ? error.message : "");
    }
}

async function errorOf(response) {
    const text = await response.text();
    try {
        return JSON.parse(text).error ?? { message: text };
    } catch {
        return { message: text || `${response.status} ${response.statusText}` };
    }
}

/** The events of a streamed answer; throws an error among them. */
export async function* events(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
        for (;;) {
            const { value, done } = await reader.read();
            if (done) throw new ApiError({ message: "the connection ended before the answer did" }, 0);
            const lines = (rest + value).split("\n");
            rest = lines.pop();
            for (const line of lines) {
                if (!line.startsWith("data: ")) continue;
                if (line === "data: [DONE]") return;
                const event = JSON.parse(line.slice(6));
                if (event.error) throw new ApiError(event.error, 0);
                yield event;
            }
        }
    } finally {
        reader.cancel().catch(() => {});
    }
}

/** One dialog asks for the key on behalf of all requests; all continue when it has one. */
function askForKey(words) {
    asking ??= new Promise((resolve) => {
        const dialog = document.getElementById("key-dialog");
        const input = document.getElementById("key-input");
        document.getElementById("key-words").textContent = words;
        input.value = "";
        dialog.oncancel = (event) => event.preventDefault();
        dialog.onclose = () => {
            if (!input.value) return dialog.showModal();
            sessionStorage.setItem(KEY, input.value.trim());
            asking = null;
            resolve();
        };
        dialog.showModal();
    });
    return asking;
}
