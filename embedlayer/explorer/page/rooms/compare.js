import { parse, sequential } from "../colour.js";
import { empty, h, select, slider, token, visibleText } from "../dom.js";
import { paletteOf, ramp } from "../map/colouring.js";
import { paintOver } from "../map/painting.js";
import { pixel } from "../map/splat.js";
import { emptyScene, makeStage } from "../map/stage.js";
import { fitView, toScreen } from "../map/view.js";

/** Two tables, one laid over the other. */
export const room = {
  id: "compare",
  title: "Compare",
  sentence: "Two tables laid over one another (other tables are turned by Procrustes), and the tokens whose rows turned most.",
  needs: ["vectors"],
  open,
};

const SHOWN = 100;

/** @param {HTMLElement} element */
async function open(element, context) {
  const { data, manifest, sources, source, state } = context;
  const options = [...(manifest.has.includes("before") ? [["before", "before training"]] : []),
    ...sources.map((other, i) => [String(i), other.title]).filter(([i]) => Number(i) !== source)];
  if (!options.length) {
    element.replaceChildren(empty("There is one table alone", "Start with two to compare them, ", h("code", null, "embedlayer explore A B"), ", or with the folder of a training run, which knows its table before training."));
    return { close() {} };
  }
  const { texts } = await data.load("tokens");
  let closing = () => {};
  let turn = 0;
  const body = h("div", { class: "map" });
  const choice = select({ label: "With", options, value: wanted(), onChange: (value) => { state.set({ with: value === options[0][0] ? null : value, token: null }); show(); } });
  element.replaceChildren(body);
  await show();

  function wanted() {
    const asked = state.get("with", options[0][0]);
    return options.some(([key]) => key === asked) ? asked : options[0][0];
  }

  async function show() {
    const mine = ++turn;
    closing();
    closing = () => {};
    body.replaceChildren(h("p", { class: "loading" }, "Aligning the tables …"));
    const other = wanted();
    try {
      const [about, bytes] = await Promise.all([data.load("compare", { other }), data.load("compare-places", { other })]);
      if (mine === turn) closing = fill(body, { about, bytes, texts, other, choice, context });
    } catch (error) {
      if (mine === turn) body.replaceChildren(h("div", null, choice, empty("These cannot be compared", error.message)));
    }
  }

  return {
    close() { turn++; closing(); },
    stateChanged() { choice.set(wanted()); show(); },
  };
}

function joined(a, b) {
  const both = new Float32Array(a.length + b.length);
  both.set(a);
  both.set(b, a.length);
  return both;
}

