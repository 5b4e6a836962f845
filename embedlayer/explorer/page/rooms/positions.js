import { curves } from "../curves.js";
import { h, select, slider } from "../dom.js";
import { heatMap, limitOf, shown } from "../heat.js";
import { closest, cosine, distance, dot, fromRows, largestDifference, matrix, permuted, row, similarities, unpackMatrix } from "../math.js";
import { alibi, fromSource, rotary, score, sinusoids } from "../schemes.js";

/** Positions: what each scheme does with a place in the text, computed in the page. */
export const room = {
  id: "positions",
  title: "Positions",
  sentence: "How a model is told where a token stands, and what that does to vectors and scores.",
  needs: [],
  open,
};

const NAMES = { sinusoidal: "sinusoids", learned: "learned", rotary: "rotary", alibi: "ALiBi", relative: "relative biases" };
const DIMS = [4, 8, 16, 32, 64, 128, 256, 512];
const BASES = [100, 1000, 10000, 100000, 500000, 1000000];
const LENGTHS = [16, 32, 64, 128, 256, 512, 1024];
const HEADS = [1, 2, 4, 6, 8, 12, 16, 32];
const MOST_COMPARED = 256;
const COUNT = new Intl.NumberFormat("en");

/** @param {HTMLElement} element */
async function open(element, context) {
  const data = await context.data.load("positions");
  const own = data.schemes.map(fromSource);
  const hasOwn = own[0].speaks !== "none";
  const vectors = unpackMatrix(data.vectors);
  const trained = own.find((scheme) => scheme.trained)?.trained ?? null;
  const choices = [
    ...own.filter((scheme) => scheme.speaks !== "none").map((scheme, i) => [`own${i}`, `this source: ${NAMES[data.schemes[i].kind]}${data.schemes[i].layers ? ` (${data.schemes[i].layers})` : ""}`]),
    ...["sinusoidal", "rotary", "alibi"].map((kind) => [kind, NAMES[kind]]),
  ];
  const view = { parts: [], scheme: null };

  const controls = h("div", { class: "toolbar pos-controls" });
  const about = h("div", { class: "pos-about" });
  const panels = h("div", { class: "pos-panels" });
  element.replaceChildren(h("section", { class: "panel pos-top" }, controls, about), panels);
  build();
  return { close: clear, stateChanged: () => build() };

  function get(key, fallback) {
    return context.state.get(key, String(fallback));
  }

  function number(key, fallback, low, high) {
    const found = Number.parseFloat(get(key, fallback));
    return Math.min(high, Math.max(low, Number.isFinite(found) ? found : fallback));
  }

  function set(changes) {
    context.state.set(changes);
  }

  function clear() {
    for (const part of view.parts) part.close();
    view.parts = [];
  }

  function chosen() {
    const choice = get("scheme", choices[0][0]);
    return choices.some(([key]) => key === choice) ? choice : choices[0][0];
  }

  function makeScheme(choice) {
    if (choice.startsWith("own")) return own[Number(choice.slice(3))];
    const dim = Math.round(number("dim", 64, 2, 1024));
    const base = number("base", 10000, 2, 1e9);
    if (choice === "sinusoidal") return { ...sinusoids(dim, base), trained };
    if (choice === "rotary") return { ...rotary(dim - (dim % 2), base), trained };
    return { ...alibi(Math.round(number("heads", 8, 1, 64))), trained };
  }

  /** The whole room for the chosen scheme; the controls stay where they are while one of them is dragged. */
  function build({ withControls = true } = {}) {
    const choice = chosen();
    const scheme = makeScheme(choice);
    const length = Math.round(number("length", trained ? Math.min(256, 2 ** Math.ceil(Math.log2(trained * 1.5))) : 128, 4, 1024));
    const last = Math.min(length, scheme.last + 1) - 1;
    const scene = {
      data, scheme, length, last, vectors, set,
      a: Math.round(number("a", 0, 0, last)), b: Math.round(number("b", 1, 0, last)),
      pair: Math.round(number("pair", Math.min(2, scheme.pairs - 1), 0, Math.max(0, scheme.pairs - 1))),
      head: Math.round(number("head", 0, 0, Math.max(0, scheme.columns - 1))),
      token: Math.round(number("token", Math.min(1, data.tokens.length - 1), 0, data.tokens.length - 1)),
      key: Math.round(number("key", Math.min(2, data.tokens.length - 1), 0, data.tokens.length - 1)),
      lock: get("lock", "0") === "1", order: orderOf(get("order", ""), data.tokens.length), tokens: data.tokens, parts: [],
      beyond: (position) => scheme.trained !== null && position >= scheme.trained,
      keep: (part) => {
        view.parts.push(part);
        return part.element;
      },
      refresh: (what) => scene.parts.forEach((part) => part(what)),
    };
    view.scheme = scheme;
    clear();
    if (withControls) showControls(scene, choice);
    const facts = [choice.startsWith("own") ? `${scheme.name}.` : "", scheme.note, scheme.trained ? `This source was made for ${COUNT.format(scheme.trained)} positions; what lies beyond is hatched.` : ""].filter(Boolean);
    about.replaceChildren(
      h("p", null, hasOwn ? "" : "This source has no positions of its own: here are the schemes that others use. ", scheme.sentence),
      h("p", null, h("code", null, scheme.formula)), facts.length ? h("p", { class: "note" }, facts.join(" ")) : "");
    const rooms = { added: addedPanels, rotary: rotaryPanels, bias: biasPanels }[scheme.speaks];
    const made = rooms(scene);
    const columns = [0, 1].map((side) => h("div", { class: "pos-column" }, made.filter((_, i) => i % 2 === side)));
    made.forEach((each, i) => { each.style.order = String(i); });
    panels.replaceChildren(...columns, attentionPanel(scene));
    scene.refresh("all");
  }

  function showControls(scene, choice) {
    const wasChoosing = controls.contains(document.activeElement);
    const listed = (label, list, key, value, format = (each) => COUNT.format(each)) => slider({
      label, min: 0, max: list.length - 1, value: Math.max(0, nearest(list, value)), format: (i) => format(list[i]),
      onInput: (i) => {
        set({ [key]: list[i], a: null, b: null });
        build({ withControls: false });
      },
    });
    controls.replaceChildren(
      select({
        label: "Scheme", options: choices, value: choice,
        onChange: (value) => {
          set({ scheme: value === choices[0][0] ? null : value, pair: null, head: null, a: null, b: null });
          build();
        },
      }),
      choice === "sinusoidal" ? listed("Dimensions D", DIMS, "dim", scene.scheme.width) : "",
      choice === "rotary" ? listed("Head width K", DIMS, "dim", scene.scheme.width) : "",
      choice === "sinusoidal" || choice === "rotary" ? listed(choice === "rotary" ? "Base θ" : "Base", BASES, "base", number("base", 10000, 2, 1e9)) : "",
      choice === "alibi" ? listed("Heads H", HEADS, "heads", scene.scheme.columns) : "",
      listed("Positions shown", LENGTHS, "length", scene.length),
    );
    if (wasChoosing) controls.querySelector("select").focus();
  }
}

