/** Vectors that move from where they are read to where they are used. */

import { h } from "../dom.js";

const DURATION = 750; // milliseconds

/**
 * Move copies of some vectors to the place of another, which appears when they arrive. Nothing moves where the reader
 * prefers reduced motion.
 * @param {HTMLElement} stage positioned element around all of them
 * @param {HTMLElement[]} froms
 * @param {HTMLElement} to
 */
export function move(stage, froms, to) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const [outer, end] = [stage.getBoundingClientRect(), to.getBoundingClientRect()];
  if (end.width < 2) return;
  for (const from of froms) {
    const start = from.getBoundingClientRect();
    const copy = h("div", { class: "mach-moving", "aria-hidden": "true" }, copied(from));
    stage.append(copy);
    const [first, last] = [start, end].map((box) => ({
      transform: `translate(${box.left - outer.left}px, ${box.top - outer.top}px)`,
      width: `${box.width}px`, height: `${box.height}px`,
    }));
    const motion = copy.animate([first, last], { duration: DURATION, easing: "cubic-bezier(0.45, 0, 0.2, 1)" });
    motion.onfinish = motion.oncancel = () => copy.remove();
  }
  to.animate([{ opacity: 0 }, { opacity: 0, offset: 0.9 }, { opacity: 1 }], DURATION);
}

/** Copy an element, with the picture of a canvas in it. @param {HTMLElement} element */
function copied(element) {
  const copy = /** @type {HTMLElement} */ (element.cloneNode(true));
  copy.querySelector(".vec-mark")?.remove();
  const [from, to] = [element.querySelector("canvas"), copy.querySelector("canvas")];
  if (from && to && from.width && from.height) {
    [to.width, to.height] = [from.width, from.height];
    to.getContext("2d")?.drawImage(from, 0, 0);
    to.style.width = to.style.height = "100%";
  }
  return copy;
}
