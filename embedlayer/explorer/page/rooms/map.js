import { h, select, visibleText } from "../dom.js";
import { axesOf } from "../map/axes.js";
import { colouring } from "../map/colouring.js";
import { columnsOf, namesInOrder } from "../map/columns.js";
import { kinds } from "../map/groups.js";
import { paintOver } from "../map/painting.js";
import { bytesOfAll, expressionOf, parseExpression, parseQuery, search, variants } from "../map/search.js";
import { makeSide } from "../map/side.js";
import { emptyScene, makeStage, measured } from "../map/stage.js";
import { fitView } from "../map/view.js";

/** All tokens as points. */
export const room = {
  id: "map",
  title: "Map",
  sentence: "Every row of the table as a point, along the directions in which rows differ most. Neighbours are found in all dimensions.",
  needs: ["vectors"],
  keys: [["arrows, + −, 0", "move, zoom, fit (with the map in focus)"], ["Enter", "choose the token at the cross"], ["Esc", "forget what was found or chosen"]],
  open,
};

const NEIGHBORS = 20;
const LONGEST_NAME = 24;
const NAMED_FOUND = 400;
const NARROW = 600;

/** @param {HTMLElement} element */
async function open(element, context) {
  const { data, manifest, state } = context;
  const [{ texts, special }, { explained }, coordinates, normBytes] = await Promise.all([
    data.load("tokens"), data.load("axes"), data.load("coordinates", { count: manifest.exported ? "3" : "6" }), data.load("norms"),
  ]);
  const size = texts.length;
  const kind = kinds(texts, special);
  const lower = texts.map((text) => text.toLowerCase());
  const columns = columnsOf({ texts, kind, norms: new Float32Array(normBytes), data, manifest, choice: chosen });
  const axes = axesOf({ size, coordinates, explained, state, data, direction: chosen });
  const inOrder = once(() => namesInOrder(texts, kind, columns.known("frequency")));
  const byText = once(() => new Map(texts.map((text, id) => [text, id]).reverse()));
  const scene = emptyScene(size);

  let found = null; // what the search or the lasso holds
  let isolated = false; // whether only that is shown
  let near = []; // neighbours of what is chosen
  let problem = "";
  let tab = "near";
  let lasso = null; // the line so far
  let lassoMode = false;
  let asked = 0;
  let closed = false;

  // the parts of the page
  const searchField = h("input", { type: "search", placeholder: "text, /regex/, #id, 0xE2 96", "aria-label": "Search tokens by text, /regex/, #id or bytes", spellcheck: false, autocomplete: "off" });
  const hits = h("output", { "aria-live": "polite" });
  const xAxis = select({ label: "Across", options: [...axes.options, ["n", "neighbourhoods"]], value: state.get("x", "1"), onChange: (value) => { state.set({ x: value === "1" ? null : value }); setAxes(); } });
  const yAxis = select({ label: "Up", options: axes.options, value: state.get("y", "2"), onChange: (value) => { state.set({ y: value === "2" ? null : value }); setAxes(); } });
  const colourBy = select({ label: "Colour", options: columns.options, value: state.get("c", "kind"), onChange: (value) => { state.set({ c: value === "kind" ? null : value }); setColours(); } });
  const denseButton = h("button", { type: "button", "aria-pressed": "false", onClick: () => { setDense(!scene.dense); state.set({ v: scene.dense ? "density" : null }); look.describe(); } }, "Density");
  const lassoButton = h("button", { type: "button", "aria-pressed": "false", title: "Draw around points", onClick: () => setLasso(!lassoMode) }, "Lasso");
  const progress = h("p", { class: "map-progress", role: "status", hidden: true });
  const look = colouring(scene, { columns, chosen: coloured, theme: context.theme, seen: () => ({ found, near, isolated: isolated && found !== null }), draw: () => stage.draw() });
  const zoomButton = (text, label, act) => h("button", { type: "button", "aria-label": label, title: label, onClick: act }, text);
  const stage = makeStage(scene, "Map of all tokens. Arrow keys move, plus and minus zoom, Enter chooses the token at the cross.", {
    fitted, opening, above,
    viewed: rememberView,
    textOf: (id) => texts[id],
    said: (id) => `#${id}`,
    pick: (id, more) => { if (more) choose([...chosen().plus, id], chosen().minus); else choose([id]); },
    closest: 3000,
    more: { lasso: () => lassoMode, draw(line) { lasso = line; stage.draw(); }, drawn: takeLasso, escape: forget },
  }, look.legend,
  h("div", { class: "map-zoom" }, zoomButton("+", "Closer", () => stage.zoom(1.5)), zoomButton("−", "Farther", () => stage.zoom(1 / 1.5)), zoomButton("⤢", "Show all", () => stage.home())),
  h("div", { class: "segments map-modes" }, denseButton, lassoButton), progress);
  const side = makeSide({ texts, kind, columns, inOrder, notes: manifest.exported ? manifest.leftOut : [] }, {
    choose, typed, meant,
    tab(which) { tab = which; showSide(); },
    isolate() { isolated = !isolated; look.restrict(); showSide(); },
    point: stage.showTip,
    leave: stage.hideTip,
  });
  element.replaceChildren(h("div", { class: "map" },
    h("div", { class: "panel map-main" },
      h("div", { class: "map-tools" },
        h("label", { class: "field search" }, h("span", null, "Search", hits), searchField), colourBy, xAxis, yAxis), stage.element),
    side.element));

  // above the points
  function above(context2d, { width, height, cross }) {
    const narrow = width < NARROW;
    const titles = scene.showAxes ? axes.titles() : [narrow ? "neighbours lie together" : "neighbours lie together; distances between groups mean little", ""];
    const { plus, minus } = chosen();
    paintOver(context2d, scene, { width, height, colours: look.palette(), axes: titles, rings: [...plus, ...minus], names: named(), textOf: nameOf, most: narrow ? 18 : 42, lasso, cross });
  }

  const names = new Map();
  function nameOf(id) {
    if (!names.has(id)) {
      const text = visibleText(texts[id]);
      names.set(id, text.length > LONGEST_NAME ? `${text.slice(0, LONGEST_NAME - 1)}…` : text);
    }
    return names.get(id);
  }

  /** Tokens in the order in which they get their names on the map. */
  function* named() {
    const { plus, minus } = chosen();
    const first = new Set([...plus, ...minus, ...near.map(([id]) => id), ...(found?.subarray(0, NAMED_FOUND) ?? [])]);
    yield* first;
    if (found?.length && isolated) return;
    for (const id of inOrder()) if (!first.has(id) && stage.shown(id)) yield id;
  }

  // where one looks
  /** All points, between the buttons and the legend. */
  function fitted(width, height) {
    const [over, under] = width < NARROW ? [48, 92] : [0, 56];
    const view = fitView(scene.xs, scene.ys, width, height - over - under);
    return { ...view, y: view.y - (under - over) / 2 / view.zoom };
  }

  function opening(all) {
    const [x, y, zoomed] = state.get("at", "").split(",").map(Number);
    return Number.isFinite(zoomed) && zoomed > 0 ? { x, y, zoom: all.zoom * zoomed } : all;
  }

  let remembering = 0;
  function rememberView() {
    clearTimeout(remembering);
    remembering = setTimeout(() => {
      if (closed || !scene.view) return;
      const all = fitted(stage.element.clientWidth, stage.element.clientHeight);
      const away = Math.abs(scene.view.zoom / all.zoom - 1) > 0.01 || Math.hypot(scene.view.x - all.x, scene.view.y - all.y) * all.zoom > 3;
      state.set({ at: away ? [scene.view.x, scene.view.y, scene.view.zoom / all.zoom].map((n) => Number(n.toPrecision(5))).join(",") : null });
    }, 300);
  }

  // where points lie
  async function setAxes() {
    const isLayout = axes.isLayout();
    yAxis.hidden = isLayout;
    tellProgress(isLayout ? axes.waiting : "");
    try {
      const places = await (isLayout ? axes.layout() : axes.chosen());
      if (closed || isLayout !== axes.isLayout()) return;
      place(places, !isLayout);
      stage.home();
    } catch (error) {
      if (!closed) tellProgress(error.message);
    }
  }

  function place([xs, ys], showAxes) {
    stage.place(xs, ys);
    scene.showAxes = showAxes;
    tellProgress("");
  }

  function tellProgress(text) {
    progress.textContent = text;
    progress.hidden = !text;
  }

  // what points look like
  function coloured() {
    const name = state.get("c", "kind");
    return columns.options.some(([key]) => key === name) ? name : "kind";
  }

  function setColours() {
    colourBy.set(coloured());
    return look.show();
  }

  function setDense(on) {
    scene.dense = on;
    denseButton.setAttribute("aria-pressed", String(on));
  }

  function setLasso(on) {
    lassoMode = on;
    lassoButton.setAttribute("aria-pressed", String(on));
    stage.over.classList.toggle("is-lasso", on);
  }

  // finding
  function runSearch(typed) {
    const start = performance.now();
    const query = parseQuery(typed);
    const isBroken = query.kind === "error";
    const ids = query.kind === "none" || isBroken ? null : search(query, texts, lower);
    measured("map: search", start);
    searchField.title = isBroken ? query.message : "";
    state.set({ q: typed || null });
    take(ids, isBroken ? "not a pattern" : ids ? `${ids.length.toLocaleString("en")} found` : "");
  }

  function takeLasso() {
    const line = lasso;
    lasso = null;
    setLasso(false);
    if (line.length <= 2) return stage.draw();
    const ids = stage.within(line);
    searchField.value = "";
    state.set({ q: null });
    take(ids, `${ids.length.toLocaleString("en")} inside`);
  }

  function take(ids, said) {
    found = ids;
    hits.textContent = said;
    if (!found) isolated = false;
    tab = found?.length ? "found" : "near";
    mark();
    look.restrict();
    look.fade();
    showSide();
  }

  function forget() {
    searchField.value = "";
    lasso = null;
    setLasso(false);
    state.set({ q: null });
    take(null, "");
    choose([]);
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

  async function afterChoice() {
    const { plus, minus } = chosen();
    const turn = ++asked;
    problem = "";
    if (plus.length || minus.length) {
      showSide(true);
      try {
        const answer = await data.load("neighbors", { plus: plus.join(","), minus: minus.join(","), topn: NEIGHBORS });
        if (turn !== asked) return;
        near = answer;
      } catch (error) {
        near = [];
        problem = error.message;
      }
    } else near = [];
    if (closed) return;
    mark();
    columns.forget("along");
    if (axes.isLikeness()) await setAxes();
    if (coloured() === "along" || axes.isLikeness()) await setColours();
    else look.fade();
    showSide();
    stage.draw();
  }

  function meant(text) {
    const last = parseExpression(text).at(-1);
    return last ? variants(last.text, byText()).filter((id) => id < size) : [];
  }

  function typed(text, field, last = undefined) {
    const terms = parseExpression(text).map((term) => ({ ...term, id: variants(term.text, byText())[0] }));
    if (last !== undefined) terms.at(-1).id = last;
    const unknown = terms.find((term) => term.id === undefined || term.id >= size);
    if (unknown) {
      problem = `No single token is “${unknown.text}”. Search for its pieces.`;
      return showSide();
    }
    const ofSign = (sign) => terms.filter((term) => term.sign === sign).map((term) => term.id);
    choose(ofSign(1), ofSign(-1));
    field.focus();
  }

  /** What is found, or chosen and near, is drawn above the others. */
  function mark() {
    const { plus, minus } = chosen();
    scene.marked = found ?? Int32Array.from([...near.map(([id]) => id), ...plus, ...minus]);
  }

  function showSide(loading = false) {
    if (closed) return;
    const { plus, minus } = chosen();
    const expression = expressionOf(plus, minus, (id) => visibleText(texts[id]), byText());
    side.show({ plus, minus, near, found, isolated, tab, problem, loading, expression });
  }

  // listening, and the state in the address
  let typing = 0;
  searchField.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => runSearch(searchField.value), 60); });
  searchField.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && found?.length) choose([found[0]]);
    else if (event.key === "Escape") forget();
  });

  setDense(state.get("v") === "density");
  const early = setTimeout(() => bytesOfAll(texts), 1500); // so that the first search by bytes is quick too
  place(axes.first(), true);
  stage.measure();
  if (manifest.has.includes("frequency")) await columns.load("frequency");
  apply();

  async function apply() {
    searchField.value = state.get("q", "");
    xAxis.set(state.get("x", "1"));
    yAxis.set(state.get("y", "2"));
    setDense(state.get("v") === "density");
    if (state.get("x") || state.get("y")) { await setAxes(); stage.look(); }
    await setColours();
    if (state.get("q")) runSearch(state.get("q"));
    await afterChoice();
    if (state.get("q")) { tab = "found"; showSide(); }
  }

  return {
    close() { closed = true; stage.close(); look.close(); for (const timer of [typing, remembering, early]) clearTimeout(timer); },
    async stateChanged() {
      found = null;
      hits.textContent = "";
      yAxis.hidden = false;
      place(axes.first(), true);
      await apply();
      stage.look();
    },
  };
}

/** What `make` gives, made when it is first wanted. */
function once(make) {
  let made = null;
  return () => (made ??= make());
}
