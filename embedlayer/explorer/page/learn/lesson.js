/** The exercises of the lesson (seed 001) by their names, each with the scene in which it can be done. */

import { h } from "../dom.js";
import { changed, formatHash } from "../state.js";
import { SCENES } from "./scenes.js";

/** @import { ViewContext } from "../types" */
/**
 * @typedef {object} Exercise
 * @property {string} name as in the lesson
 * @property {string} scene
 * @property {Record<string, string>} [settings] of the scene, as the lesson sets them; with at least one, those that
 *   the reader left in the scene are not restored
 * @property {string} [claim] start of what the lesson says; the scene computes whether it is so
 * @property {boolean | null} [holds] whether it is so with these settings; null: it depends
 */

/** @type {[part: string, exercises: Exercise[]][]} */
export const LESSON = [
  ["Introduction", [
    { name: "Memory table: GPT-2 small, LLaMA 7B and 70B", scene: "memory",
      settings: { vocab: "50257", dim: "768", tied: "1" }, claim: "Embeddings are often the largest", holds: null },
    { name: "Intuition: Distance(cat, dog) < Distance(cat, code)", scene: "training", settings: { step: "20" },
      claim: "Distance(cat, dog)", holds: true },
    { name: "Try This, Embedding Architecture: step through the pipeline", scene: "sum", settings: { step: "1" } },
  ]],
  ["Lookup and gradient", [
    { name: "One-hot lookup, nn.Embedding: token 3", scene: "onehot", settings: { id: "3" },
      claim: "Only one row of W", holds: true },
    { name: "Gradient flow: tokens 3, 7, 1", scene: "gradient", settings: { ids: "3.7.1" },
      claim: "Only the selected rows", holds: true },
    { name: "Sparse updates", scene: "gradient", settings: { ids: "3.7.1" }, claim: "Each batch", holds: null },
    { name: "Padding token handling", scene: "gradient", settings: { ids: "0.5.0" }, claim: "The padding row",
      holds: true },
  ]],
  ["Positions", [
    { name: "Attention is permutation-invariant: [1, 5, 7] and [7, 1, 5]", scene: "order",
      settings: { order: "2.0.1" }, claim: "Attention is permutation-invariant", holds: false },
    { name: "Try This, Same Token: same position (0 and 0)", scene: "twice", settings: { a: "0", b: "0" },
      claim: "Same position", holds: true },
    { name: "Try This, Same Token: adjacent positions (0 and 1)", scene: "twice", settings: { a: "0", b: "1" },
      claim: "Positions 0 and 1 are very similar", holds: true },
    { name: "Try This, Same Token: distant positions (0 and 5)", scene: "twice", settings: { a: "0", b: "5" },
      claim: "Positions 0 and 5", holds: true },
    { name: "PE(pos+k) is a linear function of PE(pos)", scene: "waves", settings: { a: "0", b: "1" },
      claim: "PE(pos+k)", holds: true },
    { name: "Similarity matrix: positions 5 and 6, 5 and 15", scene: "waves", settings: { a: "5", b: "15" },
      claim: "Nearby positions", holds: null },
    { name: "Combined embedding: token, position, sum; scaling by √D", scene: "sum", settings: { step: "6" },
      claim: "Scaling by √D", holds: false },
  ]],
  ["Similarity", [
    { name: "Embedding Similarity: numbers and letters", scene: "similar", settings: { noise: "0.1" },
      claim: "Numbers are similar", holds: true },
    { name: "2D Visualization with PCA", scene: "similar", settings: { noise: "0.1" },
      claim: "Similar tokens cluster", holds: true },
    { name: "The same in a trained table", scene: "real" },
  ]],
  ["Try This, Interactive Exploration", [
    { name: "1 Frequency gradient", scene: "waves", settings: { a: "0", b: "1" }, claim: "Low dimensions",
      holds: true },
    { name: "2 Adjacent positions (0 and 1): ≈ 0.99", scene: "waves", settings: { a: "0", b: "1" },
      claim: "Positions 0 and 1", holds: false },
    { name: "3 Distant positions (0 and 32)", scene: "waves", settings: { a: "0", b: "32" },
      claim: "Positions 0 and 32", holds: true },
    { name: "4 Unique fingerprints", scene: "waves", settings: { a: "10", b: "11" },
      claim: "Each position has a unique", holds: true },
    { name: "5 Sin/Cos pairs", scene: "waves", settings: { a: "10", b: "11" }, claim: "Sine and cosine",
      holds: true },
  ]],
  ["Exercises", [
    { name: "Exercise 1: Learned vs Sinusoidal", scene: "learned", settings: { length: "20" },
      claim: "Learned embeddings start random", holds: true },
    { name: "Exercise 1: extrapolation", scene: "learned", settings: { length: "60" },
      claim: "Sinusoidal embeddings can", holds: null },
    { name: "Exercise 1: learned ones are often slightly better", scene: "learned", settings: { length: "20" },
      claim: "Learned ones are often", holds: null },
    { name: "RoPE and ALiBi extrapolate to longer texts", scene: "learned", settings: { length: "60" },
      claim: "RoPE and ALiBi", holds: null },
    { name: "Exercise 2: Effect of Embedding Dimension", scene: "width", settings: { std: "1" },
      claim: "The scale factor √D", holds: false },
    { name: "Exercise 3: Memory Usage", scene: "memory", settings: { vocab: "1000", dim: "64", tied: "1" },
      claim: "A larger vocabulary", holds: null },
    { name: "Exercise 3: weight tying", scene: "memory", settings: { vocab: "1000", dim: "256", tied: "1" },
      claim: "Weight tying halves", holds: true },
    { name: "Exercise 3: GPT-2, LLaMA and most models tie", scene: "memory",
      settings: { vocab: "32000", dim: "4096", tied: "1" }, claim: "GPT-2, LLaMA", holds: false },
  ]],
  ["Common Pitfalls", [
    { name: "Forgetting the sqrt scale", scene: "width", settings: { std: "0.02" }, claim: "Without the factor",
      holds: null },
    { name: "Exceeding max_seq_len", scene: "learned", settings: { length: "51" },
      claim: "Learned embeddings cannot", holds: true },
    { name: "Ignoring padding", scene: "gradient", settings: { ids: "0.5.0" }, claim: "The padding row", holds: true },
    { name: "Poor initialization", scene: "width", settings: { std: "1" }, claim: "Large initial values",
      holds: null },
  ]],
];

