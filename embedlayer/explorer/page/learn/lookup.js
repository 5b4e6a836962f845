/** Scene: a table of any size, any IDs, and four methods of looking them up with one result. */

import { h, scroller } from "../dom.js";
import { fromRows, largestDifference, matrix } from "../math.js";
import { changingPlace, check, claimList, numberTable } from "./parts.js";
import { roundedMatrix } from "./random.js";

/** @import { Child, Matrix } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */

const START = { vocab: 4, dim: 5, ids: "2 3 1" };
const [MOST_ROWS, MOST_COLUMNS, MOST_IDS] = [1e6, 4096, 12];
const SHOWN = 10; // numbers of a row, and rows of a large table beside those that are looked up
const SEED = 7000;

/** @type {Scene} */
export const scene = {
  id: "lookup",
  name: "Look-up of any size",
  question: "How do several IDs become vectors?",
  sentences: [
    "A table of V rows and D columns takes IDs of any shape, and adds a last size: (T) becomes (T, D), and a batch "
    + "(B, T) becomes (B, T, D).",
    "A linear layer on one-hot vectors has the same result with V times as many products. The numbers are random, as "
    + "in a new nn.Embedding; they are not those that a lesson prints.",
  ],
  words: ["one-hot vector"],
  task: `With V = ${START.vocab} and D = ${START.dim}, enter IDs so that two rows of the result are equal, and are the `
    + "last row of W.",
  draw,
};

/**
 * Return the row of a table at its start, with two digits after the point: N(0, 1), as nn.Embedding has.
 * @param {number} index
 * @param {number} dim
 */
export function rowOf(index, dim) {
  return roundedMatrix(1, dim, 1, SEED + index).data;
}

/**
 * @typedef {object} Ids
 * @property {number[]} list one after another
 * @property {number[]} shape
 * @property {string} problem
 */

/**
 * Read IDs: "2 3 1" has the shape (3), and with a slash, "3 7 1 / 5 3 9", (2, 3).
 * @param {string} text
 * @returns {Ids}
 */
export function readIds(text) {
  const texts = text.split("/").map((part) => (part.match(/\d+/g) ?? []).map(Number));
  const rows = texts.filter((row) => row.length);
  const list = rows.flat();
  const shape = text.includes("/") ? [rows.length, rows[0]?.length ?? 0] : [list.length];
  const isEven = rows.every((row) => row.length === rows[0].length);
  const problem = !list.length ? "Enter an ID." : list.length > MOST_IDS ? `Enter at most ${MOST_IDS} IDs.`
    : isEven ? "" : "The texts of a batch need the same number of IDs.";
  return { list, shape, problem };
}

/**
 * Return one-hot vectors times the rows of a table; rows that are left out have a factor of 0 in every product.
 * @param {number[]} indices
 * @param {number[]} held rows of the table that are multiplied
 * @param {number} dim
 */
export function product(indices, held, dim) {
  const rows = held.map((index) => rowOf(index, dim));
  return matrix(indices.length, dim, (r, c) =>
    rows.reduce((sum, row, i) => sum + Number(held[i] === indices[r]) * row[c], 0));
}

/** @typedef {{vocab: number, dim: number, text: string, first: number, words: string[]}} Settings `first`: first ID */

/** @param {Stage} stage */
function draw(stage) {
  /** @type {Settings} */
  const settings = {
    vocab: Math.round(stage.number("vocab", START.vocab, 1, MOST_ROWS)),
    dim: Math.round(stage.number("dim", START.dim, 1, MOST_COLUMNS)),
    text: stage.text("ids", START.ids), first: stage.text("first") === "1" ? 1 : 0,
    words: stage.text("words").split(" ").filter(Boolean),
  };
  const tables = changingPlace(stage, "lookup-tables");
  const [problem, shapes] = [h("p", { class: "note learn-problem", role: "status" }),
    h("p", { class: "pipe-fact", "data-value": "shapes" })];
  const [methods, claims] = [h("div"), claimList(stage)];
  const update = () => {
    const { vocab, dim, text, first, words } = settings;
    stage.set({ vocab: vocab === START.vocab ? null : vocab, dim: dim === START.dim ? null : dim,
      ids: text === START.ids ? null : text, first: first || null, words: words.join(" ") || null });
    const found = lookUp(settings);
    problem.textContent = found.problem;
    for (const { style } of [shapes, tables.element, methods, claims.element]) {
      style.visibility = found.problem ? "hidden" : ""; // the field stays in its place
    }
    if (found.problem) return stage.judge(false, found.problem);
    shapes.textContent = shapesOf(settings, found);
    methods.replaceChildren(methodTable(settings, found));
    tables.show(numberTables(settings, found));
    claims.show(claimsOf(settings, found));
    return stage.judge(...verdict(settings, found));
  };
  const controls = controlsOf(settings, update);
  update();
  return [controls, problem, shapes, tables.element, methods, claims.element];
}

