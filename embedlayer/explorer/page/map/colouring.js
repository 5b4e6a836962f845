/** What points look like: their colours, the legend, and which of them are shown. */

import { css, parse, sequential } from "../colour.js";
import { fit, h } from "../dom.js";
import { pixel } from "./splat.js";

const KEPT_BESIDE_FOUND = 0.4; // of a colour, while what was found stands out
const KEPT_BESIDE_NEAR = 0.6;

/** The page's colours and fonts, for a canvas. */
export function paletteOf(theme) {
  const style = getComputedStyle(document.documentElement);
  return { ...theme, mono: style.getPropertyValue("--mono"), font: style.getPropertyValue("--font") };
}

/** The scale of numbers as a strip. @param {boolean} dark */
export function ramp(dark) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const context = fit(canvas, 90, 10);
  for (let x = 0; x < 90; x++) { context.fillStyle = css(sequential(x / 89, dark)); context.fillRect(x, 0, 1, 10); }
  return canvas;
}

/**
 * Colours the points of a scene by a column at a time.
 * @param {import("./painting.js").Scene} scene
 * @param {{columns: any, chosen: () => string, theme: () => any, seen: () => {found: Int32Array | null, near: any[], isolated: boolean}, draw: () => void}} room
 *   `chosen`: the column's name; `seen`: what stands out
 */
export function colouring(scene, { columns, chosen, theme, seen, draw }) {
  const legend = h("div", { class: "map-legend" });
  let colours = paletteOf(theme());
  let groups = null; // the column, where it is one of groups
  let hidden = new Set(); // groups that are not shown
  let asked = 0;
  let closed = false;

  /** Take the column that is chosen now. */
  async function show() {
    const turn = ++asked;
    const column = await columns.load(chosen()).catch((error) => ({ error }));
    if (turn !== asked || closed) return;
    if (column.error) { legend.replaceChildren(h("span", { class: "ramp" }, column.error.message)); return; }
    groups = column.names ? column : null;
    if (!groups) hidden = new Set();
    paint(column);
    describe(column);
    restrict();
  }

  function paint(column) {
    const { found, near } = seen();
    const kept = found !== null ? KEPT_BESIDE_FOUND : near.length ? KEPT_BESIDE_NEAR : 1;
    const paper = parse(colours.paper);
    const soft = (rgb, share = kept) => pixel(rgb.map((value, i) => Math.round(paper[i] + (value - paper[i]) * share)));
    if (column.names) {
      const palette = column.names.map((_, i) => soft(parse(colours.series[i % 8])));
      column.of.forEach((value, id) => { scene.colours[id] = palette[value]; });
    } else {
      const steps = Array.from({ length: 256 }, (_, i) => soft(sequential(i / 255, colours.dark)));
      const none = soft(parse(colours.line));
      const [low, high] = column.range;
      column.values.forEach((value, id) => {
        scene.colours[id] = Number.isFinite(value) ? steps[Math.min(255, Math.max(0, Math.round((255 * (value - low)) / (high - low || 1))))] : none;
      });
    }
    scene.paper = paper;
    scene.markColour = pixel(parse(colours.warm));
    scene.scale = Uint32Array.from({ length: 256 }, (_, i) => soft(sequential(i / 255, colours.dark), Math.min(1, i / 40)));
  }

  function describe(column) {
    if (scene.dense) return legend.replaceChildren(h("span", { class: "ramp" }, "few", ramp(colours.dark), "many tokens"));
    if (!column.names) return legend.replaceChildren(h("span", { class: "ramp" }, column.format(column.range[0]), ramp(colours.dark), column.format(column.range[1]), h("span", null, column.label)));
    const counts = new Uint32Array(column.names.length);
    for (const value of column.of) counts[value]++;
    legend.replaceChildren(...column.names.flatMap((name, i) => (counts[i] ? [groupButton(name, i, counts[i])] : [])));
  }

  function groupButton(name, i, count) {
    const dot = h("i");
    dot.style.background = colours.series[i % 8];
    const button = h("button", { type: "button", "aria-pressed": String(!hidden.has(i)), title: `${count.toLocaleString("en")} tokens; press to hide or show`, onClick: () => {
      if (hidden.has(i)) hidden.delete(i); else hidden.add(i);
      button.setAttribute("aria-pressed", String(!hidden.has(i)));
      restrict();
    } }, dot, name);
    return button;
  }

  /** Leave out what is hidden, or not found. */
  function restrict() {
    const { found, isolated } = seen();
    const only = hidden.size || isolated ? new Uint8Array(scene.colours.length).fill(isolated ? 0 : 1) : null;
    if (isolated) for (const id of found) only[id] = 1;
    if (hidden.size) groups.of.forEach((value, id) => { if (hidden.has(value)) only[id] = 0; });
    scene.only = only;
    draw();
  }

  const onTheme = () => { colours = paletteOf(theme()); show(); draw(); };
  document.addEventListener("themechange", onTheme);

  return {
    legend, show, restrict,
    palette: () => colours,
    /** Fade the points beside what stands out now. */
    async fade() {
      const column = await columns.load(chosen()).catch(() => null);
      if (column && !closed) { paint(column); draw(); }
    },
    /** Say anew what the picture means: points, or how many there are of them. */
    describe() {
      columns.load(chosen()).then(describe, () => {});
      draw();
    },
    close() { closed = true; document.removeEventListener("themechange", onTheme); },
  };
}
