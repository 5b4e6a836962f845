/** Scene: which size is which: V, D, T and B exchanged on purpose, what breaks and what silently does not. */

import { h, select } from "../dom.js";
import { tiles } from "../positions/scene.js";
import { claimList } from "./parts.js";
import { WORDS } from "./words.js";

/** @import { Child } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */
/** @typedef {{code: string, shape: number[] | null, error: string}} Line shape: null if it raises or is not reached */
/** @typedef {{tok: [rows: string, columns: string], pos: [rows: string, columns: string]}} Choice names of sizes */

/** @type {Record<string, number>} sizes of the layer of this scene, and B, the texts of a batch */
export const SIZES = { V: WORDS.length, D: 4, T: 6, B: 2, "V + 2": WORDS.length + 2 };
export const ROWS = ["V", "D", "T", "B", "V + 2"];
export const COLUMNS = ["V", "D", "T", "B"];
/** @type {[string, string][]} */
const MEANINGS = [
  ["V", "tokens of the vocabulary"], ["D", "numbers of a vector"], ["T", "context length"], ["B", "texts of a batch"],
];

/** Batches of B = 2 texts; all are allowed: IDs below V, and at most T tokens. */
export const BATCHES = [
  [[1, 3], [3, 1]], [[1, 5, 4], [4, 1, 5]], [[1, 5, 7], [1, 9, 7]], [[1, 5, 4, 1, 3, 4], [4, 1, 5, 4, 1, 3]],
  [[1, 5, 7, 4, 1, 6], [1, 9, 7, 4, 1, 3]],
];
const START = 1;
const GPT2 = { V: 50257, D: 768, T: 1024 };

/** @type {Scene} */
export const scene = {
  id: "sizes",
  name: "Which size is which",
  question: "What happens if two sizes are exchanged?",
  sentences: [
    "A layer has three sizes: V tokens in the vocabulary, D numbers in each vector, and T positions, the context "
    + "length. B, the number of texts in a batch, is no size of the layer.",
    "Set the sizes of both tables. The lines below run on the batch and stop where PyTorch raises an error.",
  ],
  words: ["nn.Embedding", "parameters"],
  task: "Find wrong sizes that raise no error. Then choose a batch that breaks them. Then repair the sizes.",
  draw,
};

/**
 * Return what the four lines of a layer return or raise, by the rules of PyTorch.
 * @param {{tok: number[], pos: number[], ids: number[][], dim: number}} options rows and columns of both tables, the
 *   IDs `(B, L)`, and the width of the block that follows
 * @returns {Line[]}
 */
export function run({ tok, pos, ids, dim }) {
  const [count, length] = [ids.length, ids[0].length];
  const width = tok[1] === 1 ? pos[1] : tok[1];
  const outside = "IndexError: index out of range in self";
  const steps = [
    { code: "x = tok_emb(ids)", shape: [count, length, tok[1]],
      error: Math.max(...ids.flat()) >= tok[0] ? outside : "" },
    { code: `p = pos_emb(torch.arange(${length}))`, shape: [length, pos[1]], error: length > pos[0] ? outside : "" },
    { code: "x = x + p", shape: [count, length, width],
      error: tok[1] === pos[1] || tok[1] === 1 || pos[1] === 1 ? "" : `RuntimeError: The size of tensor a (${tok[1]}) `
        + `must match the size of tensor b (${pos[1]}) at non-singleton dimension 2` },
    { code: "q = query(x)", shape: [count, length, dim],
      error: width === dim ? "" : `RuntimeError: mat1 and mat2 shapes cannot be multiplied (${count * length}x${width} `
        + `and ${dim}x${dim})` },
  ];
  const first = steps.findIndex(({ error }) => error);
  const end = first < 0 ? steps.length : first;
  return steps.map(({ code, shape, error }, i) =>
    ({ code, shape: i < end ? shape : null, error: i === end ? error : "" }));
}

/**
 * Return the error that a choice of sizes raises on a batch; "" for none.
 * @param {Choice} choice
 * @param {number[][]} ids
 */
export function errorOf({ tok, pos }, ids) {
  const sizes = { tok: tok.map((name) => SIZES[name]), pos: pos.map((name) => SIZES[name]) };
  return run({ ...sizes, ids, dim: SIZES.D }).find(({ error }) => error)?.error ?? "";
}

/** Whether the sizes are the right ones; more rows than V are right, too. @param {Choice} choice */
export function isRight({ tok, pos }) {
  return SIZES[tok[0]] >= SIZES.V && tok[1] === "D" && pos.join() === "T,D";
}

/** Return all choices of sizes. @returns {Choice[]} */
export function allChoices() {
  const tables = ROWS.flatMap((rows) => COLUMNS.map((columns) => /** @type {[string, string]} */ ([rows, columns])));
  return tables.flatMap((tok) => tables.map((pos) => ({ tok, pos })));
}

