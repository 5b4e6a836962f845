/** Scene: a tiny table learns, step by step, from real gradients. */

import { Curves } from "../charts/curves.js";
import { h } from "../dom.js";
import { distance, row } from "../math.js";
import { tiles } from "../positions/scene.js";
import { check, claimList, fixed, playButton } from "./parts.js";
import { plane } from "./plane.js";
import {
  DIM, SENTENCES, WORDS, descend, fullLoss, gradients, nearestRow, newModel, pairsOf, sentenceAt,
} from "./trainer.js";

/** @import { Child, Point } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */
/** @import { Gradients, Model } from "./trainer.js" */

const [RATE, SEED, LAST_STEP, ASPECT] = [0.3, 1, 3000, 0.8];
const ARROW = 2.5; // an arrow is so many times as long as the step, to be seen
/** @type {Record<string, number>} */
const COLOURS = { the: 7, my: 7, cat: 1, dog: 1, bird: 1, code: 0, program: 0 };

/** @type {Scene} */
export const scene = {
  id: "training",
  name: "A table learns",
  question: "Where does the meaning come from?",
  sentences: [
    `Twelve words, two numbers each, all random. In each step the model reads one of ${SENTENCES.length} short `
    + "sentences and predicts the neighbours of each word. The gradient of that loss moves the rows (arrows).",
    "No sentence says that a cat is like a dog. But both eat, sleep and play, so their rows get similar gradients.",
  ],
  words: ["output head", "softmax", "nats"],
  task: "Train until cat and dog are each other's nearest neighbour.",
  draw,
};

/**
 * @typedef {object} Run
 * @property {Model} model
 * @property {number} step
 * @property {number[]} losses over all sentences, before each step
 * @property {Gradients} found gradients of the next step
 * @property {string} sentence of the next step
 * @property {number} reach how far the axes of the picture go
 */

/** Return a run after some steps. @param {boolean} tied @param {number} steps @returns {Run} */
export function runTo(tied, steps) {
  const model = newModel(tied, SEED);
  const run = { model, step: 0, losses: [fullLoss(model)], reach: 1.3, ...nextOf(model, 0) };
  for (let i = 0; i < steps; i++) advance(run);
  return run;
}

/** Return the sentence of a step and its gradients. @param {Model} model @param {number} step */
function nextOf(model, step) {
  const sentence = sentenceAt(step);
  return { sentence, found: gradients(model, pairsOf(sentence)) };
}

/** @param {Run} run */
function advance(run) {
  descend(run.model, run.found, RATE);
  run.step += 1;
  run.losses.push(fullLoss(run.model));
  const reaches = run.model.table.data.map((value, i) => Math.abs(value) * (i % DIM ? 1.2 / ASPECT : 1.3));
  run.reach = Math.max(run.reach, ...reaches);
  Object.assign(run, nextOf(run.model, run.step));
}

/** @param {Stage} stage */
function draw(stage) {
  let tied = stage.text("tied") === "1";
  let run = runTo(tied, Math.round(stage.number("step", 0, 0, LAST_STEP)));
  const pictures = picturesOf(stage);
  let stopped = verdict(run)[0]; // playing stops where the task is done for the first time
  const update = () => {
    if (!player.isPlaying()) save();
    pictures.show(run, tied);
    stage.judge(...verdict(run));
  };
  const save = () => stage.set({ step: run.step || null, tied: tied ? "1" : null });
  const walk = () => {
    if (run.step < LAST_STEP) advance(run);
    update();
  };
  const player = playButton(stage, () => {
    walk();
    const isFirst = !stopped && verdict(run)[0];
    stopped ||= isFirst;
    return run.step < LAST_STEP && !isFirst;
  }, { onPause: save });
  const step = button("Step", () => {
    player.pause();
    walk();
  });
  /** @param {boolean} isTied */
  const restart = (isTied) => {
    player.pause();
    tied = isTied;
    run = runTo(tied, 0);
    stopped = false;
    update();
  };
  const switches = [step, player.element, button("Reset", () => restart(tied)), check("tied head", tied, restart)];
  update();
  return [h("div", { class: "toolbar" }, switches), ...pictures.elements];
}

