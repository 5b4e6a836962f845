/** The facts of the steps of a pipeline, by the name of the step. */

/** @import { Pipeline, PipelineStep, StepFacts, StepOf } from "../types" */

/**
 * Return the step of a pipeline with a name; undefined if the model does not have it.
 * @template {keyof StepFacts} Name
 * @param {Pipeline} pipeline
 * @param {Name} name
 * @returns {StepOf<Name> | undefined}
 */
export function stepOf(pipeline, name) {
  return /** @type {StepOf<Name> | undefined} */ (pipeline.steps.find((step) => step.name === name));
}

/**
 * Return the facts of a step that has the name `name`.
 * @template {keyof StepFacts} Name
 * @param {PipelineStep} step
 * @param {Name} name
 */
export function factsOf(step, name) {
  if (step.name !== name) throw new Error(`The step ${step.name} has no facts of ${name}.`);
  return /** @type {StepOf<Name>} */ (step).facts;
}