function nearest(list, value) {
  return list.reduce((best, each, i) => (Math.abs(each - value) < Math.abs(list[best] - value) ? i : best), 0);
}

function orderOf(text, count) {
  const order = text.split(".").map(Number);
  const whole = order.length === count && new Set(order).size === count && order.every((i) => Number.isInteger(i) && i >= 0 && i < count);
  return whole ? order : Array.from({ length: count }, (_, i) => i);
}

function panel(title, sentence, ...children) {
  return h("section", { class: "panel pos-panel" }, h("h2", null, title), h("p", { class: "note" }, sentence), ...children);
}

function tiles(entries) {
  return h("dl", { class: "pos-tiles" }, entries.map(([name, value, id]) => h("div", null, h("dt", null, name), h("dd", { "data-value": id ?? null }, value))));
}

/** Two sliders for two positions, and the switch that moves them together. */
function placeSliders(scene, names = ["Position a", "Position b"]) {
  const move = (which, value) => {
    const other = which === "a" ? "b" : "a";
    const by = value - scene[which];
    if (scene.lock) {
      const shift = Math.max(-scene[other], Math.min(scene.last - scene[other], by));
      scene[other] += shift;
      scene[which] += shift;
    } else scene[which] = value;
    sliders.a.set(scene.a);
    sliders.b.set(scene.b);
    scene.set({ a: scene.a || null, b: scene.b === 1 ? null : scene.b });
    scene.refresh("places");
  };
  const make = (which, label) => slider({ label, min: 0, max: scene.last, value: scene[which], onInput: (value) => move(which, value) });
  const sliders = { a: make("a", names[0]), b: make("b", names[1]) };
  scene.parts.push((what) => {
    if (what !== "picked") return;
    sliders.a.set(scene.a);
    sliders.b.set(scene.b);
  });
  const lock = h("input", {
    type: "checkbox", checked: scene.lock,
    onChange: () => {
      scene.lock = lock.checked;
      scene.set({ lock: lock.checked ? "1" : null });
    },
  });
  return h("div", { class: "pos-sliders" }, sliders.a, sliders.b, h("label", { class: "check" }, lock, "move both together"));
}

