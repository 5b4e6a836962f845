/** Scene: the positions (T, D) are added to each row of a batch (B, T, D). */

import { HeatMap } from "../charts/heat.js";
import { h, slider } from "../dom.js";
import { add, distance, fromRows, matrix, row } from "../math.js";
import { smallTable } from "./onehot.js";
import { changingPlace, check, claimList, fixed, listSlider, numberTable, timesOf } from "./parts.js";
import { roundedMatrix } from "./random.js";
import { IDS, idsOf, windowsOf } from "./windows.js";
import { WORDS } from "./words.js";

/** @import { Child, Matrix } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */

const [LENGTH, BATCH, DIM] = [4, 8, 4]; // the largest T and B, and the usual D
const DIMS = [4, 8, 256];
const SHOWN = 5; // dimensions as numbers
const SEEDS = { token: 9, position: 21 };
const OTHER_SEEDS = { token: 10, position: 22 };

/**
 * What is compared in two batch rows.
 * @type {["row" | "place" | "sum", string][]}
 */
const PARTS = [["row", "rows W[id]"], ["place", "what is added, x − W[id] = P[t]"], ["sum", "sums x"]];

/** @type {Scene} */
export const scene = {
  id: "broadcast",
  name: "Sums of a batch",
  question: "How do the positions of one row serve a whole batch?",
  sentences: [
    "The look-up makes vectors (B, T, D) of the IDs (B, T). There is one vector for each position, (T, D), whatever "
    + "the batch.",
    "Broadcasting lays these (T, D) numbers on each of the B rows: x[b, t] = W[id] + P[t].",
  ],
  task: "Tick what is equal in batch rows 0 and 7. Then find two rows where more is equal, and tick that.",
  draw,
};

/**
 * Return the tables W and P of some width, N(0, 1) as of a new nn.Embedding, with two digits after the point.
 * @param {number} dim
 * @param {{token: number, position: number}} [seeds]
 */
export function tablesOf(dim, seeds = SEEDS) {
  return { table: smallTable(dim, seeds.token, 1), places: roundedMatrix(LENGTH, dim, 1, seeds.position) };
}

/**
 * Return the IDs of a batch, windows side by side.
 * @param {number} batchSize at most 8
 * @param {number} length at most 4
 */
export function batchOf(batchSize, length) {
  const cut = { tokens: IDS.length, length, stride: length, batchSize, dropLast: true };
  return idsOf(windowsOf(cut).batches[0], length);
}

/**
 * Return the input vector of a token at a position, and its two parts.
 * @param {ReturnType<typeof tablesOf>} tables
 * @param {number} id
 * @param {number} position
 */
export function partsOf({ table, places }, id, position) {
  const [vector, place] = [row(table, id), row(places, position)];
  return { row: vector, place, sum: add(vector, place) };
}

/**
 * Compute (W[id] + P[t]) − W[id] in float32, as a notebook does to get P[t] back.
 * @param {ReturnType<typeof partsOf>} parts
 */
export function recovered({ row: vector, place }) {
  return Float32Array.from(vector, (value, i) => {
    const single = Math.fround(value);
    return Math.fround(single + Math.fround(place[i])) - single;
  });
}

/** Count the numbers that differ. @param {ArrayLike<number>} a @param {ArrayLike<number>} b */
function unequal(a, b) {
  return Array.from(a).filter((value, i) => value !== b[i]).length;
}

/** @typedef {{batchSize: number, length: number, dim: number, a: number, b: number, t: number}} Settings */
/** @typedef {keyof Settings} Name */

/** @type {[name: Name, key: string, label: string, usual: number, low: number, high: number][]} */
const NUMBERS = [
  ["batchSize", "size", "Batch size B", BATCH, 1, BATCH], ["length", "length", "Length T", LENGTH, 1, LENGTH],
  ["dim", "dim", "Width D", DIM, 1, 256], ["a", "a", "Batch row a", 0, 0, BATCH - 1],
  ["b", "b", "Batch row b", BATCH - 1, 0, BATCH - 1], ["t", "t", "Position t", 0, 0, LENGTH - 1],
];

/** @param {Stage} stage */
function draw(stage) {
  const settings = settingsOf(stage);
  let equal = stage.text("equal").split(".").filter(Boolean);
  const ticks = PARTS.map(([name, label]) => check(`equal: ${label}`, equal.includes(name), (checked) => {
    equal = PARTS.map(([each]) => each).filter((each) => (each === name ? checked : equal.includes(each)));
    update();
  }));
  const [strips, pair, claims] = [stripsOf(stage, ticks), pairOf(stage), claimList(stage)];
  const formula = h("p", { class: "pipe-fact", "data-value": "shapes" });
  const update = () => {
    const { batchSize, length } = settings;
    Object.assign(settings, { a: Math.min(settings.a, batchSize - 1), b: Math.min(settings.b, batchSize - 1),
      t: Math.min(settings.t, length - 1) });
    stage.set(Object.fromEntries(NUMBERS.map(([name, key, , usual]) =>
      [key, settings[name] === usual ? null : settings[name]])));
    stage.set({ equal: equal.join(".") || null });
    sliders.follow();
    const chosen = chosenOf(settings);
    strips.show(settings, chosen);
    formula.textContent = shapes(settings);
    pair.show(settings, chosen);
    claims.show(claimsOf(settings, chosen));
    stage.judge(...verdict(settings, chosen, equal));
  };
  const sliders = slidersOf(settings, update);
  update();
  return [sliders.sizes, strips.element, formula, sliders.places, pair.element, claims.element];
}

