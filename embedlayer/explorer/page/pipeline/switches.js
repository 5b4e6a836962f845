/** The switches of the view Pipeline: which layer, which position scheme, and whether the head is tied. */

import { COUNT } from "../charts/numbers.js";
import { h, segments } from "../dom.js";
import { stepOf } from "./facts.js";

/** @import { Pipeline, PipelineChoices, ViewContext } from "../types" */

/**
 * What is chosen.
 * @typedef {object} Layer
 * @property {boolean} tiny whether the tiny layer is shown
 * @property {string} position position scheme of the tiny layer
 * @property {boolean} tied whether the head of the tiny layer is tied
 */

/** @type {[string, string][]} */
const SCHEMES = [["learned", "learned"], ["sinusoidal", "sinusoidal"], ["rotary", "rotary"], ["alibi", "ALiBi"]];
/** @type {Record<string, string>} */
const CLASSES = {
  LearnedPositionalEmbedding: "learned", SinusoidalPositionalEmbedding: "sinusoidal", RotaryEmbedding: "rotary",
  AlibiBias: "alibi",
};

/** Read what the URL chooses. @param {ViewContext} context @param {PipelineChoices} choices @returns {Layer} */
export function chosenLayer({ state }, { refused, tiny }) {
  const position = state.get("position", "learned");
  return {
    tiny: refused !== "" || state.get("layer") === "tiny",
    position: tiny.positions.includes(position) ? position : "learned",
    tied: state.get("tied", "1") !== "0",
  };
}

/**
 * Create the switches. Those that would need other trained weights are disabled, with the reason.
 * @param {ViewContext} context
 * @param {PipelineChoices} choices
 * @param {Layer} layer
 * @param {Pipeline | null} pipeline of the model, which says what its scheme and head are
 * @param {(changes: Record<string, string | null>) => void} change the state
 */
export function switches({ manifest }, choices, layer, pipeline, change) {
  const size = `${COUNT.format(manifest.vocab_size)} × ${COUNT.format(manifest.embed_dim)}`;
  const tinySize = `${choices.tiny.words.length} × ${choices.tiny.embed_dim}`;
  const isModel = ["head", "position"].some((name) => manifest.has.includes(name));
  const which = group("Layer", [["model", `this ${isModel ? "model" : "table"}, ${size}`],
    ["tiny", `tiny, ${tinySize}`]], layer.tiny ? "tiny" : "model",
  (value) => change({ layer: value === "tiny" ? "tiny" : null, token: null, dim: null }));
  if (choices.refused) disable(which, (key) => key === "model", choices.refused);
  const scheme = layer.tiny ? layer.position : schemeOf(pipeline);
  const schemes = group("Positions", SCHEMES, scheme,
    (value) => change({ position: value === "learned" ? null : value }));
  const hasHead = layer.tiny || manifest.has.includes("head");
  const head = group("Head", [["tied", "tied"], ["untied", "untied"]],
    layer.tiny ? (layer.tied ? "tied" : "untied") : !hasHead ? "" : manifest.tied ? "tied" : "untied",
    (value) => change({ tied: value === "untied" ? "0" : null }));
  const reason = layer.tiny ? ""
    : `${hasHead ? "" : "This source has no head. "}Another scheme or head would need other trained weights.`;
  if (reason) [schemes, head].forEach((each) => disable(each, () => true, reason));
  return h("div", { class: "pipe-switches" }, which, schemes, head,
    h("p", { class: "note" }, choices.refused || (layer.tiny ? TINY : `${reason} The tiny layer has them all.`)));
}

const TINY = "Real numbers of an untrained decoder of one block: random, with a fixed seed.";

/** Return the name of a model's scheme; "" for one without a switch. @param {Pipeline | null} pipeline */
function schemeOf(pipeline) {
  const scheme = pipeline && stepOf(pipeline, "position")?.facts.scheme;
  return (scheme && CLASSES[scheme]) || "";
}

/**
 * @param {string} label
 * @param {[string, string][]} options
 * @param {string} value
 * @param {(value: string) => void} onChoose
 */
function group(label, options, value, onChoose) {
  const buttons = segments(label, options, value, onChoose);
  [...buttons.children].forEach((button, i) => button.setAttribute("data-key", options[i][0]));
  return h("div", { class: "pipe-switch" }, h("span", null, label), buttons);
}

/** @param {HTMLElement} element @param {(key: string) => boolean} test @param {string} reason */
function disable(element, test, reason) {
  for (const button of element.querySelectorAll("button")) {
    if (!test(button.dataset.key ?? "")) continue;
    button.disabled = true;
    button.title = reason;
  }
}