/** Take two positions from a picture. */
function pick(scene, a, b) {
  scene.a = Math.min(a, scene.last);
  scene.b = Math.min(b, scene.last);
  scene.set({ a: scene.a || null, b: scene.b === 1 ? null : scene.b });
  scene.refresh("picked");
  scene.refresh("places");
}

/** positions x dimensions, pairs or heads. */
function mapPanel(scene, title, sentence, values, names, options = {}) {
  const heat = heatMap({
    label: title, unit: options.unit ?? "value", axes: [names.column, names.row], cellHeight: Math.max(1, Math.min(18, Math.floor(320 / values.rows))),
    rowName: (r) => `${names.row} ${r}`, columnName: (c) => `${names.column} ${c}`, onPick: options.onPick,
  });
  const marks = () => (options.marks === false ? [] : [{ row: scene.a }, { row: scene.b }]);
  heat.show(values, { limit: options.limit, shade: scene.beyond(values.rows - 1) ? (r) => scene.beyond(r) : null, marks: marks() });
  scene.parts.push((what) => (what === "places" || what === "picked") && heat.mark(marks()));
  return panel(title, sentence, scene.keep(heat));
}

/** A wave, or two learned dimensions, over the positions. */
function wavePanel(scene, rows) {
  const { scheme } = scene;
  const chart = curves({ label: "Curves over the positions", axes: ["position", "value"], onPick: (p) => pick(scene, Math.min(p, scene.last), scene.b) });
  const said = h("p", { class: "pipe-fact" });
  const isWave = Number.isFinite(scheme.wavelength(0));
  const draw = () => {
    const channels = scheme.channels(scene.pair);
    chart.show(channels.map((d) => ({
      name: isWave ? `${scheme.part(d)} (${scheme.speaks === "rotary" ? `pair ${scene.pair}` : `dimension ${d}`})` : `dimension ${d}`,
      colour: isWave ? Number(scheme.part(d) === "cos") : d % 2, values: Array.from({ length: rows.rows }, (_, p) => rows.data[p * rows.cols + d]),
    })), {
      range: isWave ? [-1, 1] : undefined, shadeFrom: scheme.trained ?? Infinity,
      marks: [{ at: scene.a, text: "a", side: scene.a <= scene.b ? "left" : "right" }, { at: scene.b, text: "b", side: scene.a <= scene.b ? "right" : "left" }],
    });
    const turn = scheme.wavelength(scene.pair);
    said.replaceChildren(isWave ? `Pair ${scene.pair} needs ` : `Dimensions ${channels.join(" and ")} of the learned vectors.`, isWave ? h("b", null, turn < 1e4 ? turn.toFixed(turn < 100 ? 2 : 0) : COUNT.format(Math.round(turn))) : "", isWave ? " positions for a turn." : "");
  };
  scene.parts.push((what) => what !== "picked" && draw());
  const choose = scheme.pairs > 1 ? slider({
    label: isWave ? "Pair" : "Dimensions", min: 0, max: scheme.pairs - 1, value: scene.pair, format: (i) => (isWave ? String(i) : `${2 * i}, ${2 * i + 1}`),
    onInput: (value) => {
      scene.pair = value;
      scene.set({ pair: value === 2 ? null : value });
      draw();
    },
  }) : null;
  const sentence = isWave
    ? "Each pair of dimensions is one wave: sine in blue, cosine in orange, a quarter of a turn apart. Low pairs are fast, high ones slow."
    : "Learned positions have no formula: each dimension takes whatever course training gave it.";
  return panel("Curves", sentence, choose, scene.keep(chart), said);
}

/** Whether any two positions are alike, and what was compared. */
function distinctFact(scene, rows) {
  const found = closest(rows);
  const described = scene.data.schemes.find((each) => each.name === scene.scheme.name);
  const said = [h("b", null, "No two positions are identical. ")];
  if (found && found.distance === 0) said[0] = h("b", null, `Positions ${found.a} and ${found.b} are identical. `);
  if (found) said.push(`Compared: all ${COUNT.format(found.pairs)} pairs of the first ${COUNT.format(rows.rows)} positions. The closest are ${found.a} and ${found.b}, `, h("b", null, shown(found.distance)), " apart.");
  if (described?.checked) said.push(` In the source, ${COUNT.format(described.distinct)} of ${COUNT.format(described.checked)} vectors are different, compared number by number.`);
  return h("p", { class: "pipe-fact", "data-value": "distinct" }, said);
}

