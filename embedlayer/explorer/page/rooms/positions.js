import { empty } from "../dom.js";

/** Positions. */
export const room = {
  id: "positions",
  title: "Positions",
  sentence: "How a model is told where a token stands, and what that does to similarity.",
  needs: [],
  open,
};

/** @param {HTMLElement} element */
function open(element, context) {
  element.replaceChildren(empty("Not built yet", "This room comes soon."));
  return { close() {}, stateChanged() {} };
}
