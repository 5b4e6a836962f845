/** Scene: what a table costs, and what tying saves. */

import { h, scroller, select } from "../dom.js";
import { bar } from "../pipeline/pictures.js";
import { check, claimList, fixed } from "./parts.js";

/** @import { BpeTrace, Child, Tokenization } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */

/** @type {Record<string, number>} bytes of a number */
export const BYTES = { float32: 4, bfloat16: 2, int8: 1, int4: 0.5 };

/** @type {{name: string, vocab: number, dim: number, said: string, note: string}[]} */
export const TABLES = [
  { name: "GPT-2 small", vocab: 50257, dim: 768, said: "38.6M, 147 MB", note: "these are MiB" },
  { name: "LLaMA 7B", vocab: 32000, dim: 4096, said: "131M, 500 MB", note: "these are MiB" },
  { name: "LLaMA 70B", vocab: 32000, dim: 8192, said: "262M, 1 GB", note: "1,000 MiB or 1.05 GB" },
  { name: "Tiny", vocab: 1000, dim: 64, said: "0.2 MB", note: "these are MiB" },
  { name: "Small", vocab: 8000, dim: 256, said: "7.8 MB", note: "these are MiB" },
  { name: "Medium", vocab: 32000, dim: 512, said: "62.5 MB", note: "these are MiB" },
  { name: "“Large (GPT-2)”", vocab: 50000, dim: 768, said: "146.5 MB", note: "GPT-2 has 50,257 rows" },
  { name: "“Large (LLaMA)”", vocab: 100000, dim: 4096, said: "1562.5 MB", note: "no LLaMA has 100,000 rows" },
];
/** Split by the page's small tokenizer; an exported page holds its tokens. */
export const TEXT = "Every day the teacher played football with new people in the old city.";
export const VOCABULARIES = [256, 400, 700, 1200];
const START = { vocab: 32000, dim: 4096, dtype: "float32", tied: false };
const [WANTED, MIB] = [250, 1024 * 1024];
const [GPT2, RANK] = [50257, 128];
const SIZE = new Intl.NumberFormat("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 });

/** @type {Scene} */
export const scene = {
  id: "memory",
  name: "Memory and tying",
  question: "What does a table cost?",
  sentences: [
    "A table of V rows and D columns has V · D numbers. An untied model has a second such table in its output head; a "
    + "tied one uses the same table twice.",
    "1 MB is 1,000,000 bytes, 1 MiB is 1,048,576. The two differ by 5 %, and by 7 % for GB and GiB.",
  ],
  words: ["float32"],
  task: `Bring a model with V = 32,000 and D = 4,096 to ${WANTED} MiB.`,
  draw,
};

/**
 * Return the parameters and the bytes of input table and output head.
 * @param {{vocab: number, dim: number, dtype: string, tied: boolean}} model
 */
export function costOf({ vocab, dim, dtype, tied }) {
  const parameters = vocab * dim * (tied ? 1 : 2);
  return { parameters, bytes: parameters * BYTES[dtype] };
}

/**
 * Count the tokens of a text by the first merges of its tokenizer, those of a byte-level BPE of a smaller vocabulary.
 * @param {Tokenization} tokenization
 * @param {number} vocab
 */
export function tokensAt({ pieces }, vocab) {
  return pieces.reduce((count, { trace }) => {
    const { symbols, merges } = /** @type {BpeTrace} */ (trace);
    const after = merges.findIndex(({ rank }) => rank >= vocab - 256);
    return count + symbols.length - (after < 0 ? merges.length : after);
  }, 0);
}

/** @param {Stage} stage */
async function draw(stage) {
  const split = await stage.context.data.load("tokenization", { text: TEXT, tokenizer: "small" });
  const lines = VOCABULARIES.map((vocab) => ({ vocab, tokens: tokensAt(split, vocab) }));
  const dtype = stage.text("dtype", START.dtype);
  const model = {
    vocab: Math.round(stage.number("vocab", START.vocab, 1, 1e7)),
    dim: Math.round(stage.number("dim", START.dim, 1, 1e5)),
    dtype: Object.hasOwn(BYTES, dtype) ? dtype : START.dtype, tied: stage.text("tied") === "1",
  };
  const result = h("output", { class: "learn-cost", "data-value": "cost" });
  const body = h("tbody");
  const problem = h("p", { class: "note learn-problem", role: "status" });
  const update = () => {
    stage.set({
      vocab: model.vocab === START.vocab ? null : model.vocab, dim: model.dim === START.dim ? null : model.dim,
      dtype: model.dtype === START.dtype ? null : model.dtype, tied: model.tied ? "1" : null,
    });
    const { parameters, bytes } = costOf(model);
    result.replaceChildren(h("b", null, `${SIZE.format(bytes / MIB)} MiB`), ` = ${SIZE.format(bytes / 1e6)} MB, `
      + `${parameters.toLocaleString("en")} parameters: ${model.tied ? "one table" : "input table + output head"}`);
    body.replaceChildren(...TABLES.map((each) => lineOf(each, model.dtype)));
    byVocabulary.replaceChildren(...lines.map((line) => textLine(line, model.dim)));
    claims.show(claimsOf(model, lines));
    stage.judge(...verdict(model, bytes));
  };
  const controls = controlsOf(model, (said) => {
    problem.textContent = said;
    update();
  });
  const [claims, byVocabulary] = [claimList(stage), h("tbody")];
  update();
  return [controls, problem, result, memoryTable(body), ...textTable(byVocabulary), claims.element];
}

/** @param {HTMLElement} body */
function memoryTable(body) {
  const head = ["", "V", "D", "parameters", "MiB", "MB", "Module 04 (float32)"].map((text, i) =>
    h("th", { class: i === 6 ? "learn-said" : i ? "number" : null }, text));
  return scroller("Memory of the tables", "scroll",
    h("table", { class: "learn-table learn-tables" }, h("thead", null, h("tr", null, head)), body));
}

/** @param {HTMLElement} body */
function textTable(body) {
  const head = ["V", "tokens", "bytes per token", "", "V × D"].map((text) =>
    h("th", { class: text ? "number" : "learn-bars" }, text));
  return [h("p", { class: "learn-caption" }, `“${TEXT}” with a larger vocabulary: BPE with more merges`),
    scroller("Tokens by vocabulary", "scroll",
      h("table", { class: "learn-table" }, h("thead", null, h("tr", null, head)), body))];
}

/**
 * @param {{vocab: number, dim: number, dtype: string, tied: boolean}} model
 * @param {(problem: string) => void} update
 */
function controlsOf(model, update) {
  /** @param {string} label @param {"vocab" | "dim"} key @param {number} most */
  const field = (label, key, most) => {
    const input = h("input", {
      type: "number", min: 1, max: most, value: String(model[key]), onInput: () => {
        const isRight = input.value !== "" && input.checkValidity();
        input.setAttribute("aria-invalid", String(!isRight));
        if (isRight) model[key] = Number(input.value);
        update(isRight ? "" : `${label} must be a whole number from 1 to ${most.toLocaleString("en")}. The memory `
          + `below is that of ${model[key].toLocaleString("en")}.`);
      },
    });
    return h("label", { class: "field" }, h("span", null, label), input);
  };
  return h("div", { class: "learn-controls" }, field("Vocabulary V", "vocab", 1e7), field("Width D", "dim", 1e5),
    select({
      label: "Type of number", value: model.dtype,
      options: Object.entries(BYTES).map(([name, bytes]) =>
        [name, `${name}, ${bytes} ${bytes === 1 ? "byte" : "bytes"}`]),
      onChange: (value) => {
        model.dtype = value;
        update("");
      },
    }),
    check("tied to the output head", model.tied, (value) => {
      model.tied = value;
      update("");
    }));
}

/** @typedef {{vocab: number, tokens: number}} Line tokens of the text with a vocabulary */

/** @param {Line} line @param {number} dim */
function textLine({ vocab, tokens }, dim) {
  return h("tr", null, [named(vocab), named(tokens), fixed(TEXT.length / tokens, 2)].map((text) =>
    h("td", { class: "number" }, text)), h("td", { class: "learn-bars" }, bar(TEXT.length / tokens / 5)),
  h("td", { class: "number" }, named(vocab * dim)));
}

/** @param {typeof TABLES[number]} table @param {string} dtype */
function lineOf({ name, vocab, dim, said, note }, dtype) {
  const { parameters, bytes } = costOf({ vocab, dim, dtype, tied: true });
  const numbers = [vocab, dim, parameters].map((value) => value.toLocaleString("en"));
  const sizes = [bytes / MIB, bytes / 1e6].map((value) => SIZE.format(value));
  const shape = h("small", { class: "learn-narrow" }, `${numbers[0]} × ${numbers[1]}`);
  return h("tr", null, h("th", null, name, " ", shape),
    [...numbers, ...sizes].map((text) => h("td", { class: "number" }, text)),
    h("td", { class: "learn-said" }, said, h("small", null, ` ${note}`)));
}

/**
 * @param {{vocab: number, dim: number, dtype: string, tied: boolean}} model
 * @param {number} bytes
 * @returns {[boolean, ...Child[]]}
 */
function verdict(model, bytes) {
  const size = `${SIZE.format(bytes / MIB)} MiB.`;
  if (model.vocab !== START.vocab || model.dim !== START.dim) {
    return [false, `${size} Set V to 32,000 and D to 4,096.`];
  }
  if (bytes !== WANTED * MIB) return [false, `${size} Wanted: ${WANTED} MiB.`];
  return [true, model.tied ? `${size} Tying halves it, and two bytes a number halve it again.`
    : `${size} One byte a number is a quarter of four.`];
}

/** @param {number} count */
function named(count) {
  return count.toLocaleString("en");
}

/** @param {number} vocab @param {number} dim */
function mebibytes(vocab, dim) {
  return SIZE.format(costOf({ vocab, dim, dtype: "float32", tied: true }).bytes / MIB);
}

/** @param {{vocab: number, dim: number}} model @returns {Claim} */
function factorisedClaim({ vocab, dim }) {
  const [dense, factorised] = [vocab * dim, vocab * RANK + RANK * dim];
  return ["Factorised embeddings E = E1 · E2 have fewer parameters.", factorised < dense, `With the rank r = ${RANK} `
    + `of ALBERT, (V, r) and (r, D) = (${named(vocab)}, ${RANK}) and (${RANK}, ${named(dim)}): ${named(factorised)} `
    + `parameters; E (${named(vocab)}, ${named(dim)}) has ${named(dense)}.`];
}

/** @param {{vocab: number, dim: number}} model @param {Line[]} lines @returns {Claim[]} */
function claimsOf(model, lines) {
  const ofLesson = costOf({ vocab: 50257, dim: 256, dtype: "float32", tied: true }).parameters;
  const { parameters: untied } = costOf({ vocab: 1000, dim: 256, dtype: "float32", tied: false });
  return [
    ["This matrix [50,257, 256] contains 12,865,792 learnable parameters.", ofLesson === 12865792,
      `V · D = 50,257 · 256 = ${ofLesson.toLocaleString("en")}. A table of 4 positions adds 4 · 256 = 1,024: together `
      + `${(ofLesson + 4 * 256).toLocaleString("en")}.`],
    ["Weight tying halves the embedding parameter count.", true, `V = 1,000, D = 256: ${untied.toLocaleString("en")} `
      + `parameters untied, ${(untied / 2).toLocaleString("en")} tied.`],
    ["GPT-2, LLaMA and most modern models tie their weights.", false,
      "GPT-2 does. LLaMA 7B and 70B do not; Llama 3.2 1B and 3B do. Small models tie, large ones mostly do not."],
    ["Tying improves regularisation.", null, "Two blocks on a short text, learned by heart: training loss 2.15 tied "
      + "and 1.27 untied; on held-out text 7.05 and 7.20 at the end. The lowest losses there, 6.83 tied and 6.86 "
      + "untied, differ by less than two seeds do. (examples/width_and_tying.py)"],
    ["Training with tied weights became unstable.", null, "From rows of std 1, the start of nn.Embedding: first loss "
      + "187.87, and 6.669 on held-out text after 300 steps. From std 0.02: 8.36, then 4.715, and 4.745 untied. "
      + "(examples/tied_or_untied.py)"],
    ["A larger vocabulary means each token carries more information, but the table grows proportionally.", true,
      `The text above has ${lines.map(({ vocab, tokens }) => `${fixed(TEXT.length / tokens, 2)} bytes per token with V `
        + `= ${named(vocab)}`).join(", ")}. Twice the rows are twice the memory, and save ever fewer tokens.`],
    factorisedClaim(model),
    ["Subwords reduce millions of words to tens of thousands of units.", null, `With D = ${named(model.dim)}: `
      + `${named(1e6)} words need ${mebibytes(1e6, model.dim)} MiB in float32, the ${named(GPT2)} subwords of GPT-2 `
      + `${mebibytes(GPT2, model.dim)} MiB. Rare words become several tokens, and none is unknown.`],
    ["Embeddings are often the largest single component.", null,
      `GPT-2 small: ${fixed(100 * 38597376 / 124439808, 0)} % of 124.4 million parameters. LLaMA 7B: `
      + `${fixed(100 * 131072000 / 6738415616, 1)} % of 6.74 billion for the input table.`],
  ];
}