function addedPanels(scene) {
  const { scheme, length } = scene;
  const rows = fromRows(Array.from({ length }, (_, p) => scheme.vector(p)));
  const isWave = Number.isFinite(scheme.wavelength(0));
  const map = mapPanel(scene, "Every position",
    isWave ? "One line for each position, one column for each dimension. Left the fast waves, right the slow ones: every line is another fingerprint."
      : "One line for each position, one column for each dimension: what training made of them.",
    rows, { row: "position", column: "dimension" }, { limit: isWave ? 1 : limitOf(rows), onPick: (p) => pick(scene, Math.min(p, scene.last), scene.b) });
  return [map, twoVectors(scene), similarityPanel(scene, rows), sameTokenPanel(scene), wavePanel(scene, rows)];
}

/** The vectors of two positions, and how alike they are. */
function twoVectors(scene) {
  const { scheme } = scene;
  const isWave = Number.isFinite(scheme.wavelength(0));
  const strips = heatMap({ label: "Two positions", unit: "value", rowLabels: true, axes: ["dimension"], cellHeight: 26, rowName: (r) => `${"ab"[r]}: ${[scene.a, scene.b][r]}`, columnName: (d) => `dimension ${d}` });
  const chart = curves({ label: "Fingerprint of position a", axes: ["dimension", "value at position a"], height: 150, xName: (d) => `dimension ${d}` });
  const numbers = h("div");
  const compared = h("p", { class: "pipe-fact" });
  const draw = (what) => {
    if (what === "picked") return;
    const [a, b] = [scheme.vector(scene.a), scheme.vector(scene.b)];
    strips.show(fromRows([a, b]), { limit: isWave ? 1 : undefined });
    const only = (part) => a.map((value, d) => (scheme.part(d) === part ? value : NaN));
    chart.show(isWave ? [{ name: "sine", colour: 0, values: only("sin"), dots: true }, { name: "cosine", colour: 1, values: only("cos"), dots: true }] : [{ name: "value", colour: 0, values: a, dots: true }], { range: isWave ? [-1.1, 1.1] : undefined });
    numbers.replaceChildren(tiles([["cosine", shown(cosine(a, b)), "cosine"], ["dot product", shown(dot(a, b)), "dot"], ["distance", shown(distance(a, b)), "distance"]]));
  };
  if (isWave) {
    const neighbours = (dim) => cosine(sinusoids(dim, 10000).vector(0), sinusoids(dim, 10000).vector(1));
    compared.append("Neighbours are often said to be about 0.99 alike. Computed for sinusoids of base 10,000: ",
      ...[8, 64, 512].flatMap((dim, i) => [i ? ", " : "", h("b", null, neighbours(dim).toFixed(3)), ` at D = ${dim}`]),
      `; here ${cosine(scheme.vector(0), scheme.vector(1)).toFixed(3)} at D = ${scheme.width}.`);
  }
  scene.parts.push(draw);
  return panel("Two positions",
    isWave ? "How alike the vectors of two positions are. Move both together: only their distance counts." : "How alike the vectors of two positions are.",
    placeSliders(scene), numbers, scene.keep(strips), scene.keep(chart), compared);
}

function similarityPanel(scene, rows) {
  const count = Math.min(MOST_COMPARED, scene.last + 1);
  const part = { rows: count, cols: rows.cols, data: rows.data.subarray(0, count * rows.cols) };
  const alike = similarities(part);
  const heat = heatMap({
    label: "Similarity of positions", unit: "cosine", square: true, axes: ["position b", "position a"],
    rowName: (p) => `a ${p}`, columnName: (p) => `b ${p}`, onPick: (a, b) => pick(scene, a, b),
  });
  const show = (what) => {
    const marks = [{ row: scene.a }, { column: scene.b }];
    if (what === "all") heat.show(alike, { limit: 1, shade: scene.beyond(count - 1) ? (r, c) => scene.beyond(Math.max(r, c)) : null, marks });
    else if (what !== "picked") heat.mark(marks);
  };
  scene.parts.push(show);
  return panel("Every position with every other", `Cosine of the first ${COUNT.format(count)} positions: orange where two are alike. Stripes along the diagonal mean that the distance decides.`,
    h("div", { class: "pos-square" }, scene.keep(heat)), distinctFact(scene, part));
}

