/** The chain of a pipeline: which vectors lead from the row of a token to the input of the first block. */

import { limitOf, shown, trimmed } from "../charts/numbers.js";
import { row, unpackMatrix } from "../math.js";
import { factsOf } from "./facts.js";

/** @import { Matrix, Pipeline, PipelineStep } from "../types" */
/** @typedef {import("../math.js").Vector} Vector */

/**
 * One vector of the chain.
 * @typedef {object} Link
 * @property {string} step name of the step that computes it
 * @property {string} sign what is done with it: "", "+" or "="
 * @property {string} name formula
 * @property {string} about what it is, in words
 * @property {Vector} numbers
 * @property {number} limit absolute value at which colours end
 * @property {number} space number of the space its dimensions belong to: a projection begins another one
 * @property {(dimension: number) => string} sum the arithmetic of one dimension
 */

/** Return the vectors of one token in order. @param {Pipeline} pipeline @param {number} token @returns {Link[]} */
export function chainOf(pipeline, token) {
  /** @type {Link[]} */
  const links = [];
  for (const step of pipeline.steps) {
    if (step.idle) continue;
    const maker = MAKERS[step.name];
    if (maker) links.push(...maker(step, pipeline, token, links));
  }
  const hasScale = links.some((link) => link.step === "scale");
  const shared = links.filter(({ step }) => !(step === "look_up" && hasScale) && !["norm", "project"].includes(step));
  const limit = Math.max(...shared.map((link) => link.limit));
  for (const link of shared) link.limit = limit; // equal colours mean equal numbers in all that is added
  return links;
}

/**
 * Makers of the links of each step.
 * @type {Record<string, (step: PipelineStep, pipeline: Pipeline, token: number, before: Link[]) => Link[]>}
 */
const MAKERS = {
  look_up: (step, { tokens }, token) => {
    const rows = unpackMatrix(step.values.rows);
    const { id, text } = tokens[token];
    const numbers = row(rows, token);
    return [{
      step: "look_up", sign: "", name: `W[${id}]`, about: `row of “${text}”`, numbers, limit: limitOf(rows), space: 0,
      sum: (d) => `W[${id}] = ${shown(numbers[d])}`,
    }];
  },
  scale: (step, _, token, before) => {
    const { factor } = factsOf(step, "scale");
    const about = step.note.includes("√D") ? `times √D = ${trimmed(factor)}` : `times ${trimmed(factor)}`;
    return [next(step, "scaled", token, before, {
      name: `${trimmed(factor)} · row`, about,
      sum: (was, is) => `${trimmed(factor)} · ${inSum(was)} = ${shown(is)}`,
    })];
  },
  types: (step, _, token, before) => added(step, token, before, {
    values: "types", name: "type[0]", about: "vector of segment 0",
  }),
  position: (step, _, token, before) => {
    const places = unpackMatrix(step.values.positions);
    const numbers = row(places, token);
    return [{
      step: "position", sign: "+", name: `p[${token}]`, about: `vector of position ${token}`, numbers,
      limit: limitOf(places), space: before.at(-1)?.space ?? 0, sum: () => "",
    }];
  },
  sum: (step, _, token, before) => {
    const place = /** @type {Link} */ (before.at(-1)).numbers;
    return [next(step, "result", token, before.slice(0, -1), {
      name: `x[${token}]`, about: "the sum",
      sum: (was, is, d) => `${inSum(was, true)} + ${inSum(place[d])} = ${shown(is)}`,
    })];
  },
  norm: (step, _, token, before) => [next(step, "result", token, before, {
    name: "norm(x)", about: "to mean 0, variance 1",
    sum: (was, is) => `normalised: ${shown(was)} → ${shown(is)}`,
  })],
  project: (step, _, token, before) => [next(step, "result", token, before, {
    name: "x · P", about: step.note, isProjected: true, sum: (_was, is) => `(x · P) = ${shown(is)}`,
  })],
};
for (const name of ["mask", "token_dropout", "injections", "codes"]) {
  MAKERS[name] = (step, _, token, before) => [next(step, "result", token, before, {
    name: step.title, about: step.formula, sum: (was, is) => `${shown(was)} → ${shown(is)}`,
  })];
}

/**
 * Create the link of a step's result.
 * @param {PipelineStep} step
 * @param {string} value
 * @param {number} token
 * @param {Link[]} before
 * @param {{name: string, about: string, isProjected?: boolean,
 *   sum: (was: number, is: number, dimension: number) => string}} options
 * @returns {Link}
 */
function next(step, value, token, before, { name, about, isProjected = false, sum }) {
  const all = unpackMatrix(step.values[value]);
  const numbers = row(all, token);
  const last = before.at(-1);
  return {
    step: step.name, sign: "=", name, about, numbers, limit: limitOf(all),
    space: (last?.space ?? 0) + Number(isProjected),
    sum: (d) => sum(last?.numbers[d] ?? NaN, numbers[d], d),
  };
}

/**
 * Create the links of a vector that is added, and of the sum.
 * @param {PipelineStep} step
 * @param {number} token
 * @param {Link[]} before
 * @param {{values: string, name: string, about: string}} options
 * @returns {Link[]}
 */
function added(step, token, before, { values, name, about }) {
  const all = unpackMatrix(step.values[values]);
  const numbers = row(all, token);
  const space = before.at(-1)?.space ?? 0;
  return [
    { step: step.name, sign: "+", name, about, numbers, limit: limitOf(all), space, sum: () => "" },
    next(step, "result", token, before, {
      name: "x", about: "the sum so far",
      sum: (was, is, d) => `${inSum(was, true)} + ${inSum(numbers[d])} = ${shown(is)}`,
    }),
  ];
}

/** Write a number inside a sum, in brackets if it is negative. @param {number} number @param {boolean} [isFirst] */
function inSum(number, isFirst = false) {
  return number < 0 && !isFirst ? `(${shown(number)})` : shown(number);
}
