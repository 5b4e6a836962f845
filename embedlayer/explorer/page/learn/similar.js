/** Scene: similarity of vectors as a heat map, and the same vectors in two dimensions. */

import { HeatMap } from "../charts/heat.js";
import { h, slider } from "../dom.js";
import { fromRows, largestDifference, rotatePairs, row, similarities } from "../math.js";
import { claimList, fixed } from "./parts.js";
import { principal } from "./pca.js";
import { plane } from "./plane.js";
import { normalMatrix } from "./random.js";

/** @import { Child, Matrix } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */

const [DIM, EACH] = [16, 5];
const NAMES = ["N0", "N1", "N2", "N3", "N4", "L0", "L1", "L2", "L3", "L4"];

/** @type {Scene} */
export const scene = {
  id: "similar",
  name: "Similarity and PCA",
  question: "How do you see that vectors are similar?",
  sentences: [
    "Ten vectors of 16 numbers: five “numbers” N around one random point, five “letters” L around another one, plus "
    + "noise. The heat map shows the cosine of each pair.",
    "PCA draws the same ten vectors in two dimensions, those in which they differ most. Nothing was trained here: the "
    + "groups were made by hand.",
  ],
  task: "Raise the noise until some N is nearer to an L than to one of its own group.",
  draw,
};

/** Return five vectors around one random point and five around another. @param {number} noise @param {number} seed */
export function groups(noise, seed) {
  const bases = normalMatrix(2, DIM, 1, seed);
  const extra = normalMatrix(NAMES.length, DIM, 1, seed + 500);
  return fromRows(NAMES.map((_, i) =>
    row(bases, Math.floor(i / EACH)).map((value, d) => value + noise * extra.data[i * DIM + d])));
}

/**
 * Return the smallest cosine inside the groups and the largest between them, and the N that is nearer to an L than to
 * another N, or -1.
 * @param {Matrix} cosines
 */
export function separation({ data, cols }) {
  let [inside, between, mixed] = [Infinity, -Infinity, -1];
  for (let i = 0; i < cols; i++) {
    let [own, other] = [Infinity, -Infinity];
    for (let j = 0; j < cols; j++) {
      const isOwn = Math.floor(i / EACH) === Math.floor(j / EACH);
      if (isOwn && i !== j) own = Math.min(own, data[i * cols + j]);
      if (!isOwn) other = Math.max(other, data[i * cols + j]);
    }
    [inside, between] = [Math.min(inside, own), Math.max(between, other)];
    if (i < EACH && other > own && mixed < 0) mixed = i;
  }
  return { inside, between, mixed };
}

/**
 * Return how many points have their nearest point in their own group.
 * @param {Matrix} coordinates of two columns
 */
export function nearOwn({ data, rows }) {
  return NAMES.filter((_, i) => {
    const distances = Array.from({ length: rows }, (__, j) =>
      (i === j ? Infinity : Math.hypot(data[2 * i] - data[2 * j], data[2 * i + 1] - data[2 * j + 1])));
    return Math.floor(distances.indexOf(Math.min(...distances)) / EACH) === Math.floor(i / EACH);
  }).length;
}