/** One token of the source at two places. */
function sameTokenPanel(scene) {
  const { vectors, tokens } = scene;
  const scheme = scene.scheme.width === vectors.cols ? scene.scheme : sinusoids(vectors.cols, 10000);
  const strips = heatMap({ label: "One token at two positions", unit: "value", rowLabels: true, axes: ["dimension"], cellHeight: 26, rowName: (r) => ["token", `at ${scene.a}`, `at ${scene.b}`, "difference"][r], columnName: (d) => `dimension ${d}` });
  const numbers = h("div");
  const draw = (what) => {
    if (what === "picked") return;
    const token = row(vectors, scene.token);
    const [a, b] = [scheme.apply(token, scene.a), scheme.apply(token, scene.b)];
    strips.show(fromRows([token, a, b, b.map((value, d) => value - a[d])]));
    numbers.replaceChildren(tiles([
      ["cosine of the token at a and at b", shown(cosine(a, b)), "token-cosine"],
      ["cosine of the two positions alone", shown(cosine(scheme.vector(scene.a), scheme.vector(scene.b))), "position-cosine"],
      ["length of the token's vector", shown(Math.sqrt(dot(token, token)))],
    ]));
  };
  scene.parts.push(draw);
  const choice = select({
    label: "Token", value: String(scene.token), options: tokens.map((token, i) => [String(i), `${token.text}  (${token.id})`]),
    onChange: (value) => {
      scene.token = Number(value);
      scene.set({ token: value });
      draw("all");
    },
  });
  const foreign = scheme === scene.scheme ? "" : ` The table is ${COUNT.format(vectors.cols)} wide, so these are sinusoids of that width.`;
  return panel("The same token at two positions", `A token's true vector from this source, its scale applied, with the vectors of positions a and b added: one token, two vectors.${foreign}`,
    h("div", { class: "toolbar" }, choice), numbers, scene.keep(strips));
}

// Rotary

/** The query and the key that the page compares: the model's own where it has them, else the first numbers of rows. */
function queryAndKey(scene) {
  const { data, scheme, vectors } = scene;
  const isOwn = data.queries && data.queries.shape[2] === scheme.width && scheme.name === data.schemes[0].name;
  if (isOwn) {
    const heads = data.queries.shape[0];
    const head = Math.min(scene.head, heads - 1);
    const shared = heads / data.keys.shape[0];
    return {
      isOwn, heads, head,
      query: Float64Array.from(row(unpackMatrix(data.queries, head), scene.token)),
      key: Float64Array.from(row(unpackMatrix(data.keys, Math.floor(head / shared)), scene.key)),
    };
  }
  const width = scheme.width;
  const cut = (token) => Float64Array.from({ length: width }, (_, d) => vectors.data[token * vectors.cols + (d % vectors.cols)]);
  return { isOwn, heads: 1, head: 0, query: cut(scene.token), key: cut(scene.key) };
}

function rotaryPanels(scene) {
  const { scheme, length } = scene;
  const rows = fromRows(Array.from({ length }, (_, p) => scheme.vector(p)));
  const cosines = matrix(length, scheme.pairs, (p, i) => rows.data[p * rows.cols + 2 * i]);
  const map = mapPanel(scene, "Every position", "Cosine of each pair's angle: left the pairs that turn fast, right those that hardly move over the positions shown.",
    cosines, { row: "position", column: "pair" }, { unit: "cosine of the angle", limit: 1, onPick: (p) => pick(scene, Math.min(p, scene.last), scene.b) });
  return [map, turnedPanel(scene), distancePanel(scene), wavePanel(scene, rows)];
}