const IN_CODE = "Code has several names for them. V: vocab_size. D: embedding_dim, emb_dim, n_embd, d_model, "
  + "hidden_size. T: context_size, max_length, max_seq_len. B: batch_size.";

/** @param {Stage} stage */
function draw(stage) {
  const choice = { tok: pairOf(stage.text("tok"), "V"), pos: pairOf(stage.text("pos"), "T") };
  const done = { silent: stage.text("silent"), broken: stage.text("broken") };
  let [wasRight, batch] = [isRight(choice), Math.round(stage.number("batch", START, 0, BATCHES.length - 1))];
  const cost = h("p", { class: "pipe-fact", "data-value": "parameters" });
  const lines = h("ol", { class: "sizes-lines" });
  const tables = h("div", { class: "learn-pair" });
  const claims = claimList(stage);
  const update = () => {
    const error = errorOf(choice, BATCHES[batch]);
    if (wasRight && !isRight(choice)) [done.silent, done.broken] = ["", ""];
    note(choice, error, done);
    wasRight = isRight(choice);
    stage.set({ tok: saved(choice.tok, "V"), pos: saved(choice.pos, "T"), batch: batch === START ? null : batch,
      silent: done.silent || null, broken: done.broken || null });
    const sizes = { tok: choice.tok.map((each) => SIZES[each]), pos: choice.pos.map((each) => SIZES[each]) };
    cost.textContent = `Parameters: tok_emb ${product(sizes.tok)}, pos_emb ${product(sizes.pos)}, together `
      + `${sizes.tok[0] * sizes.tok[1] + sizes.pos[0] * sizes.pos[1]}.`;
    lines.replaceChildren(lineOf(idsLine(BATCHES[batch])),
      ...run({ ...sizes, ids: BATCHES[batch], dim: SIZES.D }).map(lineOf));
    tables.replaceChildren(...picturesOf(sizes, BATCHES[batch]));
    claims.show(claimsOf(batch));
    stage.judge(...verdict(choice, error, done));
  };
  const batches = select({
    label: "Batch (B = 2 texts)", value: String(batch),
    options: BATCHES.map((ids, i) => [String(i), ids.map((row) => row.map((id) => WORDS[id]).join(" ")).join(" / ")]),
    onChange: (value) => {
      batch = Number(value);
      update();
    },
  });
  update();
  return [
    tiles(MEANINGS.map(([name, meaning]) => [`${name}, ${meaning}`, String(SIZES[name])])),
    h("p", { class: "note" }, IN_CODE),
    h("div", { class: "sizes-code" }, codeOf(choice, update)),
    h("div", { class: "learn-controls sizes-batch" }, batches), lines, cost, tables, claims.element,
  ];
}

/**
 * Note wrong sizes that raise no error, and that a batch broke them; from then on, others are steps of the repair.
 * @param {Choice} choice
 * @param {string} error
 * @param {{silent: string, broken: string}} done
 */
function note(choice, error, done) {
  const name = nameOf(choice);
  if (!isRight(choice) && !error && !done.broken) done.silent = name;
  if (error && name === done.silent) done.broken = name;
}

/**
 * Return the names of a pair of sizes in the URL.
 * @param {string} text
 * @param {string} rows
 * @returns {[string, string]}
 */
function pairOf(text, rows) {
  const [first, second] = text.split(".");
  return [ROWS.includes(first) ? first : rows, COLUMNS.includes(second) ? second : "D"];
}

/** @param {string[]} pair @param {string} rows */
function saved(pair, rows) {
  return pair[0] === rows && pair[1] === "D" ? null : pair.join(".");
}

/** @param {Choice} choice */
function nameOf({ tok, pos }) {
  return [...tok, ...pos].join(".");
}

/** @param {number[]} sizes */
function product([rows, columns]) {
  return `${rows} · ${columns} = ${rows * columns}`;
}

/** Create the code with the choice of the four sizes. @param {Choice} choice @param {() => void} update */
function codeOf(choice, update) {
  const query = h("p", null, h("code", null, `query = nn.Linear(${SIZES.D}, ${SIZES.D})`),
    h("small", { class: "note" }, " of the first block"));
  const embeddings = /** @type {const} */ (["tok", "pos"]).map((table) => {
    const menus = [ROWS, COLUMNS].map((options, axis) => {
      const label = `${axis ? "Columns" : "Rows"} of ${table}_emb`;
      const menu = h("select", { "aria-label": label, onChange: () => {
        choice[table][axis] = menu.value;
        update();
      } }, options.map((name) => h("option", { value: name, selected: name === choice[table][axis] }, name)));
      return menu;
    });
    return h("p", null, h("code", null, `${table}_emb = nn.Embedding(`), menus[0], h("code", null, ", "), menus[1],
      h("code", null, ")"));
  });
  return [embeddings, query];
}