/** @param {Stage} stage */
function draw(stage) {
  let noise = stage.number("noise", 0.1, 0, 2);
  let seed = Math.round(stage.number("seed", 3, 1, 99));
  const heat = new HeatMap({
    label: "Cosines", unit: "cosine", square: true, rowName: (r) => NAMES[r],
    columnName: (c) => NAMES[c],
  });
  const names = h("p", { class: "learn-ticks", "aria-hidden": "true" }, NAMES.map((name) => h("span", null, name)));
  const picture = plane({ label: "PCA of the ten vectors", aspect: 1 });
  const claims = claimList(stage);
  const update = () => {
    stage.set({ noise: noise === 0.1 ? null : noise, seed: seed === 3 ? null : seed });
    const vectors = groups(noise, seed);
    const cosines = similarities(vectors);
    heat.show(cosines, { limit: 1 });
    const { coordinates, explained } = principal(vectors, 2);
    picture.show(planeOf(coordinates, explained));
    const found = separation(cosines);
    claims.show([...claimsOf(found, explained, nearOwn(coordinates)), dimensionClaim(vectors)]);
    stage.judge(...verdict(found));
  };
  /** @param {number} nextNoise @param {number} nextSeed */
  const change = (nextNoise, nextSeed) => {
    [noise, seed] = [nextNoise, nextSeed];
    update();
  };
  const level = slider({
    label: "Noise", min: 0, max: 2, step: 0.05, value: noise, format: (value) => fixed(value, 2),
    onInput: (value) => change(value, seed),
  });
  const again = h("button", { type: "button", onClick: () => change(noise, (seed % 99) + 1) }, "New vectors");
  update();
  return [
    h("div", { class: "toolbar learn-wide" }, level, again),
    h("div", { class: "learn-pair learn-squares learn-close" },
      h("div", null, h("h3", null, "Cosine of each pair"), names, stage.keep(heat)),
      h("div", null, h("h3", null, "The same vectors in 2-D (PCA)"), stage.keep(picture))),
    claims.element,
  ];
}

/** @param {{inside: number, between: number, mixed: number}} found @returns {[boolean, ...Child[]]} */
function verdict({ inside, between, mixed }) {
  return [mixed >= 0, mixed >= 0
    ? `${NAMES[mixed]} has a letter nearer than one of its own group: the groups overlap.`
    : `The cosine inside a group is at least ${fixed(inside, 2)}, between groups at most ${fixed(between, 2)}.`];
}

/** @param {Matrix} coordinates @param {number[]} explained */
function planeOf(coordinates, explained) {
  const reach = 1.25 * Math.max(...coordinates.data.map(Math.abs));
  const percent = explained.map((share) => `${(100 * share).toFixed(1)} %`);
  const points = NAMES.map((name, i) => ({
    name, x: coordinates.data[2 * i], y: coordinates.data[2 * i + 1], colour: i < EACH ? 0 : 1,
  }));
  return { points, reach, axes: /** @type {[string, string]} */ ([`PC1 ${percent[0]}`, `PC2 ${percent[1]}`]) };
}

/**
 * @param {{inside: number, between: number}} found
 * @param {number[]} explained
 * @param {number} own points with their nearest point in their own group
 * @returns {Claim[]}
 */
function claimsOf({ inside, between }, explained, own) {
  return [
    ["Numbers are similar to each other, letters are similar to each other, numbers and letters are different.",
      inside > between, `Inside at least ${fixed(inside, 2)}, between at most ${fixed(between, 2)}. “Different” means `
      + "a cosine near 0, not −1: two random directions are almost at a right angle."],
    ["Similar tokens cluster together in 2-D.", own === NAMES.length,
      `In the picture ${own} of ${NAMES.length} points have their nearest point in their own group. `
      + `PC1 and PC2 show ${(100 * (explained[0] + explained[1])).toFixed(0)} % of the variance. The rest is not in `
      + "the picture, so check neighbours with cosines."],
  ];
}

/** Rotate all vectors by the same angles, 45° in each pair of dimensions. @param {Matrix} vectors */
export function rotated(vectors) {
  const pairs = Array.from({ length: vectors.cols / 2 }, (_, i) =>
    /** @type {[number, number]} */ ([2 * i, 2 * i + 1]));
  const numbers = [...pairs.flatMap(() => [Math.SQRT1_2, Math.SQRT1_2]), 1];
  return fromRows(Array.from({ length: vectors.rows }, (_, r) => rotatePairs(row(vectors, r), numbers, pairs)));
}

/** @param {Matrix} vectors @returns {Claim} */
function dimensionClaim(vectors) {
  const other = rotated(vectors);
  const changed = other.data.filter((value, i) => value !== vectors.data[i]).length;
  const most = largestDifference(similarities(other), similarities(vectors));
  return ["Each dimension encodes some abstract feature the model has learned.", null,
    `Rotate all vectors by the same angle: ${changed} of ${other.data.length} numbers change, and `
    + `${most < 1e-9 ? "no cosine does" : "cosines do, too"}. What counts are directions; one dimension is a part of `
    + "many of them (it is polysemantic)."];
}
