/** The scenes of the story "What is an embedding?", in their order. */

import { scene as back } from "./back.js";
import { scene as batch } from "./batch.js";
import { scene as broadcast } from "./broadcast.js";
import { scene as gradient } from "./gradient.js";
import { scene as ids } from "./ids.js";
import { scene as inside } from "./inside.js";
import { scene as learned } from "./learned.js";
import { scene as lookup } from "./lookup.js";
import { scene as memory } from "./memory.js";
import { scene as onehot } from "./onehot.js";
import { scene as order } from "./order.js";
import { scene as pieces } from "./pieces.js";
import { scene as real } from "./real.js";
import { scene as rotary } from "./rotary.js";
import { scene as similar } from "./similar.js";
import { scene as sizes } from "./sizes.js";
import { scene as sum } from "./sum.js";
import { scene as training } from "./training.js";
import { scene as twice } from "./twice.js";
import { scene as waves } from "./waves.js";
import { scene as width } from "./width.js";

/** @import { Scene } from "./stage.js" */

/** @type {Scene[]} */
export const SCENES = [
  ids, pieces, batch, onehot, lookup, gradient, training, similar, order, sum, broadcast, twice, waves,
  learned, rotary, back, inside, sizes, width, memory, real,
];