/** @param {number[][]} ids @returns {Line} */
function idsLine(ids) {
  const rows = ids.map((row) => `[${row.join(", ")}]`).join(", ");
  return { code: `ids = torch.tensor([${rows}])`, shape: [ids.length, ids[0].length], error: "" };
}

/** @param {Line} line */
function lineOf({ code, shape, error }) {
  const [kind, said] = error ? ["error", error]
    : shape ? ["ran", `shape (${shape.join(", ")})`] : ["rest", "not reached"];
  return h("li", { class: `sizes-${kind}` }, h("code", null, code), " ", h("span", null, said));
}

/**
 * Create the pictures of both tables: which rows the batch reads, which are missing, and which no text reads.
 * @param {{tok: number[], pos: number[]}} sizes
 * @param {number[][]} ids
 */
function picturesOf({ tok, pos }, ids) {
  const places = ids[0].map((_, place) => place);
  return [
    tablePicture("tok_emb", tok, SIZES.V, new Set(ids.flat()), (id) => `${id} ${WORDS[id] ?? ""}`),
    tablePicture("pos_emb", pos, SIZES.T, new Set(places), (place) => `${place}`),
  ];
}

/**
 * @param {string} name
 * @param {number[]} sizes
 * @param {number} needed rows that the right table has
 * @param {Set<number>} read rows that the batch reads
 * @param {(row: number) => string} label
 */
function tablePicture(name, [rows, columns], needed, read, label) {
  const lines = Array.from({ length: Math.max(rows, needed) }, (_, row) => {
    const [kind, said] = row >= rows ? ["missing", read.has(row) ? "read, but missing" : "missing"]
      : row >= needed ? ["waste", "never read"] : read.has(row) ? ["read", "read"] : ["", ""];
    return h("li", { class: `sizes-row sizes-${kind}` }, h("b", null, label(row)),
      h("span", null, Array.from({ length: columns }, () => h("i"))), h("small", null, said));
  });
  return h("div", null, h("h3", null, `${name}: ${rows} rows of ${columns}`), h("ol", null, lines));
}

/**
 * @param {Choice} choice
 * @param {string} error
 * @param {{silent: string, broken: string}} done
 * @returns {[boolean, ...Child[]]}
 */
function verdict(choice, error, { silent, broken }) {
  if (isRight(choice)) {
    if (broken) return [true, "These sizes fit every ID below V and every text of at most T tokens."];
    return [false, silent ? "The sizes are right again, but no batch broke the wrong ones."
      : "The sizes are right. Change one so that the code still runs."];
  }
  if (broken) {
    return [false, error && nameOf(choice) === broken ? "This batch breaks them. Now repair the sizes."
      : "A batch broke the wrong sizes. These are not the right ones yet."];
  }
  if (error) return [false, "PyTorch sees it at once on this batch. Find wrong sizes that raise no error."];
  const canBreak = BATCHES.some((ids) => errorOf(choice, ids));
  return [false, canBreak ? "Wrong, and no error. Which batch breaks it?"
    : `Wrong, but no batch breaks it: it only has ${wasted(choice)} numbers that no text reads. Find another one.`];
}

/** Return how many numbers of the position table no text reads. @param {Choice} choice */
function wasted({ pos }) {
  return (SIZES[pos[0]] - SIZES.T) * SIZES[pos[1]];
}

/** @param {number} batch @returns {Claim[]} */
function claimsOf(batch) {
  const wrong = allChoices().filter((choice) => !isRight(choice));
  const silent = wrong.filter((choice) => !errorOf(choice, BATCHES[batch]));
  const always = silent.filter((choice) => BATCHES.every((ids) => !errorOf(choice, ids)));
  const { V, D, T } = GPT2;
  const [tokens, places, unread, numbers] = [V, T, V - T, (V - T) * D].map((each) => each.toLocaleString("en"));
  return [
    ["If the code runs, the sizes are right.", silent.length === 0, `Of ${wrong.length} wrong choices, `
      + `${silent.length} run on this batch; ${always.length} of them run on all five.`],
    ["It is a detail which table has V rows and which T.", false,
      `Exchanged, all IDs from T on raise an error. In GPT-2 (V = ${tokens}, T = ${places}, D = ${D}) `
      + `those are ${unread} of its tokens, and as many rows of the position table are never read: ${unread} · ${D} = `
      + `${numbers} numbers.`],
    ["The number of parameters shows the mistake.", false,
      `Exchanged, V · D + T · D = T · D + V · D: ${SIZES.V * SIZES.D + SIZES.T * SIZES.D} here in both cases.`],
    ["A table may have more rows than V.", true, "It works: the rows above V − 1 are never read. Tables are often "
      + "padded to a multiple of 64 or 128, for speed."],
  ];
}
