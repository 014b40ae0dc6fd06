// Images for the next message: dropped, or pasted; a click on one takes it away again.

import { picture } from "./messages.js";

export class Images {
    /** `target` takes what is dropped and pasted; `shelf` shows what waits. */
    constructor(target, shelf) {
        this.shelf = shelf;
        this.urls = [];
        target.addEventListener("dragover", (event) => event.preventDefault());
        target.addEventListener("drop", (event) => this.take(event, event.dataTransfer));
        target.addEventListener("paste", (event) => this.take(event, event.clipboardData));
    }

    take(event, data) {
        const files = [...data.files].filter((file) => file.type.startsWith("image/"));
        if (!files.length) return;
        event.preventDefault();
        for (const file of files) {
            const reader = new FileReader();
            reader.onload = () => this.add(reader.result);
            reader.readAsDataURL(file);
        }
    }

    add(url) {
        this.urls.push(url);
        const shown = picture(url);
        shown.title = "remove";
        shown.addEventListener("click", () => {
            this.urls.splice([...this.shelf.children].indexOf(shown), 1);
            shown.remove();
        });
        this.shelf.append(shown);
    }

    clear() {
        this.urls = [];
        this.shelf.replaceChildren();
    }
}