/** A query at one place and a key at another. */
function turnedPanel(scene) {
  const { scheme, tokens } = scene;
  const numbers = h("div");
  const strips = heatMap({ label: "Query and key", unit: "value", rowLabels: true, axes: ["channel of the head"], cellHeight: 24, rowName: (r) => ["query", `at ${scene.a}`, "key", `at ${scene.b}`][r], columnName: (d) => `channel ${d}` });
  const chart = curves({ label: "Score over the distance", axes: ["b − a", "score"], height: 150, xName: (d) => `distance ${d}`, legend: false });
  const said = h("p", { class: "note" });
  const draw = (what) => {
    if (what === "picked") return;
    const { query, key, isOwn } = queryAndKey(scene);
    const [turnedQuery, turnedKey] = [scheme.apply(query, scene.a), scheme.apply(key, scene.b)];
    strips.show(fromRows([query, turnedQuery, key, turnedKey]));
    const apart = scene.b - scene.a;
    const signed = apart < 0 ? `−${-apart}` : String(apart);
    numbers.replaceChildren(tiles([
      ["q · k / √K", shown(score(scheme, query, key, scene.a, scene.b)), "score"], ["distance b − a", signed], ["unturned: q · k / √K", shown(dot(query, key) / Math.sqrt(query.length))],
      ["the query at a and at b: cosine", shown(cosine(turnedQuery, scheme.apply(query, scene.b))), "token-cosine"],
    ]));
    const reach = Math.min(scene.last, 256);
    const values = Array.from({ length: 2 * reach + 1 }, (_, i) => score(scheme, query, key, Math.max(0, reach - i), Math.max(0, i - reach)));
    chart.show([{ name: "score", colour: 0, values }], { start: -reach, marks: [{ at: apart + reach, text: `b − a = ${signed}` }] });
    said.textContent = isOwn ? "Query and key are the model's own, of one head of its first block."
      : `No query of this width is known, so the first ${scheme.width} numbers of the tokens' vectors stand for query and key.`;
  };
  scene.parts.push(draw);
  const choice = (label, name) => select({
    label, value: String(scene[name]), options: tokens.map((token, i) => [String(i), `${token.text}  (${token.id})`]),
    onChange: (value) => {
      scene[name] = Number(value);
      scene.set({ [name]: value });
      scene.refresh("tokens");
    },
  });
  const { isOwn, heads } = queryAndKey(scene);
  const head = isOwn && heads > 1 ? select({
    label: "Head", value: String(Math.min(scene.head, heads - 1)), options: Array.from({ length: heads }, (_, i) => [String(i), String(i)]),
    onChange: (value) => {
      scene.head = Number(value);
      scene.set({ head: value === "0" ? null : value });
      scene.refresh("tokens");
    },
  }) : null;
  return panel("A query and a key", "Both are turned by their position. Move both together: the score stays, for it depends on their distance only.",
    h("div", { class: "toolbar" }, choice("Query of", "token"), choice("Key of", "key"), head), placeSliders(scene, ["Query at a", "Key at b"]), numbers, scene.keep(strips), scene.keep(chart), said);
}

/** A number for each query and each key. */
function queriesByKeys(scene, label, unit, axes) {
  return heatMap({ label, unit, square: true, axes, rowName: (p) => `query at ${p}`, columnName: (p) => `key at ${p}`, onPick: (a, b) => pick(scene, a, b) });
}

function distancePanel(scene) {
  const { scheme } = scene;
  const count = Math.min(MOST_COMPARED, scene.last + 1);
  const heat = queriesByKeys(scene, "Scores of all positions", "q · k / √K", ["key at b", "query at a"]);
  const show = (what) => {
    const marks = [{ row: scene.a }, { column: scene.b }];
    if (what === "all" || what === "tokens") {
      const { query, key } = queryAndKey(scene);
      const queries = Array.from({ length: count }, (_, p) => scheme.apply(query, p));
      const keys = Array.from({ length: count }, (_, p) => scheme.apply(key, p));
      heat.show(matrix(count, count, (a, b) => dot(queries[a], keys[b]) / Math.sqrt(query.length)), { shade: scene.beyond(count - 1) ? (r, c) => scene.beyond(Math.max(r, c)) : null, marks });
    } else if (what !== "picked") heat.mark(marks);
  };
  scene.parts.push(show);
  const fingerprints = fromRows(Array.from({ length: count }, (_, p) => scheme.vector(p)));
  return panel("Every position with every other", `The score of this query and key at the first ${COUNT.format(count)} positions: the same number along each diagonal.`,
    h("div", { class: "pos-square" }, scene.keep(heat)), distinctFact(scene, fingerprints));
}

// Biases

function biasPanels(scene) {
  const { scheme, length } = scene;
  const back = matrix(length, scheme.columns, (d, head) => scheme.bias(head, d, 0));
  const map = mapPanel(scene, "Every distance", "One line for each distance back to the key, one column for each head: what is added to the score.",
    back, { row: "distance", column: "head" }, { unit: "added to the score", marks: false, onPick: (_, head) => chooseHead(scene, head) });
  return [map, biasAtPlaces(scene), biasMatrix(scene), headCurves(scene)];
}

