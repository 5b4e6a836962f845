import { css, parse, sequential } from "../colour.js";
import { empty, fit, h, onResize, select, token, visibleText } from "../dom.js";
import { columnsOf, namesInOrder } from "../map/columns.js";
import { gestures } from "../map/gestures.js";
import { KINDS, hex, kinds } from "../map/groups.js";
import { inside, makeGrid, nearest } from "../map/grid.js";
import { paintOver, pointPainter } from "../map/painting.js";
import { bytesOfAll, parseExpression, parseQuery, resolve, search } from "../map/search.js";
import { pixel } from "../map/splat.js";
import { fitView, pan, spread, toData, zoomAt } from "../map/view.js";

/** All tokens as points. */
export const room = {
  id: "map",
  title: "Map",
  sentence: "Every row of the table as a point, along the directions in which rows differ most. Neighbours are found in all dimensions.",
  needs: ["vectors"],
  keys: [["arrows, + −, 0", "move, zoom, fit (with the map in focus)"], ["Enter", "choose the token at the cross"], ["Esc", "forget what was found or chosen"]],
  open,
};

const LISTED = 200;
const NEIGHBORS = 20;

/** @param {HTMLElement} element */
async function open(element, context) {
  const { data, manifest, state } = context;
  const count = manifest.exported ? 3 : 6;
  const [{ texts, special }, { explained }, coordinates, normBytes] = await Promise.all([
    data.load("tokens"), data.load("axes"), data.load("coordinates", { count: String(count) }), data.load("norms"),
  ]);
  const size = texts.length;
  const component = (k) => new Float32Array(coordinates, 4 * size * k, size);
  const components = Math.min(coordinates.byteLength / 4 / size, count);
  const kind = kinds(texts, special);
  const columns = columnsOf({ texts, kind, norms: new Float32Array(normBytes), data, manifest, choice: () => chosen() });
  const lower = texts.map((text) => text.toLowerCase());
  let byText = null;

  const scene = {
    xs: component(0), ys: component(Math.min(1, components - 1)), view: null, home: 1, colours: new Uint32Array(size), only: null,
    marked: new Int32Array(), markColour: 0, dense: state.get("v") === "density", scale: new Uint32Array(256), paper: [255, 255, 255], showAxes: true,
  };
  let colours = paletteOf(context.theme());
  let grid = null;
  let names = null;
  let found = null; // what the search or the lasso holds
  let near = []; // neighbours of what is chosen
  let lasso = null;
  let lassoMode = false;
  let isolated = false;
  let hidden = new Set();
  let group = null;
  let tab = "near";
  let width = 0;
  let height = 0;
  let asked = 0;
  let closed = false;

  // the parts of the page
  const searchField = h("input", { type: "search", placeholder: "text, /regex/, #id, 0xE2 96", "aria-label": "Search tokens by text, /regex/, #id or bytes", spellcheck: false, autocomplete: "off" });
  const hits = h("output", { "aria-live": "polite" });
  const axisOptions = [...Array.from({ length: components }, (_, k) => [String(k + 1), `component ${k + 1} · ${share(explained[k])}`]), ["e", "likeness to what is chosen"]];
  const xAxis = select({ label: "Across", options: [...axisOptions, ["n", "neighbourhoods"]], value: state.get("x", "1"), onChange: (value) => { state.set({ x: value === "1" ? null : value }); setAxes(); } });
  const yAxis = select({ label: "Up", options: axisOptions, value: state.get("y", "2"), onChange: (value) => { state.set({ y: value === "2" ? null : value }); setAxes(); } });
  const colourBy = select({ label: "Colour", options: columns.options, value: state.get("c", "kind"), onChange: (value) => { state.set({ c: value === "kind" ? null : value }); setColours(); } });
  const denseButton = h("button", { type: "button", "aria-pressed": String(scene.dense), onClick: () => setDense(!scene.dense) }, "Density");
  const lassoButton = h("button", { type: "button", "aria-pressed": "false", title: "Draw around points", onClick: () => setLasso(!lassoMode) }, "Lasso");
  const points = h("canvas", { "aria-hidden": "true" });
  const over = h("canvas", { class: "map-over", tabIndex: 0, role: "application", "aria-label": "Map of all tokens. Arrow keys move, plus and minus zoom, Enter chooses the token at the cross." });
  const legend = h("div", { class: "map-legend" });
  const tip = h("div", { class: "map-tip", hidden: true });
  const progress = h("p", { class: "map-progress", role: "status", hidden: true });
  const zoomButton = (text, label, act) => h("button", { type: "button", "aria-label": label, title: label, onClick: act }, text);
  const stage = h("div", { class: "map-stage" }, points, over, legend,
    h("div", { class: "map-zoom" }, zoomButton("+", "Closer", () => zoom(1.5)), zoomButton("−", "Farther", () => zoom(1 / 1.5)), zoomButton("⤢", "Show all", home)),
    h("div", { class: "segments map-modes" }, denseButton, lassoButton), progress, tip);
  const side = h("aside", { class: "panel map-side", "aria-label": "Chosen tokens and their neighbours" });
  element.replaceChildren(h("div", { class: "map" },
    h("div", { class: "panel map-main" },
      h("div", { class: "map-tools" },
        h("label", { class: "field search" }, h("span", null, "Search", hits), searchField), colourBy, xAxis, yAxis), stage),
    side));
  const painter = pointPainter(points);

  // what is drawn
  let waiting = false;
  function draw() {
    if (waiting || closed) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      if (closed || !width || !scene.view) return;
      const start = performance.now();
      painter.paint(scene, width, height, Math.min(devicePixelRatio || 1, size > 60000 ? 1 : 2));
      paintOver(over.getContext("2d"), scene, {
        width, height, colours, axes: scene.showAxes ? [axisLabel(state.get("x", "1")), axisLabel(state.get("y", "2"))] : [width < 600 ? "neighbours lie together" : "neighbours lie together; distances between groups mean little", ""],
        rings: [...chosen().plus, ...chosen().minus], names: labelOrder(), textOf: labelOf, most: width < 600 ? 18 : 42, lasso,
        cross: document.activeElement === over && over.matches(":focus-visible"),
      });
      measured("map: frame", start);
    });
  }

  const labels = new Map();
  function labelOf(id) {
    if (!labels.has(id)) {
      const text = visibleText(texts[id]);
      labels.set(id, text.length > 24 ? `${text.slice(0, 23)}…` : text);
    }
    return labels.get(id);
  }

  function* labelOrder() {
    const { plus, minus } = chosen();
    yield* plus;
    yield* minus;
    const shown = new Set([...plus, ...minus]);
    for (const [id] of near) if (!shown.has(id)) { shown.add(id); yield id; }
    if (found) for (let i = 0; i < Math.min(found.length, 400); i++) if (!shown.has(found[i])) { shown.add(found[i]); yield found[i]; }
    if (found?.length && isolated) return;
    names ??= namesInOrder(texts, kind, columns.known("frequency"));
    for (const id of names) if (!shown.has(id) && (scene.only === null || scene.only[id])) yield id;
  }

  function axisLabel(id) {
    if (id === "n") return axisLabel("1"); // not laid out yet
    if (id === "e") return "cosine with what is chosen →";
    return `principal component ${id} · ${share(explained[Number(id) - 1])} of the variance →`;
  }

  async function setAxes() {
    yAxis.hidden = state.get("x") === "n";
    if (state.get("x") === "n") return setNeighbourhoods();
    const wanted = [state.get("x", "1"), state.get("y", "2")];
    const values = await Promise.all(wanted.map((id) => (id === "e" ? likeness() : component(Math.min(Number(id), components) - 1))));
    if (closed) return;
    scene.showAxes = true;
    tellProgress("");
    const mixed = wanted.includes("e");
    [scene.xs, scene.ys] = values.map((value) => (mixed ? standard(value) : value));
    grid = makeGrid(scene.xs, scene.ys);
    home();
  }

  async function setNeighbourhoods() {
    tellProgress(size > 20000 ? "Laying out neighbourhoods: this takes a while the first time …" : "Laying out neighbourhoods …");
    try {
      const places = await data.load("layout");
      if (closed || state.get("x") !== "n") return;
      [scene.xs, scene.ys] = [new Float32Array(places, 0, size), new Float32Array(places, 4 * size, size)];
      scene.showAxes = false;
      tellProgress("");
      grid = makeGrid(scene.xs, scene.ys);
      home();
    } catch (error) {
      if (!closed) tellProgress(error.message);
    }
  }

  function tellProgress(text) {
    progress.textContent = text;
    progress.hidden = !text;
  }

  async function likeness() {
    const { plus, minus } = chosen();
    if (!plus.length && !minus.length) return new Float32Array(size);
    return new Float32Array(await data.load("along", { plus: plus.join(","), minus: minus.join(",") }));
  }

  /** All points, between the buttons and the legend. */
  function fitted() {
    const [above, below] = width < 600 ? [48, 92] : [0, 56];
    const view = fitView(scene.xs, scene.ys, width, height - above - below);
    return { ...view, y: view.y - (below - above) / 2 / view.zoom };
  }

  function home() {
    if (!width) return;
    scene.view = fitted();
    scene.home = scene.view.zoom;
    rememberView();
    draw();
  }

  function zoom(factor, x = width / 2, y = height / 2) {
    scene.view = zoomAt(scene.view, factor, x, y, width, height, [scene.home * 0.1, scene.home * 3000]);
    rememberView();
    draw();
  }

  let remembering = 0;
  function rememberView() {
    clearTimeout(remembering);
    remembering = setTimeout(() => {
      if (closed || !scene.view) return;
      const view = fitted();
      const away = Math.abs(scene.view.zoom / view.zoom - 1) > 0.01 || Math.hypot(scene.view.x - view.x, scene.view.y - view.y) * view.zoom > 3;
      state.set({ at: away ? [scene.view.x, scene.view.y, scene.view.zoom / view.zoom].map((n) => Number(n.toPrecision(5))).join(",") : null });
    }, 300);
  }

  function viewFromState() {
    const [x, y, zoomed] = state.get("at", "").split(",").map(Number);
    const view = fitted();
    scene.home = view.zoom;
    scene.view = Number.isFinite(zoomed) && zoomed > 0 ? { x, y, zoom: view.zoom * zoomed } : view;
  }

  // colours
  async function setColours() {
    const name = columns.options.some(([key]) => key === state.get("c", "kind")) ? state.get("c", "kind") : "kind";
    colourBy.set(name);
    const turn = ++asked;
    const column = await columns.load(name).catch((error) => ({ error }));
    if (turn !== asked || closed) return;
    if (column.error) { legend.replaceChildren(h("span", { class: "ramp" }, column.error.message)); return; }
    group = column.names ? column : null;
    hidden = new Set([...hidden].filter((i) => group));
    paintColours(column);
    showLegend(column);
    setOnly();
  }

  function paintColours(column) {
    const kept = found !== null ? 0.4 : near.length > 0 ? 0.6 : 1;
    const paper = parse(colours.paper);
    const soft = (rgb) => pixel(rgb.map((value, i) => Math.round(paper[i] + (value - paper[i]) * kept)));
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
    scene.scale = Uint32Array.from({ length: 256 }, (_, i) => {
      const rgb = sequential(i / 255, colours.dark);
      const blend = Math.min(1, i / 40);
      return pixel(rgb.map((value, k) => Math.round(paper[k] + (value - paper[k]) * blend)));
    });
  }

  async function recolour() {
    const column = await columns.load(state.get("c", "kind")).catch(() => null);
    if (column && !closed) { paintColours(column); draw(); }
  }

  function showLegend(column) {
    if (scene.dense) return legend.replaceChildren(h("span", { class: "ramp" }, "few", ramp(), "many tokens"));
    if (!column.names) return legend.replaceChildren(h("span", { class: "ramp" }, column.format(column.range[0]), ramp(), column.format(column.range[1]), h("span", null, column.label)));
    const counts = new Uint32Array(column.names.length);
    for (const value of column.of) counts[value]++;
    legend.replaceChildren(...column.names.flatMap((name, i) => {
      if (!counts[i]) return [];
      const dot = h("i");
      dot.style.background = colours.series[i % 8];
      const button = h("button", { type: "button", "aria-pressed": String(!hidden.has(i)), title: `${counts[i].toLocaleString("en")} tokens; press to hide or show`, onClick: () => {
        if (hidden.has(i)) hidden.delete(i); else hidden.add(i);
        button.setAttribute("aria-pressed", String(!hidden.has(i)));
        setOnly();
      } }, dot, name);
      return [button];
    }));
  }

  function ramp() {
    const canvas = h("canvas", { "aria-hidden": "true" });
    const context2d = fit(canvas, 90, 10);
    for (let x = 0; x < 90; x++) { context2d.fillStyle = css(sequential(x / 89, colours.dark)); context2d.fillRect(x, 0, 1, 10); }
    return canvas;
  }

  function setOnly() {
    const only = hidden.size && group || isolated && found ? new Uint8Array(size).fill(1) : null;
    if (only && hidden.size && group) group.of.forEach((value, id) => { if (hidden.has(value)) only[id] = 0; });
    if (only && isolated && found) {
      const kept = new Uint8Array(size);
      for (const id of found) kept[id] = 1;
      only.forEach((_, id) => { only[id] &= kept[id]; });
    }
    scene.only = only;
    draw();
  }

  function setDense(on) {
    scene.dense = on;
    denseButton.setAttribute("aria-pressed", String(on));
    state.set({ v: on ? "density" : null });
    columns.load(state.get("c", "kind")).then(showLegend, () => {});
    draw();
  }

  function setLasso(on) {
    lassoMode = on;
    lassoButton.setAttribute("aria-pressed", String(on));
    over.classList.toggle("is-lasso", on);
  }

  // searching
  function runSearch(typed) {
    const start = performance.now();
    const query = parseQuery(typed);
    found = query.kind === "none" || query.kind === "error" ? null : search(query, texts, lower);
    measured("map: search", start);
    hits.textContent = query.kind === "error" ? "not a pattern" : found ? `${found.length.toLocaleString("en")} found` : "";
    searchField.title = query.kind === "error" ? query.message : "";
    state.set({ q: typed || null });
    afterFound("found");
  }

  function afterFound(next) {
    if (!found) isolated = false;
    tab = found && found.length ? next : "near";
    mark();
    setOnly();
    recolour();
    showSide();
  }

  function mark() {
    const { plus, minus } = chosen();
    scene.marked = found ? found : Int32Array.from([...near.map(([id]) => id), ...plus, ...minus]);
  }

  // choosing, neighbours, analogies
  function chosen() {
    const list = (key) => state.get(key, "").split(",").filter((id) => id !== "" && Number(id) < size).map(Number);
    return { plus: list("plus"), minus: list("minus") };
  }

  function choose(plus, minus = []) {
    state.set({ plus: plus.join(","), minus: minus.join(",") });
    tab = "near";
    afterChoice();
  }

  let problem = "";
  async function afterChoice() {
    const { plus, minus } = chosen();
    const turn = ++asked;
    problem = "";
    if (plus.length || minus.length) {
      showSide(true);
      try {
        const answer = await data.load("neighbors", { plus: plus.join(","), minus: minus.join(","), topn: NEIGHBORS });
        if (turn !== asked && String(chosen().plus) !== String(plus)) return;
        near = answer;
      } catch (error) {
        near = [];
        problem = error.message;
      }
    } else near = [];
    if (closed) return;
    mark();
    if (state.get("c") === "along" || state.get("x") === "e" || state.get("y") === "e") {
      columns.forget("along");
      if (state.get("x") === "e" || state.get("y") === "e") await setAxes();
      await setColours();
    } else recolour();
    showSide();
    draw();
  }

  function toggleTerm(id, sign) {
    const { plus, minus } = chosen();
    const without = (list) => list.filter((other) => other !== id);
    choose(sign > 0 ? [...without(plus), id] : without(plus), sign < 0 ? [...without(minus), id] : without(minus));
  }

  function typedExpression(typed, field) {
    byText ??= new Map(texts.map((text, id) => [text, id]).reverse());
    const terms = parseExpression(typed).map((term) => ({ ...term, id: resolve(term.text, byText) }));
    const unknown = terms.find((term) => term.id === null || term.id >= size);
    if (unknown) {
      problem = `No single token is “${unknown.text}”. Search for its pieces.`;
      return showSide();
    }
    choose(terms.filter((term) => term.sign > 0).map((term) => term.id), terms.filter((term) => term.sign < 0).map((term) => term.id));
    field.focus();
  }

  function expressionText() {
    const { plus, minus } = chosen();
    const shown = (id) => texts[id].trim() && !/[\s]/.test(texts[id].trim()) ? texts[id].trim() : `#${id}`;
    return [...plus.map((id) => `+ ${shown(id)}`), ...minus.map((id) => `− ${shown(id)}`)].join(" ").replace(/^\+ /, "");
  }

  // the side
  function showSide(loading = false) {
    if (closed) return;
    const { plus, minus } = chosen();
    const focused = document.activeElement?.id === "expression";
    const field = h("input", { id: "expression", type: "text", value: expressionText(), placeholder: "king − man + woman", spellcheck: false, autocomplete: "off",
      onKeydown: (event) => { if (event.key === "Enter") typedExpression(field.value, field); } });
    const parts = [h("label", { class: "field" }, h("span", null, "Near what? One token, or a sum"), field)];
    if (problem) parts.push(h("p", { class: "note", role: "status" }, problem));
    if (plus.length === 1 && !minus.length) parts.push(card(plus[0]));
    else if (plus.length + minus.length) parts.push(h("div", { class: "terms" }, [...plus.map((id) => [id, "+"]), ...minus.map((id) => [id, "−"])].map(([id, sign]) =>
      h("span", { class: "term" }, sign, token(texts[id], { id, onClick: () => choose([id]) }), h("button", { type: "button", "aria-label": `Leave out ${visibleText(texts[id])}`, onClick: () => toggleTerm(id, 0) }, "×")))));
    if (found) parts.push(h("div", { class: "segments", role: "group", "aria-label": "Which list" }, ["near", "found"].map((which) =>
      h("button", { type: "button", "aria-pressed": String(tab === which), onClick: () => { tab = which; showSide(); } }, which === "near" ? "Neighbours" : `Found ${found.length.toLocaleString("en")}`))));
    if (tab === "found" && found) parts.push(foundList());
    else if (loading && !near.length) parts.push(h("p", { class: "note" }, "Looking through all rows …"));
    else if (near.length) parts.push(h("ol", { class: "near", "aria-label": "Nearest tokens, by cosine" }, near.map(([id, score]) => row(id, score))));
    else if (!plus.length && !minus.length) parts.push(suggestions());
    if (manifest.exported && manifest.leftOut.length) parts.push(h("p", { class: "note" }, manifest.leftOut.join(" ")));
    side.replaceChildren(...parts);
    if (focused) field.focus();
  }

  function card(id) {
    const frequency = columns.known("frequency");
    const facts = [["ID", id.toLocaleString("en")], ["Bytes", hex(texts[id]) || "none"], ["Kind", KINDS[kind.of[id]]], ["Norm", columns.known("norm").values[id].toFixed(3)]];
    if (frequency) facts.push(["Seen", `${Math.round(10 ** frequency.values[id] - 1).toLocaleString("en")} times in the text`]);
    return h("div", { class: "map-card" }, token(texts[id]), h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", null, name), h("dd", null, value)])));
  }

  function row(id, score) {
    const item = h("li", null,
      h("button", { type: "button", onClick: () => choose([id]), onMouseenter: () => showTip(id), onMouseleave: hideTip, onFocus: () => showTip(id), onBlur: hideTip },
        token(texts[id]), h("span", { class: "score" }, score === null ? `#${id}` : score.toFixed(3))),
      h("button", { type: "button", class: "term-button", "aria-label": `Add ${visibleText(texts[id])}`, title: "Add to the sum", onClick: () => toggleTerm(id, 1) }, "+"),
      h("button", { type: "button", class: "term-button", "aria-label": `Subtract ${visibleText(texts[id])}`, title: "Subtract from the sum", onClick: () => toggleTerm(id, -1) }, "−"));
    item.style.setProperty("--share", String(Math.max(0, score ?? 0)));
    return item;
  }

  function foundList() {
    if (!found.length) return empty("Nothing found", "Try a shorter text, or a pattern between slashes.");
    const listed = [...found.subarray(0, LISTED)];
    const isolate = h("button", { type: "button", "aria-pressed": String(isolated), onClick: () => { isolated = !isolated; setOnly(); showSide(); } }, "Isolate");
    const copy = h("button", { type: "button", onClick: () => copyText([...found].map((id) => `${id}\t${texts[id]}`).join("\n"), copy) }, "Copy");
    return h("div", null, h("div", { class: "side-head" },
      h("p", { class: "note" }, found.length > LISTED ? `The first ${LISTED} of ${found.length.toLocaleString("en")}` : ""), h("div", { class: "segments" }, isolate, copy)),
    h("ol", { class: "near" }, listed.map((id) => row(id, null))));
  }

  function suggestions() {
    names ??= namesInOrder(texts, kind, columns.known("frequency"));
    const some = [...names.subarray(0, 400)].filter((id) => kind.of[id] <= 1 && texts[id].trim().length > 3).filter((_, i) => i % 12 === 3).slice(0, 10);
    return h("div", null, h("p", { class: "note" }, "Choose a point, type a token, or begin with one of these. + and − beside a neighbour make a sum: a − b + c."),
      h("div", { class: "chips" }, some.map((id) => token(texts[id], { onClick: () => choose([id]) }))));
  }

  // the pointer
  function showTip(id, x, y) {
    const at = x === undefined && scene.view ? [width / 2 + (scene.xs[id] - scene.view.x) * scene.view.zoom, height / 2 - (scene.ys[id] - scene.view.y) * scene.view.zoom] : [x, y];
    if (at[0] < 0 || at[1] < 0 || at[0] > width || at[1] > height) return hideTip();
    tip.replaceChildren(h("b", null, visibleText(texts[id]) || "no token"), ` #${id}`);
    tip.hidden = false;
    const left = Math.min(Math.max(at[0] + 12, 4), width - tip.offsetWidth - 4);
    const top = at[1] + 14 + tip.offsetHeight > height ? at[1] - tip.offsetHeight - 10 : at[1] + 12;
    tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }
  function hideTip() { tip.hidden = true; }

  function pointAt(x, y, radius = 10) {
    if (!grid || !scene.view) return -1;
    const [dx, dy] = toData(scene.view, x, y, width, height);
    return nearest(grid, scene.xs, scene.ys, dx, dy, radius / scene.view.zoom, (id) => scene.only === null || scene.only[id] === 1);
  }

  const stopGestures = gestures(over, {
    lasso: () => lassoMode,
    hover(at) { const id = at ? pointAt(...at) : -1; if (id >= 0) showTip(id, ...at); else hideTip(); },
    pan(dx, dy) { scene.view = pan(scene.view, dx, dy); rememberView(); draw(); },
    zoom,
    home,
    draw(line) { lasso = line; draw(); },
    drawn: finishLasso,
    pick(at, { touch, more }) { const id = pointAt(...at, touch ? 22 : 10); if (id >= 0) choose(more ? [...chosen().plus, id] : [id], more ? chosen().minus : []); },
    enter() { const id = pointAt(width / 2, height / 2, 60); if (id >= 0) choose([id]); },
    escape: forget,
    focus: draw,
  });

  function finishLasso() {
    const line = lasso.map(([x, y]) => toData(scene.view, x, y, width, height));
    lasso = null;
    setLasso(false);
    if (line.length > 2) {
      found = inside(grid, scene.xs, scene.ys, line).filter((id) => scene.only === null || scene.only[id] === 1);
      hits.textContent = `${found.length.toLocaleString("en")} inside`;
      searchField.value = "";
      state.set({ q: null });
      afterFound("found");
    } else draw();
  }

  function forget() {
    searchField.value = "";
    hits.textContent = "";
    lasso = null;
    setLasso(false);
    found = null;
    isolated = false;
    state.set({ q: null });
    choose([]);
    setOnly();
  }

  let typing = 0;
  searchField.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => runSearch(searchField.value), 60); });
  searchField.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && found?.length) choose([found[0]]);
    else if (event.key === "Escape") forget();
  });

  const stopResize = onResize(stage, (w, hgt) => {
    if (!w || !hgt) return;
    const first = !width;
    [width, height] = [w, hgt];
    fit(over, width, height);
    if (first) viewFromState();
    draw();
  });
  const onTheme = () => { colours = paletteOf(context.theme()); setColours(); draw(); };
  document.addEventListener("themechange", onTheme);

  // begin
  const early = setTimeout(() => bytesOfAll(texts), 1500); // so that the first search by bytes is quick too
  grid = makeGrid(scene.xs, scene.ys);
  [width, height] = [stage.clientWidth, stage.clientHeight];
  if (width) { fit(over, width, height); viewFromState(); }
  if (manifest.has.includes("frequency")) await columns.load("frequency");
  apply();

  async function apply() {
    searchField.value = state.get("q", "");
    xAxis.set(state.get("x", "1"));
    yAxis.set(state.get("y", "2"));
    scene.dense = state.get("v") === "density";
    denseButton.setAttribute("aria-pressed", String(scene.dense));
    if (state.get("x") || state.get("y")) { await setAxes(); viewFromState(); }
    await setColours();
    if (state.get("q")) runSearch(state.get("q"));
    await afterChoice();
    if (state.get("q")) { tab = "found"; showSide(); }
  }

  return {
    close() { closed = true; stopResize(); stopGestures(); clearTimeout(typing); clearTimeout(remembering); clearTimeout(early); document.removeEventListener("themechange", onTheme); },
    async stateChanged() {
      found = null;
      hits.textContent = "";
      [scene.xs, scene.ys] = [component(0), component(Math.min(1, components - 1))];
      scene.showAxes = true;
      yAxis.hidden = false;
      tellProgress("");
      grid = makeGrid(scene.xs, scene.ys);
      await apply();
      viewFromState();
      draw();
    },
  };
}

function standard(values) {
  const [low, high] = spread(values, 0.01);
  return values.map((value) => (value - (low + high) / 2) / (high - low || 1));
}

function share(value) {
  return value === undefined ? "" : `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`;
}

function paletteOf(theme) {
  const style = getComputedStyle(document.documentElement);
  return { ...theme, mono: style.getPropertyValue("--mono"), font: style.getPropertyValue("--font") };
}

/** Leave a measurement where tools, and the tests, find it. */
function measured(name, start) {
  if (performance.getEntriesByName(name).length > 300) performance.clearMeasures(name);
  performance.measure(name, { start, end: performance.now() });
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
}