/** @param {Stage} stage @returns {Settings} */
function settingsOf(stage) {
  const settings = Object.fromEntries(NUMBERS.map(([name, key, , usual, low, high]) =>
    [name, Math.round(stage.number(key, usual, low, high))]));
  return /** @type {Settings} */ ({ ...settings, dim: DIMS.includes(settings.dim) ? settings.dim : DIM });
}

/** Return the batch, its tables, and the two chosen vectors. @param {Settings} settings */
function chosenOf({ batchSize, length, dim, a, b, t }) {
  const [tables, ids] = [tablesOf(dim), batchOf(batchSize, length)];
  return { tables, ids, vectors: [a, b].map((each) => partsOf(tables, ids[each][t], t)) };
}
/** @typedef {ReturnType<typeof chosenOf>} Chosen */

/**
 * Create the sliders of the sizes, and those of what is compared.
 * @param {Settings} settings changed by them
 * @param {() => void} update
 */
function slidersOf(settings, update) {
  const all = NUMBERS.map(([name, , label, , min, max]) => {
    const onInput = (/** @type {number} */ value) => {
      settings[name] = value;
      update();
    };
    const each = name === "dim" ? listSlider(label, DIMS, settings.dim, onInput)
      : slider({ label, min, max, value: settings[name], onInput });
    return { name, each };
  });
  /** @param {typeof all} some */
  const group = (some) => h("div", { class: "learn-controls learn-sliders" }, some.map(({ each }) => each));
  return {
    sizes: group(all.slice(0, 3)), places: group(all.slice(3)),
    follow: () => all.slice(3).forEach(({ name, each }) => each.set(settings[name])),
  };
}

/**
 * Create the pictures of W[ids], of P on each row, and of their sum, each with its box to tick.
 * @param {Stage} stage
 * @param {HTMLElement[]} boxes
 */
function stripsOf(stage, boxes) {
  let dim = DIM;
  const names = ["W[ids]", "+ P, stored once: the same for each batch row", "= x"];
  const heats = names.map((label) => new HeatMap({
    label, unit: "value", cellHeight: 12, rowName: (r) => `batch row ${r}`,
    columnName: (c) => `position ${Math.floor(c / dim)}, dimension ${c % dim}`,
  }));
  const ticks = h("div", { class: "learn-ticks" });
  const element = h("div", { class: "learn-stack", role: "group", "aria-label": "Equal in both" }, ticks,
    heats.flatMap((heat, i) => [
      h("div", { class: "learn-boxed" }, h("p", { class: "learn-caption" }, names[i]), boxes[i]), stage.keep(heat)]));
  return {
    element,
    /** @param {Settings} settings @param {Chosen} chosen */
    show: ({ batchSize, length, a, b, dim: width }, { tables, ids }) => {
      dim = width;
      element.style.setProperty("--positions", String(length));
      ticks.replaceChildren(...Array.from({ length }, (_, t) => h("span", null, `position ${t}`)));
      const vectors = ids.map((of) => of.map((id, t) => partsOf(tables, id, t)));
      heats.forEach((heat, i) => {
        const [part] = PARTS[i];
        heat.show(matrix(batchSize, length * dim, (r, c) => vectors[r][Math.floor(c / dim)][part][c % dim]),
          { limit: 3, shade: part === "place" ? (r) => r > 0 : null, marks: [{ row: a }, { row: b }] });
      });
    },
  };
}

/** Create the tables of the two chosen vectors. @param {Stage} stage */
function pairOf(stage) {
  const { element, show } = changingPlace(stage, "learn-pair learn-low");
  return {
    element,
    /** @param {Settings} settings @param {Chosen} chosen */
    show: ({ a, b, t }, { ids, vectors }) => show(vectors.map((parts, i) => {
      const [at, columns] = [[a, b][i], Math.min(SHOWN, parts.sum.length)];
      const id = ids[at][t];
      const table = numberTable({
        caption: `x[${at}, ${t}]: “${WORDS[id]}”, ID ${id}`, rowNames: [`W[${id}]`, `P[${t}]`, "x"], limit: 3,
      });
      table.show(fromRows(PARTS.map(([name]) => parts[name].subarray(0, columns))));
      return { element: h("div", null, table.element), close: table.close };
    })),
  };
}

