/** A table of a dozen words in two dimensions that learns: skip-gram with a full softmax, and plain SGD. */

import { distance, dot, row } from "../math.js";
import { normalMatrix, shuffled } from "./random.js";

/** @import { Matrix } from "../types" */
/** @typedef {[center: number, context: number]} Pair */

/**
 * @typedef {object} Model
 * @property {Matrix} table input embeddings E (V, D)
 * @property {Matrix} head output rows U (V, D); the same object as `table` if the head is tied
 *
 * @typedef {object} Gradients
 * @property {number} loss mean cross-entropy in nats
 * @property {Matrix} table dL/dE
 * @property {Matrix} head dL/dU; the same object as `table` if the head is tied
 */

export const WORDS = [
  "the", "my", "cat", "dog", "bird", "eats", "sleeps", "plays", "code", "program", "compiles", "crashes",
];

/** @type {[string[], string[]][]} nouns, and the verbs that follow each of them */
const CLAUSES = [
  [["cat", "dog"], ["eats", "sleeps", "plays"]], [["bird"], ["eats", "sleeps"]],
  [["code", "program"], ["compiles", "crashes"]],
];

/** Sentences of three words: article, noun, verb. */
export const SENTENCES = ["the", "my"].flatMap((article) => CLAUSES.flatMap(([nouns, verbs]) =>
  nouns.flatMap((noun) => verbs.map((verb) => `${article} ${noun} ${verb}`))));

export const DIM = 2;
const START_STD = 0.5;

/** Return a model with random numbers. @param {boolean} tied @param {number} seed @returns {Model} */
export function newModel(tied, seed) {
  const table = normalMatrix(WORDS.length, DIM, START_STD, seed);
  return { table, head: tied ? table : normalMatrix(WORDS.length, DIM, START_STD, seed + 1) };
}

/** Return the pairs of neighbouring words of a sentence, in both directions. @param {string} sentence */
export function pairsOf(sentence) {
  const ids = sentence.split(" ").map((word) => WORDS.indexOf(word));
  /** @type {Pair[]} */
  const pairs = [];
  for (let i = 0; i + 1 < ids.length; i++) pairs.push([ids[i], ids[i + 1]], [ids[i + 1], ids[i]]);
  return pairs;
}

/** Return the probabilities of a softmax. @param {number[]} logits */
export function softmax(logits) {
  const most = Math.max(...logits);
  const powers = logits.map((logit) => Math.exp(logit - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}

/**
 * Return the loss and its gradients: L = mean over pairs (i, j) of -log softmax(E[i] · Uᵀ)[j].
 * @param {Model} model
 * @param {Pair[]} pairs
 * @returns {Gradients}
 */
export function gradients({ table, head }, pairs) {
  const zeros = () => ({ ...table, data: new Float64Array(table.data.length) });
  const toTable = zeros();
  const toHead = head === table ? toTable : zeros();
  let loss = 0;
  for (const [center, context] of pairs) {
    const input = row(table, center);
    const chances = softmax(Array.from({ length: head.rows }, (_, v) => dot(input, row(head, v))));
    loss -= Math.log(chances[context]) / pairs.length;
    for (let v = 0; v < head.rows; v++) {
      const error = (chances[v] - Number(v === context)) / pairs.length;
      for (let d = 0; d < table.cols; d++) {
        toTable.data[center * table.cols + d] += error * head.data[v * table.cols + d];
        toHead.data[v * table.cols + d] += error * input[d];
      }
    }
  }
  return { loss, table: toTable, head: toHead };
}

/**
 * Take one step of SGD in place: E -= rate · dL/dE, and U likewise.
 * @param {Model} model
 * @param {Gradients} found
 * @param {number} rate learning rate
 */
export function descend(model, found, rate) {
  const parts = model.head === model.table ? ["table"] : ["table", "head"];
  for (const part of /** @type {("table" | "head")[]} */ (parts)) {
    for (let i = 0; i < model[part].data.length; i++) model[part].data[i] -= rate * found[part].data[i];
  }
}

/** Return the sentence of a step: each pass over all sentences has an order of its own. @param {number} step */
export function sentenceAt(step) {
  const pass = Math.floor(step / SENTENCES.length);
  return SENTENCES[shuffled(SENTENCES.length, 1000 + pass)[step % SENTENCES.length]];
}

/** Return the mean loss over all pairs of all sentences. @param {Model} model */
export function fullLoss(model) {
  return gradients(model, SENTENCES.flatMap(pairsOf)).loss;
}

/** Return the row nearest to a row by Euclidean distance. @param {Matrix} table @param {number} id */
export function nearestRow(table, id) {
  let best = -1;
  let least = Infinity;
  for (let other = 0; other < table.rows; other++) {
    const apart = distance(row(table, id), row(table, other));
    if (other !== id && apart < least) [best, least] = [other, apart];
  }
  return best;
}