function chooseHead(scene, head) {
  scene.head = head;
  scene.set({ head: head || null });
  scene.refresh("tokens");
}

function biasAtPlaces(scene) {
  const { scheme } = scene;
  const numbers = h("div");
  const list = h("ol", { class: "pos-bars" });
  const draw = (what) => {
    if (what === "picked") return;
    const values = Array.from({ length: scheme.columns }, (_, head) => scheme.bias(head, scene.a, scene.b));
    const most = Math.max(...values.map(Math.abs), 1e-12);
    numbers.replaceChildren(tiles([["distance |a − b|", String(Math.abs(scene.a - scene.b))], [`bias of head ${scene.head}`, shown(values[scene.head]), "bias"], ["its share after softmax, all else equal", `× ${shown(Math.exp(values[scene.head]))}`]]));
    list.replaceChildren(...values.map((value, head) => {
      const bar = h("i");
      bar.style.width = `${(100 * Math.abs(value)) / most}%`;
      if (value > 0) bar.className = "pos-up";
      return h("li", null, h("button", { type: "button", "aria-pressed": String(head === scene.head), onClick: () => chooseHead(scene, head) },
        h("span", null, `head ${head}`), h("span", { class: "pipe-bar" }, bar), h("span", { class: "pipe-value" }, shown(value))));
    }));
  };
  scene.parts.push(draw);
  return panel("Two positions", "What each head adds to the score of a query at a and a key at b. Move both together: nothing changes.", placeSliders(scene, ["Query at a", "Key at b"]), numbers, list);
}

function headCurves(scene) {
  const { scheme, length } = scene;
  const chart = curves({ label: "Bias over the distance", axes: ["distance", "added to the score"] });
  const draw = (what) => {
    if (what === "places" || what === "picked") return;
    const series = Array.from({ length: scheme.columns }, (_, head) => ({ name: `head ${head}`, colour: head % 8, thin: head !== scene.head, values: Array.from({ length }, (_, d) => scheme.bias(head, d, 0)) }));
    series.sort((one, two) => Number(two.thin) - Number(one.thin));
    chart.show(series, { shadeFrom: scheme.trained ?? Infinity });
  };
  scene.parts.push(draw);
  const slopes = scheme.slopes ? `Slopes: ${scheme.slopes.slice(0, 8).map((slope) => String(Number(slope.toPrecision(3)))).join(", ")}${scheme.slopes.length > 8 ? ", …" : "."}` : "";
  return panel("Curves", "One line for each head over the distance back to the key; the chosen head is strong. Steep heads look near, flat ones far.", scene.keep(chart), h("p", { class: "note" }, slopes));
}

function biasMatrix(scene) {
  const { scheme } = scene;
  const count = Math.min(MOST_COMPARED, scene.last + 1);
  const heat = queriesByKeys(scene, "Bias of one head", "added to the score", ["key", "query"]);
  const title = h("p", { class: "pipe-fact" });
  const show = (what) => {
    const marks = [{ row: scene.a }, { column: scene.b }];
    if (what === "all" || what === "tokens") {
      title.textContent = `Head ${scene.head}`;
      heat.show(matrix(count, count, (q, k) => scheme.bias(scene.head, q, k)), {
        blank: scheme.causal ? (q, k) => k > q : null, shade: scene.beyond(count - 1) ? (r, c) => scene.beyond(Math.max(r, c)) : null, marks,
      });
    } else if (what !== "picked") heat.mark(marks);
  };
  scene.parts.push(show);
  return panel("Every position with every other", `What one head adds to the scores of the first ${COUNT.format(count)} positions${scheme.causal ? "; grey is the future, which no query sees" : ""}. Biases tell distances apart, not positions: no position has a vector here.`,
    title, h("div", { class: "pos-square" }, scene.keep(heat)));
}

// Attention