/** @param {boolean | null} holds */
function verdictOf(holds) {
  return h("small", { class: holds === null ? "learn-depends" : holds ? "learn-holds" : "learn-fails" },
    holds === null ? "it depends" : holds ? "holds" : "not so");
}

/** Return the part of a URL that shows an exercise. @param {Exercise} exercise @param {number} source */
export function hashOf({ scene, settings = {} }, source) {
  const own = Object.fromEntries(Object.entries(settings).map(([key, value]) => [`${scene}.${key}`, value]));
  return formatHash("learn", changed(own, { s: scene, source: source || null }));
}

/**
 * Create the list of the lesson's exercises, closed at first.
 * @param {ViewContext} context
 * @param {() => void} onReset
 * @param {(claim: string) => void} onOpen called with what the lesson says in the exercise that is opened
 */
export function lessonIndex({ source }, onReset, onOpen) {
  const element = h("details", { class: "learn-index" },
    h("summary", null, "Find an exercise of the lesson"),
    h("p", { class: "note" }, "The lesson is “Module 04: Embeddings”. Each link opens the scene with the "
      + "lesson's settings. Beside it: whether what the lesson says holds there."),
    h("div", { class: "learn-lesson" }, LESSON.map(([part, exercises]) => h("section", null, h("h3", null, part),
      h("ul", null, exercises.map((exercise) => h("li", null, linkTo(exercise, source))))))),
    h("p", null, resetButton(onReset)));
  element.addEventListener("click", (event) => {
    const link = /** @type {HTMLElement} */ (event.target).closest("a");
    if (!link) return;
    element.open = false;
    onOpen(link.dataset.claim ?? "");
  });
  return element;
}

/** Create the button that calls `onReset` at the second click. @param {() => void} onReset */
function resetButton(onReset) {
  const text = "Reset all tasks and settings";
  const button = h("button", { type: "button", onClick: () => {
    const isSure = button.textContent !== text;
    button.textContent = isSure ? text : "Click again to reset all";
    if (isSure) onReset();
  } }, text);
  button.addEventListener("blur", () => (button.textContent = text));
  return button;
}

/** @param {Exercise} exercise @param {number} source */
function linkTo(exercise, source) {
  const number = SCENES.findIndex(({ id }) => id === exercise.scene) + 1;
  return h("a", { href: hashOf(exercise, source), "data-claim": exercise.claim ?? null },
    h("span", null, exercise.name),
    exercise.holds === undefined ? null : verdictOf(exercise.holds),
    h("small", null, `scene ${number}, ${SCENES[number - 1].name}`));
}
