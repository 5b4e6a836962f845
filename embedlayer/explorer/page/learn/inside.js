/** Scene: where the embedding is in a model: the list of its tensors, and one look-up inside and outside of it. */

import { h, scroller, select } from "../dom.js";
import { fromRows, norm, unpackMatrix } from "../math.js";
import { percent } from "../pipeline/pictures.js";
import { digitsOf } from "../pipeline/vector.js";
import { claimList, fixed, numberTable } from "./parts.js";

/** @import { Child, LookedUpRow, ModelPart, ModelTensor, ModelTensors } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */

/** Name of each part of a model, in the order in which a text passes them. @type {Record<ModelPart, string>} */
export const PARTS = {
  table: "embedding table", position: "positions", input: "rest of the input", blocks: "blocks", norm: "final norm",
  head: "output head", other: "other", buffer: "no parameters",
};
/** @type {Record<ModelPart, string>} what a wrong tensor does, as the rest of a sentence */
const ROLES = {
  table: "is the embedding table: it reads IDs", position: "has a vector for each position: it is added to the rows",
  input: "is used in the input, beside the table", blocks: "is in the blocks: they read vectors, not IDs",
  norm: "is the final norm: it reads what the last block returns",
  head: "is in the output head: it comes last and gives the scores", other: "is in none of the parts of this way",
  buffer: "is no parameter: no optimiser learns it",
};
const [SHOWN, LEAST] = [4, 3];

/** @type {Scene} */
export const scene = {
  id: "inside",
  name: "Inside the model",
  question: "Where is the embedding in a model?",
  sentences: [
    "A checkpoint is a list of named tensors. One of them is the embedding table, V × D: the model's first step reads "
    + "its rows.",
    "The tokenizer is outside, in a file of its own. It turns a text into IDs and has no vectors.",
    "The output head is inside, at the end. It gives a score for each token; if it is tied, it is the table again.",
  ],
  task: "Click the tensors in the order in which a text passes them, from its IDs to the scores. A wrong one starts "
    + "over.",
  draw,
};

/**
 * Return the parts that a text passes in a model, in order: those of the list, and the table again as a tied head,
 * after the matrices that such a head has beside it.
 * @param {ModelTensors} model
 * @returns {ModelPart[]}
 */
export function wayOf({ tensors, is_tied: isTied }) {
  const isOnWay = (/** @type {ModelTensor} */ { part, shape, is_copy: isCopy }) =>
    !isCopy && !(isTied && part === "head" && shape.length < 2); // a bias is added after the product with the table
  const has = new Set(tensors.filter(isOnWay).map((each) => each.part));
  const order = /** @type {ModelPart[]} */ (["table", "position", "blocks", "norm", "head"]);
  const way = order.filter((part) => has.has(part));
  return isTied ? [...way, "table"] : way;
}

/**
 * Return the size of each part that the list has, largest first, and the size of all; copies and buffers do not count.
 * @param {ModelTensor[]} tensors
 * @returns {{parts: [ModelPart, number][], total: number}}
 */
export function sharesOf(tensors) {
  const sizes = /** @type {Map<ModelPart, number>} */ (new Map());
  for (const { part, size, is_copy: isCopy } of tensors) {
    if (!isCopy && part !== "buffer") sizes.set(part, (sizes.get(part) ?? 0) + size);
  }
  const order = Object.keys(PARTS);
  const parts = [...sizes].sort(([a], [b]) => order.indexOf(a) - order.indexOf(b));
  return { parts, total: parts.reduce((sum, [, size]) => sum + size, 0) };
}

/** @param {Stage} stage */
async function draw(stage) {
  const { data, source } = stage.context;
  const [own, tiny, gpt2] = await Promise.all([data.load("tensors", { source }),
    data.load("tensors", { source, layer: "tiny" }), data.load("tensors", { source, layer: "gpt2" })]);
  const models = /** @type {Record<string, ModelTensors>} */ ({ gpt2, tiny });
  const options = /** @type {[string, string][]} */ ([["gpt2", "GPT-2 small (sizes only)"], ["tiny", "tiny layer"]]);
  if (!own.refused) options.unshift(["", (models[""] = own).title]);
  const wanted = stage.text("model");
  const first = Object.hasOwn(models, wanted) ? wanted : options[0][0];
  const place = h("div", { class: "learn-part" });
  const claims = claimList(stage);
  /** @type {(() => void)[]} */
  let closers = [];
  stage.onClose(() => closers.forEach((close) => close()));
  /** @param {string} name */
  const show = (name) => {
    closers.forEach((close) => close());
    const model = models[name];
    const rows = model.rows.length ? model : tiny;
    const look = lookUps(rows, rows === model ? ""
      : `Rows of ${model.title} are not shown; these are those of the tiny layer.`);
    closers = [look.close];
    place.replaceChildren(...listOf(stage, model), look.element);
    claims.show(claimsOf(model));
  };
  show(first);
  const choice = select({ label: "Model", options, value: first, onChange: (value) => {
    stage.set({ model: value === options[0][0] ? null : value, path: null });
    show(value);
  } });
  return [h("div", { class: "learn-controls" }, choice, own.refused && h("p", { class: "note" }, own.refused)), place,
    claims.element];
}