/** @param {Settings} settings */
function lookUp({ vocab, dim, text, first }) {
  const ids = readIds(text);
  const wrong = ids.list.find((id) => id < first || id >= vocab + first);
  const problem = ids.problem || (wrong === undefined ? "" : `IndexError: ID ${named(wrong)} is outside of this table: `
    + `its IDs are ${first} to ${named(vocab - 1 + first)}.`);
  const indices = problem ? [] : ids.list.map((id) => id - first);
  const few = Array.from({ length: Math.min(vocab, SHOWN) }, (_, i) => i);
  const held = [...new Set([...few.slice(0, vocab > SHOWN ? 3 : SHOWN), ...indices])].sort((a, b) => a - b);
  return { ...ids, problem, indices, held, result: fromRows(indices.map((index) => rowOf(index, dim))),
    multiplied: product(indices, held, dim) };
}
/** @typedef {ReturnType<typeof lookUp>} Found */

/** Format a count or an ID. @param {number} value */
function named(value) {
  return value.toLocaleString("en");
}

/** Write the IDs as the index of PyTorch, which counts from 0. @param {number} first */
function indexOf(first) {
  return first ? "ids - 1" : "ids";
}

/** Format a shape as PyTorch prints a tuple. @param {number[]} sizes */
function shapeOf(...sizes) {
  return `(${sizes.map(named).join(", ")}${sizes.length === 1 ? "," : ""})`;
}

/** @param {Settings} settings changed by the controls @param {() => void} update */
function controlsOf(settings, update) {
  /** @param {string} label @param {"vocab" | "dim"} key @param {number} most */
  const size = (label, key, most) => {
    const input = h("input", { type: "number", min: 1, max: most, value: String(settings[key]), onInput: () => {
      const isRight = input.value !== "" && input.checkValidity();
      input.setAttribute("aria-invalid", String(!isRight));
      if (isRight) settings[key] = Number(input.value);
      update();
    } });
    return h("label", { class: "field" }, h("span", null, label), input);
  };
  const ids = h("input", { type: "text", value: settings.text, maxLength: 100, autocomplete: "off", spellcheck: false,
    onInput: () => {
      Object.assign(settings, { text: ids.value.trim(), words: [] }); // the words are those of a link's IDs
      update();
    } });
  return h("div", { class: "learn-controls" }, size("Vocabulary V", "vocab", MOST_ROWS),
    size("Width D", "dim", MOST_COLUMNS),
    h("label", { class: "field" }, h("span", null, "IDs; / between the texts of a batch"), ids),
    check("count IDs from 1", settings.first === 1, (checked) => {
      settings.first = checked ? 1 : 0;
      update();
    }));
}

/** @param {Settings} settings @param {Found} found */
function shapesOf({ vocab, dim, first, words }, { list, shape }) {
  const text = words.length ? `“${words.join(" ")}” → ${list.map((id, i) =>
    `“${words[i] ?? ""}” ${named(id)}`).join(", ")}: IDs of a made-up vocabulary. ` : "";
  return `${text}W ${shapeOf(vocab, dim)} has ${named(vocab * dim)} numbers. IDs ${listOf(list, shape)} `
    + `${shapeOf(...shape)} → W[${indexOf(first)}] ${shapeOf(...shape, dim)}.`
    + (first ? " Row t of the formula is row t − 1 in PyTorch, which counts from 0." : "")
    + (dim > SHOWN ? ` The tables show numbers 0 to ${SHOWN - 1} of ${named(dim)}.` : "");
}

/** @param {Settings} settings @param {Found} found */
function numberTables({ vocab, dim, first, words }, { list, shape, indices, held, result }) {
  const columns = Math.min(dim, SHOWN);
  const wordOf = (/** @type {number} */ i) => (words[i] ? ` “${words[i]}”` : "");
  const oneHot = vocab > SHOWN ? [] : [{ caption: `one_hot ${shapeOf(...shape, vocab)}`, digits: 0, limit: 1.5,
    rowNames: list.map((id) => named(id)), columnNames: Array.from({ length: vocab }, (_, c) => String(c + first)),
    values: matrix(list.length, vocab, (r, c) => Number(c === indices[r])) }];
  const rows = fromRows(held.map((index) => rowOf(index, columns)));
  const all = [...oneHot,
    { caption: `W ${shapeOf(vocab, dim)}${held.length < vocab ? ", some rows" : ""}`, limit: 3, digits: 2, values: rows,
      rowNames: held.map((index) => named(index + first)) },
    { caption: `result ${shapeOf(...shape, dim)}`, limit: 3, digits: 2,
      values: matrix(list.length, columns, (r, c) => result.data[r * dim + c]),
      rowNames: list.map((id, i) => `${placeOf(i, shape)} ID ${named(id)}${wordOf(i)}`) }];
  return all.map(({ values, ...options }) => {
    const table = numberTable(options);
    const mark = (/** @type {number} */ r) => values === rows && indices.includes(held[r]);
    table.show(values, { mark, plainZeros: options.digits === 0 });
    return { element: scroller(options.caption, "scroll", table.element), close: table.close };
  });
}

