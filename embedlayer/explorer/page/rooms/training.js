import { empty } from "../dom.js";

/** Training. */
export const room = {
  id: "training",
  title: "Training",
  sentence: "The loss over the run, and how many rows each step touched.",
  needs: ["metrics"],
  open,
};

/** @param {HTMLElement} element */
function open(element, context) {
  element.replaceChildren(empty("Not built yet", "This room comes soon."));
  return { close() {}, stateChanged() {} };
}