/**
 * Create the way of a text through a model, the bar of its parts, and the list of its tensors.
 * @param {Stage} stage
 * @param {ModelTensors} model
 */
function listOf(stage, model) {
  const way = wayOf(model);
  let passed = Math.round(stage.number("path", 0, 0, way.length));
  const slots = way.map(() => h("li", { class: "inside-slot" }));
  const { total } = sharesOf(model.tensors);
  const lines = model.tensors.map((tensor) => lineOf(tensor, total, () => choose(tensor)));
  /** @param {Child[]} said */
  const update = (...said) => {
    stage.set({ path: passed || null });
    slots.forEach((slot, i) => slot.replaceChildren(h("b", null, String(i + 1)), i < passed ? slotName(way, i) : "?"));
    slots.forEach((slot, i) => slot.classList.toggle("inside-passed", i < passed));
    lines.forEach((line, i) => line.show(way.slice(0, passed).includes(model.tensors[i].part), passed === way.length));
    stage.judge(...verdict(model, way, passed, said));
  };
  /** @param {ModelTensor} tensor */
  const choose = (tensor) => {
    const isRight = passed < way.length && (tensor.part === way[passed] || isTiedCopy(tensor, way, passed));
    const done = passed === way.length;
    passed = isRight ? passed + 1 : done ? passed : 0;
    update(...(isRight || done ? [] : [`${tensor.name} ${ROLES[tensor.part]}. Start again. `]));
  };
  update();
  const head = ["tensor", "shape", model.unit, "share"].map((name, i) =>
    h("th", { class: i > 1 ? "number" : null }, name));
  return [
    h("ol", { class: "inside-way", "aria-label": "The way of a text" }, h("li", null, "text"),
      h("li", null, "tokenizer", h("small", null, "outside, no vectors")), h("li", null, "IDs"),
      h("li", { class: "inside-model" }, h("small", null, `the model: ${model.title}`), h("ol", null, slots)),
      h("li", null, way.includes("head") || model.is_tied ? "scores" : "vectors")),
    partBar(model),
    scroller(`Tensors of ${model.title}`, "inside-list", h("table", { class: "learn-table" },
      h("thead", null, h("tr", null, head)), h("tbody", null, lines.map(({ element }) => element)))),
  ];
}

/** Whether a tensor repeats the table, where the tied head is next. @param {ModelTensor} tensor
 * @param {ModelPart[]} way @param {number} place */
function isTiedCopy({ part, is_copy: isCopy }, way, place) {
  return isCopy && part === "head" && place === way.length - 1;
}

/** @param {ModelPart[]} way @param {number} place */
function slotName(way, place) {
  return place > 0 && way[place] === "table" ? "the table again, as tied head" : PARTS[way[place]];
}

/**
 * Create the line of a tensor; `show` says whether its part is known, and whether those of all are.
 * @param {ModelTensor} tensor
 * @param {number} total
 * @param {() => void} onClick
 */
function lineOf({ name, count, shape, size, part, is_copy: isCopy }, total, onClick) {
  const single = shape.map((each) => each.toLocaleString("en")).join(" × ");
  const sizes = count === 1 ? single : `${count} · ${shape.length > 1 ? `(${single})` : single}`;
  const label = h("small", { class: "inside-part" });
  const isCounted = !isCopy && part !== "buffer";
  const element = h("tr", null,
    h("th", { scope: "row" }, h("button", { type: "button", class: "inside-name", onClick },
      name.split(/(?<=\.)/).map((part) => [part, h("wbr")])),
      h("small", { class: "learn-narrow" }, sizes), label),
    h("td", null, sizes), h("td", { class: "number" }, size.toLocaleString("en")),
    h("td", { class: "number" }, isCounted ? percent(size / total) : "0%"));
  /** @param {boolean} isPassed @param {boolean} isAll */
  const show = (isPassed, isAll) => {
    label.textContent = !isPassed && !isAll ? "" : isCopy ? "the table again, not counted" : PARTS[part];
    element.classList.toggle("inside-here", part === "table" && isPassed);
  };
  return { element, show };
}

