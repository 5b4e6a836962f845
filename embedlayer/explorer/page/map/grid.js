/** Finding points near a place: a grid over the data, each cell with its points. */

/** @typedef {{columns: number, left: number, bottom: number, cell: number, starts: Uint32Array, points: Uint32Array}} Grid */

const COLUMNS = 256;

/** @param {Float32Array} xs @param {Float32Array} ys @returns {Grid} */
export function makeGrid(xs, ys) {
  let left = Infinity;
  let right = -Infinity;
  let bottom = Infinity;
  let top = -Infinity;
  for (let i = 0; i < xs.length; i++) {
    if (xs[i] < left) left = xs[i];
    if (xs[i] > right) right = xs[i];
    if (ys[i] < bottom) bottom = ys[i];
    if (ys[i] > top) top = ys[i];
  }
  const cell = Math.max(right - left, top - bottom, 1e-9) / (COLUMNS - 1);
  const starts = new Uint32Array(COLUMNS * COLUMNS + 1);
  const cellOf = (i) => Math.floor((ys[i] - bottom) / cell) * COLUMNS + Math.floor((xs[i] - left) / cell);
  for (let i = 0; i < xs.length; i++) if (cellOf(i) >= 0) starts[cellOf(i) + 1]++;
  for (let i = 0; i < COLUMNS * COLUMNS; i++) starts[i + 1] += starts[i];
  const next = starts.slice();
  const points = new Uint32Array(starts[COLUMNS * COLUMNS]);
  for (let i = 0; i < xs.length; i++) if (cellOf(i) >= 0) points[next[cellOf(i)]++] = i;
  return { columns: COLUMNS, left, bottom, cell, starts, points };
}

/** Call `visit(i)` with each point of the cells that a rectangle touches. */
function visitBox(grid, x0, y0, x1, y1, visit) {
  const clamp = (value) => Math.min(Math.max(Math.floor(value), 0), grid.columns - 1);
  const first = clamp((x0 - grid.left) / grid.cell);
  const last = clamp((x1 - grid.left) / grid.cell);
  for (let row = clamp((y0 - grid.bottom) / grid.cell); row <= clamp((y1 - grid.bottom) / grid.cell); row++) {
    const from = grid.starts[row * grid.columns + first];
    const to = grid.starts[row * grid.columns + last + 1];
    for (let k = from; k < to; k++) visit(grid.points[k]);
  }
}

/** The point nearest to a place, at most `radius` away; -1 if there is none. @param {(i: number) => boolean} [counts] */
export function nearest(grid, xs, ys, x, y, radius, counts = () => true) {
  let best = -1;
  let least = radius * radius;
  visitBox(grid, x - radius, y - radius, x + radius, y + radius, (i) => {
    const distance = (xs[i] - x) ** 2 + (ys[i] - y) ** 2;
    if (distance <= least && counts(i)) { least = distance; best = i; }
  });
  return best;
}

/** IDs of the points inside a closed line. @param {[number, number][]} line @returns {Int32Array} */
export function inside(grid, xs, ys, line) {
  const along = (k) => line.map((point) => point[k]);
  const found = [];
  visitBox(grid, Math.min(...along(0)), Math.min(...along(1)), Math.max(...along(0)), Math.max(...along(1)), (i) => {
    if (isInside(line, xs[i], ys[i])) found.push(i);
  });
  return Int32Array.from(found).sort();
}

function isInside(line, x, y) {
  let odd = false;
  for (let i = 0, j = line.length - 1; i < line.length; j = i++) {
    const [xi, yi] = line[i];
    const [xj, yj] = line[j];
    if (yi > y !== yj > y && x < ((xj - xi) * (y - yi)) / (yj - yi) + xi) odd = !odd;
  }
  return odd;
}