/** Scores of a few tokens with and without positions, and what another order of the tokens does to them. */
function attentionPanel(scene) {
  const { tokens, vectors, scheme, data } = scene;
  const count = Math.min(8, tokens.length);
  const { isOwn } = scheme.speaks === "rotary" ? queryAndKey(scene) : { isOwn: false };
  const width = scheme.speaks === "bias" || scheme.width === vectors.cols ? vectors.cols : scheme.speaks === "added" ? vectors.cols : scheme.width;
  const used = scheme.speaks === "added" && scheme.width !== vectors.cols ? sinusoids(vectors.cols, 10000) : scheme;
  const cut = (token) => Float64Array.from({ length: width }, (_, d) => vectors.data[token * vectors.cols + (d % vectors.cols)]);
  const queryOf = (token) => (isOwn ? Float64Array.from(row(unpackMatrix(data.queries, 0), token)) : cut(token));
  const keyOf = (token) => (isOwn ? Float64Array.from(row(unpackMatrix(data.keys, 0), token)) : cut(token));
  const queries = Array.from({ length: count }, (_, t) => queryOf(t));
  const keys = Array.from({ length: count }, (_, t) => keyOf(t));
  const neutral = { speaks: "added", apply: (vector) => vector };
  /** Scores of the tokens `order[0], order[1], ...` standing at the places 0, 1, ... */
  const scores = (how, order) => matrix(count, count, (i, j) => score(how, queries[order[i]], keys[order[j]], i, j, scene.head));
  const names = () => scene.order.map((t) => tokens[t].text);
  const make = (label) => heatMap({ label, unit: "score", rowLabels: true, axes: ["key", "query"], cellHeight: 26, rowName: (r) => names()[r], columnName: (c) => `key ${names()[c]}` });
  const [without, withThem] = [make("Scores without positions"), make("Scores with positions")];
  const [saidWithout, saidWith] = [h("p", { class: "pipe-fact", "data-value": "without" }), h("p", { class: "pipe-fact", "data-value": "with" })];
  const chips = h("ol", { class: "pipe-chips" });
  const straight = Array.from({ length: count }, (_, i) => i);
  if (scene.order.length !== count) scene.order = straight;

  const draw = (what) => {
    if (what === "places" || what === "picked") return;
    const isMoved = scene.order.some((t, i) => t !== i);
    chips.replaceChildren(...scene.order.map((t, place) => h("li", { class: "pipe-chip" }, h("span", null, tokens[t].text), h("small", null, `at ${place}`))));
    const [plain, placed] = [neutral, used].map((how) => scores(how, scene.order));
    const limit = limitOf(plain, placed);
    const fill = (heat, how, said, name, now) => {
      const moved = permuted(scores(how, straight), scene.order);
      const apart = largestDifference(now, moved);
      heat.show(now, { limit });
      said.replaceChildren(isMoved ? `${name}: scores of the permuted text and permuted scores of the text differ by at most ` : `${name}. Permute the tokens to see what follows.`, isMoved ? h("b", null, shown(apart)) : "", isMoved ? (apart > 1e-9 ? ": not the same. The order counts." : how === neutral ? ": the same table, its rows and columns moved. The order is invisible." : ": this order keeps every distance, and this scheme sees nothing else.") : "");
    };
    fill(without, neutral, saidWithout, "Without positions", plain);
    fill(withThem, used, saidWith, "With positions", placed);
  };
  scene.parts.push(draw);
  const permute = (order) => {
    scene.order = order;
    scene.set({ order: order.every((t, i) => t === i) ? null : order.join(".") });
    draw("all");
  };
  const button = (text, order) => h("button", { type: "button", onClick: () => permute(order()) }, text);
  const shuffled = () => {
    const order = [...scene.order];
    for (let i = order.length - 1; i > 0; i--) {
      const j = Math.floor(Math.random() * (i + 1));
      [order[i], order[j]] = [order[j], order[i]];
    }
    return order;
  };
  const what = isOwn ? "queries and keys of the first head of the first block" : width === vectors.cols ? "the tokens' vectors themselves as queries and keys" : `the first ${width} numbers of the tokens' vectors as queries and keys`;
  return h("section", { class: "panel pos-panel pos-wide" }, h("h2", null, "Attention with and without positions"),
    h("p", { class: "note" }, `Scores q · k / √K of a text's tokens, with ${what}. Without positions, moving tokens only moves their scores: attention cannot tell one order from another.`),
    h("div", { class: "toolbar" }, button("Shuffle", shuffled), button("Reverse", () => [...scene.order].reverse()), button("Swap the first two", () => [scene.order[1], scene.order[0], ...scene.order.slice(2)]), button("As written", () => straight)),
    chips,
    h("div", { class: "grid-2" }, h("section", { class: "pipe-picture" }, h("h3", null, "Without positions"), scene.keep(without), saidWithout), h("section", { class: "pipe-picture" }, h("h3", null, "With positions"), scene.keep(withThem), saidWith)));
}