/** Fill the room with a comparison; returns how to end it. */
function fill(body, { about, bytes, texts, other, choice, context }) {
  const { data, state } = context;
  const count = about.shared;
  const column = (k) => new Float32Array(bytes, 4 * count * k, count);
  const [ax, ay, bx, by, cosines] = [0, 1, 2, 3, 4].map(column);
  const ids = new Int32Array(bytes, 20 * count, count);
  const placeOf = new Map([...ids].map((id, place) => [id, place]));
  const thisName = context.manifest.title;
  const isBefore = other === "before";
  const scene = { ...emptyScene(count), showAxes: false };
  let share = Number(state.get("t", "1"));
  let colours = null;
  let closed = false;
  let playing = 0;
  let order = state.get("order", "moved_most");

  const legend = h("div", { class: "map-legend" });
  const stage = makeStage(scene, "Map of the tokens of both tables. Arrow keys move, plus and minus zoom.", {
    fitted: (width, height) => fitView(joined(ax, bx), joined(ay, by), width, height),
    above,
    textOf: (place) => texts[ids[place]],
    said: (place) => `cosine ${cosines[place].toFixed(3)}`,
    pick: (place) => choose(ids[place]),
    closest: 1000,
    reach: 12,
    more: { escape: () => choose(null) },
  }, legend);
  const time = slider({ label: isBefore ? "Before training to now" : `${about.title} to ${thisName}`, min: 0, max: 1, step: 0.01, value: share,
    format: (value) => (value === 0 ? (isBefore ? "before" : about.title) : value === 1 ? (isBefore ? "now" : thisName) : `${Math.round(value * 100)} %`), onInput: (value) => { stop(); setShare(value); state.set({ t: value === 1 ? null : value }); } });
  time.classList.add("search");
  const play = h("button", { type: "button", onClick: () => (playing ? stop() : start()) }, "Play");
  const side = h("aside", { class: "panel map-side", "aria-label": "Tokens by how far they moved" });
  body.replaceChildren(h("div", { class: "panel map-main" }, h("div", { class: "map-tools" }, choice, time, play), stage.element), side);

  function setShare(value) {
    share = value;
    for (let i = 0; i < count; i++) {
      scene.xs[i] = bx[i] + (ax[i] - bx[i]) * share;
      scene.ys[i] = by[i] + (ay[i] - by[i]) * share;
    }
    stage.place(scene.xs, scene.ys);
    stage.draw();
  }

  function start() {
    play.textContent = "Stop";
    const from = share >= 1 ? 0 : share;
    const began = performance.now() - from * 3000;
    const step = (now) => {
      const at = Math.min(1, (now - began) / 3000);
      time.set(at);
      setShare(at * at * (3 - 2 * at));
      if (at < 1 && !closed) playing = requestAnimationFrame(step);
      else stop();
    };
    playing = requestAnimationFrame(step);
  }

  function stop() {
    cancelAnimationFrame(playing);
    playing = 0;
    play.textContent = "Play";
  }

  function above(context2d, shown) {
    const chosen = chosenPlace();
    paintOver(context2d, scene, { ...shown, colours, axes: [`principal component 1 of ${thisName} →`, "principal component 2 →"], rings: chosen >= 0 ? [chosen] : [], names: names(chosen), textOf: (place) => visibleText(texts[ids[place]]), most: 24, lasso: null });
    if (chosen >= 0) paintPath(context2d, chosen, shown);
  }

  function paintPath(context2d, place, { width, height }) {
    const [x0, y0] = toScreen(scene.view, bx[place], by[place], width, height);
    const [x1, y1] = toScreen(scene.view, ax[place], ay[place], width, height);
    context2d.strokeStyle = colours.warm;
    context2d.lineWidth = 2;
    context2d.beginPath();
    context2d.moveTo(x0, y0);
    context2d.lineTo(x1, y1);
    context2d.stroke();
  }

  function* names(chosen) {
    if (chosen >= 0) yield chosen;
    for (const [id] of about[order]) if (placeOf.get(id) !== chosen) yield placeOf.get(id);
  }

  const chosenPlace = () => placeOf.get(Number(state.get("token", "-1"))) ?? -1;

  function recolour() {
    colours = paletteOf(context.theme());
    const steps = Array.from({ length: 256 }, (_, i) => pixel(sequential(i / 255, colours.dark)));
    cosines.forEach((value, i) => { scene.colours[i] = steps[Math.round(255 * Math.min(1, Math.max(0, 1 - value)))]; });
    scene.paper = parse(colours.paper);
    scene.markColour = pixel(parse(colours.warm));
    legend.replaceChildren(h("span", { class: "ramp" }, "stayed (cosine 1)", ramp(colours.dark), "turned (cosine 0)"));
    stage.draw();
  }

  function showSide() {
    const place = chosenPlace();
    const parts = [h("dl", { class: "facts" }, [["Tokens in both", about.shared.toLocaleString("en")], ["Mean cosine", about.mean_cosine.toFixed(3)], ["Left over", about.residual === null ? null : `${(100 * about.residual).toFixed(0)} % after turning and scaling`]].filter(([, value]) => value !== null).map(([name, value]) => [h("dt", null, name), h("dd", null, value)]))];
    if (place >= 0) parts.push(card(place));
    parts.push(h("div", { class: "segments", role: "group", "aria-label": "Which list" }, [["moved_most", "Moved most"], ["moved_least", "Moved least"]].map(([name, text]) =>
      h("button", { type: "button", "aria-pressed": String(order === name), onClick: () => { order = name; state.set({ order: name === "moved_most" ? null : name }); showSide(); stage.draw(); } }, text))));
    parts.push(h("ol", { class: "near" }, about[order].slice(0, SHOWN).map(([id, , cosine]) => {
      const item = h("li", null, h("button", { type: "button", onClick: () => choose(id) }, token(texts[id]), h("span", { class: "score" }, cosine.toFixed(3))));
      item.style.setProperty("--share", String(Math.max(0, Math.min(1, order === "moved_most" ? 1 - cosine : cosine))));
      return item;
    })));
    side.replaceChildren(...parts);
  }

  function card(place) {
    const id = ids[place];
    const lists = [["Near it now", data.load("neighbors", { plus: id, minus: "", topn: 8 }).then((near) => near.map(([other_]) => texts[other_]))],
      [isBefore ? "Near it before" : `In ${about.title}`, data.load("compare-neighbors", { other, plus: about.moved_most.concat(about.moved_least).find(([a]) => a === id)?.[1] ?? otherId(place), minus: "", topn: 8 }).then((near) => near.map(([text]) => text))]];
    return h("div", { class: "map-card" }, token(texts[id], { id }), h("p", { class: "note" }, `cosine with itself ${cosines[place].toFixed(3)}`), lists.map(([name, answer]) => {
      const chips = h("div", { class: "chips" }, "…");
      answer.then((found) => chips.replaceChildren(...found.map((text) => token(text))), (error) => chips.replaceChildren(h("span", { class: "note" }, error.name === "NotBaked" ? "This file does not hold them." : error.message)));
      return h("div", null, h("h3", null, name), chips);
    }));
  }

  const otherId = (place) => new Int32Array(bytes, 24 * count, count)[place];

  function choose(id) {
    state.set({ token: id });
    showSide();
    stage.draw();
  }

  document.addEventListener("themechange", recolour);
  recolour();
  setShare(share);
  showSide();
  return () => { closed = true; stop(); stage.close(); document.removeEventListener("themechange", recolour); };
}