/** Return IDs as nested lists of their shape. @param {number[]} list @param {number[]} shape */
function listOf(list, [rows, columns]) {
  if (columns === undefined) return `[${list.join(", ")}]`;
  const texts = Array.from({ length: rows }, (_, r) => list.slice(r * columns, (r + 1) * columns).join(", "));
  return `[${texts.map((text) => `[${text}]`).join(", ")}]`;
}

/** Return the index of the `i`-th ID as code writes it. @param {number} i @param {number[]} shape */
function placeOf(i, [first, second]) {
  return second ? `[${Math.floor(i / second)}, ${i % second}]` : first ? `[${i}]` : "";
}

/** @param {Settings} settings @param {Found} found */
function methodTable({ vocab, dim, first }, { list, shape, result, multiplied }) {
  const products = list.length * vocab * dim;
  const wasted = `${named(products)}, ${named(products - list.length * dim)} of them by 0`;
  const isEqual = largestDifference(result, multiplied) === 0 ? "equal" : "differs";
  const ids = indexOf(first);
  const [embedding, linear] = [`nn.Embedding(${vocab}, ${dim})`, `nn.Linear(${vocab}, ${dim}, bias=False)`];
  const lines = [[`${embedding}(${ids})`, "none: copies rows", shapeOf(...shape, dim)],
    [`weight[${ids}]`, "none: copies rows", "equal"], [`one_hot(${ids}, ${vocab}) @ weight`, wasted, isEqual],
    [`${linear}, its weight ${shapeOf(dim, vocab)} = weight.T, on one_hot`, wasted, isEqual]];
  return scroller("Methods", "scroll", h("table", { class: "learn-table lookup-methods" },
    h("thead", null, h("tr", null, ["method", "products", "result"].map((name) => h("th", null, name)))),
    h("tbody", null, lines.map(([method, cost, same]) => h("tr", null, h("th", null, h("code", null, method)),
      h("td", null, cost), h("td", null, same))))));
}

/** @param {Settings} settings @param {Found} found @returns {Claim[]} */
function claimsOf({ vocab, dim, first }, { list, result, multiplied }) {
  const isEqual = largestDifference(result, multiplied) === 0;
  const [products, last] = [list.length * vocab * dim, Math.max(...list)];
  const needed = last + 1 - first;
  const repeated = list.find((id, i) => list.indexOf(id) < i);
  return [
    ["Both methods are identical: the layer, and its rows by index or by a product.", isEqual,
      `All ${named(list.length * dim)} numbers are equal: a row times 1, plus rows times 0.`],
    ["A linear layer on one-hot vectors is the same.", isEqual, "With the same weight, transposed, and no bias. A new "
      + `nn.Linear starts with other numbers: uniform up to ±1/√V = ±${(1 / Math.sqrt(vocab)).toPrecision(2)}.`],
    ["The product is wasteful: it multiplies by zeros.", vocab > 1,
      `${named(products - list.length * dim)} of ${named(products)} products are by 0.`],
    ["A table needs as many rows as the largest ID + 1.", !first && needed === vocab ? null : false,
      (first ? `Counted from 1, the largest ID ${named(last)} needs ` : "These IDs need ")
      + `${needed === 1 ? "one row" : `${named(needed)} rows`}, and W has ${named(vocab)}. The vocabulary `
      + "of the tokenizer decides, not the IDs of one text."],
    ["The same token always gets the same embedding.", repeated === undefined ? null : true,
      repeated === undefined ? "Each ID occurs once here." : `ID ${named(repeated)} is copied from the same row.`],
    ["IDs count from 1 to V.", first ? null : false, first
      ? `Formulas often count so. In code ID ${named(vocab)} would be outside; subtract 1 first.`
      : `PyTorch counts from 0: here 0 to ${named(vocab - 1)}, and ID ${named(vocab)} is an IndexError.`],
    ["E(t) is the t-th row of E.", first ? true : null, first
      ? `E(${named(last)}) is row ${named(last)}, counted from 1: weight[${named(last - 1)}] in PyTorch.`
      : `Here ID ${named(last)} is weight[${named(last)}], which is row ${named(last + 1)} counted from 1.`],
  ];
}

/** @param {Settings} settings @param {Found} found @returns {[boolean, ...Child[]]} */
function verdict({ vocab, dim, first }, { list, indices }) {
  if (vocab !== START.vocab || dim !== START.dim) return [false, `Set V to ${START.vocab} and D to ${START.dim}.`];
  const last = indices.filter((index) => index === vocab - 1).length;
  if (last > 1) {
    return [true, `ID ${vocab - 1 + first} is the last row, read ${last} times: ${last} of ${list.length} rows of the `
      + "result are equal."];
  }
  return [false, last ? "The last row is read once. Read it twice." : "The last row of W is not read."];
}
