/** Principal components of a few short vectors, computed exactly. */

import { dot, fromRows, matrix, row } from "../math.js";

/** @import { Matrix } from "../types" */

const SWEEPS = 60;

/**
 * Return the rows along their first principal components, and the share of the variance of each component.
 * @param {Matrix} rows
 * @param {number} count
 * @returns {{coordinates: Matrix, explained: number[]}}
 */
export function principal(rows, count) {
  const centred = centre(rows);
  const covariance = matrix(rows.cols, rows.cols, (i, j) => {
    let sum = 0;
    for (let r = 0; r < rows.rows; r++) sum += centred.data[r * rows.cols + i] * centred.data[r * rows.cols + j];
    return sum;
  });
  const { values, vectors } = eigen(covariance);
  const order = [...values.keys()].sort((a, b) => values[b] - values[a]).slice(0, count);
  const total = values.reduce((sum, value) => sum + value, 0) || 1;
  return {
    coordinates: matrix(rows.rows, order.length, (r, c) => dot(row(centred, r), vectors[order[c]])),
    explained: order.map((i) => values[i] / total),
  };
}

/** Subtract the mean of each column. @param {Matrix} rows */
function centre(rows) {
  const means = Array.from({ length: rows.cols }, (_, c) => {
    let sum = 0;
    for (let r = 0; r < rows.rows; r++) sum += rows.data[r * rows.cols + c];
    return sum / rows.rows;
  });
  return fromRows(Array.from({ length: rows.rows }, (_, r) => row(rows, r).map((value, c) => value - means[c])));
}

/**
 * Return the eigenvalues and eigenvectors of a symmetric matrix (cyclic Jacobi rotations).
 * @param {Matrix} symmetric
 */
function eigen(symmetric) {
  const size = symmetric.rows;
  const a = Array.from({ length: size }, (_, i) => Float64Array.from(row(symmetric, i)));
  const unit = matrix(size, size, (i, j) => Number(i === j));
  const vectors = Array.from({ length: size }, (_, i) => Float64Array.from(row(unit, i)));
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    let rest = 0;
    for (let p = 0; p < size; p++) {
      for (let q = p + 1; q < size; q++) {
        rest += a[p][q] ** 2;
        if (a[p][q]) turn(a, vectors, p, q);
      }
    }
    if (rest < 1e-24) break;
  }
  return { values: a.map((line, i) => line[i]), vectors };
}

/**
 * Make entry (p, q) zero by a rotation of rows and columns p and q; rotate the eigenvectors with them.
 * @param {Float64Array[]} a
 * @param {Float64Array[]} vectors
 * @param {number} p
 * @param {number} q
 */
function turn(a, vectors, p, q) {
  const angle = 0.5 * Math.atan2(2 * a[p][q], a[p][p] - a[q][q]);
  const [cos, sin] = [Math.cos(angle), Math.sin(angle)];
  for (const line of a) [line[p], line[q]] = [cos * line[p] + sin * line[q], cos * line[q] - sin * line[p]];
  for (const lines of [a, vectors]) {
    const [first, second] = [lines[p], lines[q]];
    lines[p] = first.map((value, i) => cos * value + sin * second[i]);
    lines[q] = second.map((value, i) => cos * value - sin * first[i]);
  }
}