/** @param {Settings} settings */
function shapes({ batchSize, length, dim }) {
  const [batch, positions] = [`(${batchSize}, ${length}, ${dim})`, `(${length}, ${dim})`];
  const count = (length * dim).toLocaleString("en");
  return `IDs (${batchSize}, ${length}) → W[ids] ${batch}. ${batch} + ${positions} → ${batch}: P has ${length} · `
    + `${dim} = ${count} numbers, stored once and read ${timesOf(batchSize)}.`
    + (dim > SHOWN ? ` The tables below show dimensions 0 to ${SHOWN - 1} of ${dim}.` : "");
}

/** @param {Settings} settings @param {Chosen} chosen @returns {Claim[]} */
function claimsOf(settings, chosen) {
  const [{ batchSize, length, dim, a, b, t }, { ids, vectors }] = [settings, chosen];
  const [first, second] = vectors.map(recovered);
  const apart = unequal(first, second);
  const differences = Array.from(first, (value, i) => Math.abs(value - second[i]));
  const isClose = differences.every((value, i) => value <= 1e-8 + 1e-5 * Math.abs(second[i]));
  const other = partsOf(tablesOf(dim, OTHER_SEEDS), ids[a][t], t);
  return [
    differClaim(settings, chosen),
    ["PyTorch automatically broadcast the positional embeddings.", true, "A missing first size counts as 1, and "
      + (batchSize === 1 ? "this batch has one row, so nothing is repeated: (T, D) is added as (1, T, D)."
        : `1 is repeated to ${batchSize}. Nothing is copied: expand gives a view in which all ${batchSize} rows are `
          + `the same ${(length * dim).toLocaleString("en")} numbers.`)],
    ["Are they the same? (x − W[id] of two batch rows)", a === b ? null : apart === 0,
      a === b ? batchSize === 1 ? "This batch has one row." : "Choose two batch rows." : apart === 0
        ? `All ${dim} numbers are equal here, in float32 too.`
        : `As numbers, yes. In float32 each sum is rounded: ${apart} of ${dim} numbers differ, by up to `
          + `${Math.max(...differences).toExponential(1).replace("-", "−")}. torch.equal prints False, torch.allclose `
          + `${isClose ? "True" : "False"}.`],
    ["Does our module match the manual approach?", false, "A new GPTEmbedding draws its own W and P: its x"
      + `[${a}, ${t}] starts with ${fixed(other.sum[0], 2)}, the one above with ${fixed(vectors[0].sum[0], 2)}. With `
      + "copies of the same two tables all bits are equal."],
    ["The batch dimension is always the very first dimension.", null,
      `Here it is: (B, T, D) = (${batchSize}, ${length}, ${dim}). One text is a batch of 1. PyTorch's nn.Transformer `
      + "takes (T, B, D) unless batch_first=True."],
  ];
}

/**
 * Compare two tokens, and two positions, of the first row.
 * @param {Settings} settings
 * @param {Chosen} chosen
 * @returns {Claim}
 */
function differClaim({ length, dim }, { ids: [first], tables: { table, places } }) {
  const quote = "Different tokens, and different positions, have different embeddings.";
  if (length < 2) return [quote, null, "The row has a single token here."];
  const [ofTokens, ofPlaces] = [distance(row(table, first[0]), row(table, first[1])),
    distance(row(places, 0), row(places, 1))];
  return [quote, ofTokens > 0 && ofPlaces > 0, `Row 0 begins with IDs ${first[0]} and ${first[1]}: the L2 distance of `
    + `W[${first[0]}] and W[${first[1]}] is ${fixed(ofTokens)}, that of P[0] and P[1] ${fixed(ofPlaces)}. Rows of `
    + "standard deviation 1, as here and in a new nn.Embedding, are about √(2D) = "
    + `${fixed(Math.sqrt(2 * dim), 1)} apart.`];
}

/**
 * @param {Settings} settings
 * @param {Chosen} chosen
 * @param {string[]} ticked
 * @returns {[boolean, ...Child[]]}
 */
function verdict({ batchSize, a, b, t }, { vectors: [first, second], ids }, ticked) {
  if (batchSize === 1) return [false, "This batch has one row. Make it larger."];
  if (a === b) return [false, "Both are the same batch row. Choose two."];
  if (!ticked.length) return [false, `Tick what is equal in rows ${a} and ${b} at position ${t}.`];
  const right = PARTS.map(([name]) => name).filter((name) => !unequal(first[name], second[name]));
  const wrong = PARTS.find(([name]) => ticked.includes(name) !== right.includes(name));
  if (wrong) return [false, `Look again at rows ${a} and ${b}, position ${t}: ${wrong[1]}.`];
  if (right.length < PARTS.length) {
    return [false, `Right for rows ${a} and ${b}: the same position adds the same numbers, whatever the token. Now `
      + "find two rows and a position where more is equal."];
  }
  return [true, `“${WORDS[ids[a][t]]}” is at position ${t} of both rows: the same token at the same position is the `
    + "same vector, and the rest of the row does not matter yet."];
}
