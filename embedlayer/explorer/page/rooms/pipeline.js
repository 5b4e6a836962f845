import { empty } from "../dom.js";

/** Pipeline. */
export const room = {
  id: "pipeline",
  title: "Pipeline",
  sentence: "What happens to a text on its way into the model, step by step.",
  needs: ["tokenizer"],
  open,
};

/** @param {HTMLElement} element */
function open(element, context) {
  element.replaceChildren(empty("Not built yet", "This room comes soon."));
  return { close() {}, stateChanged() {} };
}
