// What all canvases share: sharp pixels, and the colours of the style sheet.

let probe = null;

/** The colour of a custom property in the current theme. */
export function colour(name) {
    probe ??= document.body.appendChild(Object.assign(document.createElement("i"), { hidden: true }));
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
}

/** An empty context whose units are CSS pixels, with the canvas's size in them. */
export function blank(canvas, height = canvas.clientHeight) {
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const [pixelWidth, pixelHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== pixelWidth) canvas.width = pixelWidth;
    if (canvas.height !== pixelHeight) canvas.height = pixelHeight;
    if (canvas.clientHeight !== height) canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return { context, width, height };
}