/** Create the plane, the loss curve and the numbers. @param {Stage} stage */
function picturesOf(stage) {
  const picture = plane({ label: "Rows of the table", aspect: ASPECT });
  const losses = new Curves({
    label: "Loss over the steps", axes: ["step", "loss, nats"], height: 170, legend: false,
  });
  const fact = h("p", { class: "pipe-fact", "data-value": "moved" });
  const distances = h("div");
  const claims = claimList(stage);
  const beside = h("div", null, stage.keep(losses), distances);
  return {
    elements: [fact, h("div", { class: "learn-training" }, stage.keep(picture), beside), claims.element],
    /** @param {Run} run @param {boolean} tied */
    show: (run, tied) => {
      picture.show({ points: pointsOf(run), reach: run.reach, axes: ["number 0", "number 1"] });
      losses.show([{ name: "loss", colour: 0, values: run.losses }], { range: [0, 3] });
      fact.replaceChildren(movedText(run, tied));
      distances.replaceChildren(distancesOf(run.model));
      claims.show(claimsOf(run, tied));
    },
  };
}

/** @param {string} text @param {() => void} onClick */
function button(text, onClick) {
  return h("button", { type: "button", onClick }, text);
}

/** Return whether a row has a gradient. @param {Gradients} found @param {number} id */
function isMoved(found, id) {
  return row(found.table, id).some((value) => value !== 0);
}

/** @param {Run} run */
function pointsOf({ model, found }) {
  return WORDS.map((name, id) => {
    const [x, y] = row(model.table, id);
    const [dx, dy] = row(found.table, id);
    const arrow = /** @type {Point} */ ([-ARROW * RATE * dx, -ARROW * RATE * dy]);
    const isUsed = isMoved(found, id);
    return { name, x, y, colour: COLOURS[name] ?? 2, faint: !isUsed, arrow: isUsed ? arrow : undefined };
  });
}

/** @param {Run} run @param {boolean} tied */
function movedText({ step, sentence, found, losses }, tied) {
  const moved = WORDS.filter((_, id) => isMoved(found, id));
  const which = tied
    ? `${moved.length} of 12 rows move, because the head is the same table and its softmax reads every row.`
    : `${moved.length} of 12 rows move: those of the sentence. The others get no gradient.`;
  return h("span", null, `Step ${step}, loss ${fixed(losses[losses.length - 1], 3)}. Next sentence: `,
    h("b", null, `“${sentence}”`), `. ${which}`);
}

/** @param {Model} model @param {string} a @param {string} b */
function apart({ table }, a, b) {
  return distance(row(table, WORDS.indexOf(a)), row(table, WORDS.indexOf(b)));
}

/** @param {Model} model */
function distancesOf(model) {
  return tiles([
    ["Distance(cat, dog)", fixed(apart(model, "cat", "dog"), 2), "near"],
    ["Distance(cat, code)", fixed(apart(model, "cat", "code"), 2), "far"],
  ]);
}

/** @param {Run} run @param {boolean} tied @returns {Claim[]} */
function claimsOf({ model, step, found }, tied) {
  const [[near, far], [nearAtStart, farAtStart]] = [model, newModel(tied, SEED)].map((each) =>
    [apart(each, "cat", "dog"), apart(each, "cat", "code")]);
  const isLearned = near < nearAtStart / 2;
  const moved = WORDS.filter((_, id) => isMoved(found, id)).length;
  return [
    ["Distance(cat, dog) < Distance(cat, code).", isLearned ? near < far : null, step
      ? `${isLearned ? "" : "Not yet learned: "}${fixed(near, 2)} and ${fixed(far, 2)} after ${step} `
        + `step${step === 1 ? "" : "s"} of training. The random start has ${fixed(nearAtStart, 2)} and `
        + `${fixed(farAtStart, 2)} by chance.`
      : "Before the first step the rows are random, so this is chance."],
    ["Each batch only updates a small subset of rows.", !tied, `${moved} of 12 rows in this step`
      + (tied ? ": the gradient of the tied output head is not sparse." : ". This is plain SGD and an untied head.")],
  ];
}

/** @param {Run} run @returns {[boolean, ...Child[]]} */
function verdict({ model: { table }, step }) {
  const [cat, dog] = [WORDS.indexOf("cat"), WORDS.indexOf("dog")];
  const [ofCat, ofDog] = [nearestRow(table, cat), nearestRow(table, dog)];
  if (step && ofCat === dog && ofDog === cat) {
    return [true, "Cat and dog are nearest neighbours, because they have the same contexts."];
  }
  return [false, `Nearest to cat: ${WORDS[ofCat]}. Nearest to dog: ${WORDS[ofDog]}.`];
}