/** Create the bar of the parts of a model, with the size of each. @param {ModelTensors} model */
function partBar({ tensors, unit }) {
  const { parts, total } = sharesOf(tensors);
  const cells = parts.map(([part, size]) => {
    const cell = h("i", { class: `inside-${part}` });
    cell.style.width = `${(100 * size) / total}%`;
    return cell;
  });
  return h("div", { class: "inside-parts" }, h("div", { class: "inside-bar", "aria-hidden": "true" }, cells),
    h("ul", null, parts.map(([part, size]) => h("li", { "data-part": part }, h("i", { class: `inside-${part}` }),
      `${PARTS[part]} `, h("b", null, percent(size / total)), ` ${size.toLocaleString("en")}`))),
    h("p", { class: "note" }, `${total.toLocaleString("en")} ${unit} in all${tensors.some(({ name }) =>
      name.includes("*")) ? "; in the list, * is the number of a block" : ""}`));
}

/**
 * Create the two look-ups of one token, and the choice of it.
 * @param {ModelTensors} model
 * @param {string} note
 */
function lookUps({ rows, is_file: isFile, tensors }, note) {
  const names = tensors.filter(({ part, is_copy: isCopy }) => part === "table" && !isCopy).map(({ name }) => name);
  const table = names.length === 1 ? names[0] : "the table";
  const place = h("div");
  const fact = h("p", { class: "pipe-fact", "data-value": "lookup" });
  /** @type {ReturnType<typeof numberTable> | null} */
  let shown = null;
  /** @param {LookedUpRow} row */
  const show = ({ token, inside, outside, difference }) => {
    shown?.close();
    const [a, b] = [inside, outside].map((each) => unpackMatrix({ ...each, shape: [1, each.shape[0]] }).data);
    const width = Math.min(SHOWN, a.length);
    shown = numberTable({
      caption: `“${token.text}”: the model's first step, and row ${token.id} alone`, rowNames: ["inside", "outside"],
      digits: digitsOf(a), limit: norm(a) / Math.sqrt(a.length) * 3 || 1,
    });
    shown.show(fromRows([a.slice(0, width), b.slice(0, width)]));
    place.replaceChildren(shown.element);
    fact.textContent = `Outside, row ${token.id} of ${table} is read from ${isFile ? "the file" : "memory"}, without `
      + `the model. Largest difference of all ${a.length} numbers: ${shownDifference(difference)}.`;
  };
  show(rows[0]);
  const choice = select({
    label: "Token", options: rows.map(({ token }, i) => [String(i), `${token.text} (ID ${token.id})`]), value: "0",
    onChange: (value) => show(rows[Number(value)]),
  });
  return {
    element: h("section", { class: "learn-part learn-close" },
      h("h3", null, "One look-up inside the model, one outside"),
      note && h("p", { class: "note" }, note), h("div", { class: "learn-controls" }, choice), place, fact),
    close: () => shown?.close(),
  };
}

/** @param {number | null} difference */
function shownDifference(difference) {
  return difference === null ? "not a number" : difference === 0 ? "0" : fixed(difference, 6);
}

/**
 * @param {ModelTensors} model
 * @param {ModelPart[]} way
 * @param {number} passed
 * @param {Child[]} said
 * @returns {[boolean, ...Child[]]}
 */
function verdict({ title }, way, passed, said) {
  if (way.length < LEAST) return [false, `Only the embedding layer of ${title} is here. Choose another model.`];
  if (passed < way.length) return [false, ...said, `${passed} of ${way.length} passed.`];
  return [true, way.at(-1) === "table" ? "The table is the first and the last tensor of the way."
    : `The table is the first of ${way.length} parts, inside the model.`];
}

/** Return whether the head is a matrix of its own, and why. @param {ModelTensors} model
 * @returns {[boolean | null, string]} */
export function headOf({ tensors, is_tied: isTied }) {
  const hasMore = tensors.some(({ part, is_copy: isCopy }) => part === "head" && !isCopy);
  if (isTied) {
    return [false, `This model is tied: its head multiplies by the table, stored and counted once.${hasMore
      ? " The tensors of the head itself are what it does beside this product." : ""}`];
  }
  return hasMore ? [true, "This model is untied: table and head are two tensors."]
    : [null, "This list has no output head."];
}

/** @param {ModelTensors} model @returns {Claim[]} */
function claimsOf(model) {
  const { parts, total } = sharesOf(model.tensors);
  const size = parts.find(([part]) => part === "table")?.[1] ?? 0;
  return [
    ["Embeddings are computed outside, and then go into the model.", false,
      `The table is one of the model's tensors: ${size.toLocaleString("en")} of ${total.toLocaleString("en")} `
      + `${model.unit}, ${percent(size / total)}. Only IDs come from outside.`],
    ["The tokenizer turns text into vectors.", false,
      "It has a list of texts and rules, and returns IDs. ID i means row i, so a tokenizer fits its own table only."],
    ["An embedding model is the embedding layer of a model.", false,
      "It is a whole model, with such a table as its first step. It returns one vector for a text, often the mean of "
      + "the last block's vectors; a table returns one for each token, the same in every text."],
    ["The output head is a matrix of its own.", ...headOf(model)],
  ];
}
