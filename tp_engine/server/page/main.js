// Assembles the page: the playground, the live view, the colours, the tabs of narrow screens.

import { request } from "./api.js";
import { Chat } from "./chat.js";
import { Engine } from "./engine.js";
import { element } from "./messages.js";
import { Settings } from "./settings.js";

const THEME = "tp_engine.theme";
const THEMES = { auto: "Colours: as the system has them", light: "Colours: light", dark: "Colours: dark" };
const RETRY_MS = 2000;
// The task that the demo model of this project was trained for.
const DEMO = ["12+34=", "sort: 3 1 4", "reverse: 3 1 4", "copy: hello world", "a=3 b=7 c=5 ? b"];

const engine = new Engine();
const settings = new Settings();
const chat = new Chat(settings, () => engine.look());

function chooseTheme(name) {
    localStorage.setItem(THEME, name);
    document.documentElement.dataset.theme = name;
    const button = document.getElementById("theme");
    button.textContent = name[0].toUpperCase() + name.slice(1);
    button.title = THEMES[name];
    engine.redraw();
}

function listenToTheme() {
    const names = Object.keys(THEMES);
    const kept = localStorage.getItem(THEME);
    chooseTheme(names.includes(kept) ? kept : "auto");
    document.getElementById("theme").addEventListener("click", () => {
        chooseTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => engine.redraw());
}

function listenToTabs() {
    const tabs = [...document.querySelectorAll("[role=tab]")];
    const choose = (chosen) => {
        for (const tab of tabs) {
            tab.setAttribute("aria-selected", tab === chosen);
            tab.tabIndex = tab === chosen ? 0 : -1;
        }
        document.body.dataset.tab = chosen.getAttribute("aria-controls");
        engine.look();
    };
    tabs.forEach((tab, i) => {
        tab.addEventListener("click", () => choose(tab));
        tab.addEventListener("keydown", (event) => {
            if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
            choose(tabs[1 - i]);
            tabs[1 - i].focus();
        });
    });
}

async function findModels() {
    for (;;) {
        try {
            const { data } = await (await request("v1/models")).json();
            settings.offer(data.map(({ id }) => id));
            if (!engine.page) engine.say("ready", "ready");
            return data[0].root;
        } catch (error) {
            engine.say("away", error.status ? error.message : "the server does not answer");
            await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
        }
    }
}

function offerExamples(texts) {
    const buttons = texts.map((text) => {
        const button = element("button", "example", text);
        button.type = "button";
        button.addEventListener("click", () => chat.running || chat.ask(text));
        return button;
    });
    document.getElementById("examples").replaceChildren(...buttons);
    document.getElementById("first").textContent = "press one of these; the demo model was trained for such tasks alone.";
}

document.getElementById("api").textContent = new URL("v1", document.baseURI).href;
listenToTheme();
listenToTabs();
engine.run();
const name = await findModels();
document.title = `${name} · tp_engine`;
if (name === "demo_model") offerExamples(DEMO);
