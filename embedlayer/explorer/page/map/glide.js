/** Points that move from one set of coordinates to another, so that the eye can follow them. */

/** @import { Viewport } from "../types" */
/** @typedef {{xs: Float32Array, ys: Float32Array}} Places */

const DURATION = 900; // milliseconds

/** Whether the user has asked for less movement. */
export function isStill() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

/**
 * Return coordinates that are drawn in the viewport `to` where `places` are drawn in the viewport `from`.
 * @param {Places} places
 * @param {Viewport} from
 * @param {Viewport} to
 * @returns {Places}
 */
export function redrawn({ xs, ys }, from, to) {
  const factor = from.zoom / to.zoom;
  return {
    xs: xs.map((x) => to.x + (x - from.x) * factor),
    ys: ys.map((y) => to.y + (y - from.y) * factor),
  };
}

/**
 * Call `show(places)` in each frame with coordinates between `from` and `to`, then `done()`. Return a function that
 * stops the movement.
 * @param {Places} from
 * @param {Places} to
 * @param {(places: Places) => void} show
 * @param {() => void} done
 */
export function glide(from, to, show, done) {
  const places = { xs: from.xs.slice(), ys: from.ys.slice() };
  const began = performance.now();
  let frame = 0;
  const step = () => {
    const share = Math.min(1, (performance.now() - began) / DURATION);
    if (share >= 1) return done();
    const eased = share * share * (3 - 2 * share);
    for (let i = 0; i < places.xs.length; i++) {
      places.xs[i] = from.xs[i] + (to.xs[i] - from.xs[i]) * eased;
      places.ys[i] = from.ys[i] + (to.ys[i] - from.ys[i]) * eased;
    }
    show(places);
    frame = requestAnimationFrame(step);
  };
  frame = requestAnimationFrame(step);
  return () => cancelAnimationFrame(frame);
}
