/** Names beside points, none over another. */

/** @typedef {{id: number, x: number, y: number, width: number}} Candidate point on the screen, and its text's width */
/** @typedef {{id: number, x: number, y: number}} Placed left end and middle line of the text */

/**
 * Give each name a place to the right, left, above or below of its point, the first ones first; who finds none goes without.
 * @param {Iterable<Candidate>} candidates @param {{width: number, height: number, line: number, gap: number, most: number}} room
 * @returns {Placed[]}
 */
export function placeLabels(candidates, { width, height, line, gap, most }) {
  const cell = line;
  const columns = Math.ceil(width / cell) + 1;
  const taken = new Uint8Array(columns * (Math.ceil(height / cell) + 1));
  const cover = (box, use) => {
    for (let row = Math.floor(box[1] / cell); row <= Math.floor(box[3] / cell); row++) {
      for (let column = Math.floor(box[0] / cell); column <= Math.floor(box[2] / cell); column++) {
        if (use(row * columns + column)) return false;
      }
    }
    return true;
  };
  const placed = [];
  for (const { id, x, y, width: wide } of candidates) {
    if (placed.length >= most) break;
    const places = [[x + gap, y], [x - gap - wide, y], [x - wide / 2, y - line], [x - wide / 2, y + line]];
    for (const [left, middle] of places) {
      const box = [left, middle - line / 2 + 1, left + wide, middle + line / 2 - 1];
      if (box[0] < 26 || box[1] < 2 || box[2] > width - 2 || box[3] > height - 24) continue; // the axes' own labels stand there
      if (!cover(box, (index) => taken[index] === 1)) continue;
      cover(box, (index) => { taken[index] = 1; return false; });
      placed.push({ id, x: left, y: middle });
      break;
    }
  }
  return placed;
}
