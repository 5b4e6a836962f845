/** The exercises of three lessons by their names, each with the scene or the view in which it can be done. */

/**
 * @typedef {object} Exercise
 * @property {string} name as in the lesson
 * @property {string} [scene] of the story
 * @property {string} [view] another view
 * @property {string} [place] what that view shows: the title of a step, or the name of a scheme
 * @property {Record<string, string>} [settings] of the view, or of the scene, as the lesson sets them; with at least
 *   one, those that the reader left in the scene are not restored
 * @property {string} [claim] start of what the lesson says; the scene computes whether it is so
 * @property {boolean | null} [holds] whether it is so with these settings; null: it depends
 *
 * @typedef {object} Lesson
 * @property {string} name
 * @property {string} about
 * @property {[part: string, exercises: Exercise[]][]} parts
 */

const WIDE = { dim: "256" }; // the notebook's batch of (8, 4), D = 256
const DOGS = { layer: "tiny", text: "I love dogs" };
const ONE_TEXT = { size: "1", length: "3", dim: "8", b: "0" }; // (1, 3, 8)

/** @type {Lesson["parts"]} */
const MODULE_04 = [
  ["Introduction", [
    { name: "Memory table: GPT-2 small, LLaMA 7B and 70B", scene: "memory",
      settings: { vocab: "50257", dim: "768", tied: "1" }, claim: "Embeddings are often the largest", holds: null },
    { name: "Intuition: Distance(cat, dog) < Distance(cat, code)", scene: "training", settings: { step: "20" },
      claim: "Distance(cat, dog)", holds: true },
    { name: "Try This, Embedding Architecture: step through the pipeline", scene: "sum", settings: { step: "1" } },
  ]],
  ["Lookup and gradient", [
    { name: "One-hot lookup, nn.Embedding: token 3", scene: "onehot", settings: { id: "3" },
      claim: "Only one row of W", holds: true },
    { name: "Gradient flow: tokens 3, 7, 1", scene: "gradient", settings: { ids: "3.7.1" },
      claim: "Only the selected rows", holds: true },
    { name: "Sparse updates", scene: "gradient", settings: { ids: "3.7.1" }, claim: "Each batch", holds: null },
    { name: "Padding token handling", scene: "gradient", settings: { ids: "0.5.0" }, claim: "The padding row",
      holds: true },
  ]],
  ["Positions", [
    { name: "Attention is permutation-invariant: [1, 5, 7] and [7, 1, 5]", scene: "order",
      settings: { order: "2.0.1" }, claim: "Attention is permutation-invariant", holds: false },
    { name: "Try This, Same Token: same position (0 and 0)", scene: "twice", settings: { a: "0", b: "0" },
      claim: "Same position", holds: true },
    { name: "Try This, Same Token: adjacent positions (0 and 1)", scene: "twice", settings: { a: "0", b: "1" },
      claim: "Positions 0 and 1 are very similar", holds: true },
    { name: "Try This, Same Token: distant positions (0 and 5)", scene: "twice", settings: { a: "0", b: "5" },
      claim: "Positions 0 and 5", holds: true },
    { name: "PE(pos+k) is a linear function of PE(pos)", scene: "waves", settings: { a: "0", b: "1" },
      claim: "PE(pos+k)", holds: true },
    { name: "Similarity matrix: positions 5 and 6, 5 and 15", scene: "waves", settings: { a: "5", b: "15" },
      claim: "Nearby positions", holds: null },
    { name: "Combined embedding: token, position, sum; scaling by √D", scene: "sum", settings: { step: "6" },
      claim: "Scaling by √D", holds: false },
  ]],
  ["Rotary and other positions", [
    { name: "Position embeddings broadcast over the batch dimension", scene: "broadcast", settings: WIDE,
      claim: "PyTorch automatically broadcast", holds: true },
    { name: "RoPE (LLaMA, Mistral) encodes relative positions", scene: "rotary", settings: { q: "5" },
      claim: "RoPE encodes relative", holds: true },
    { name: "RoPE extrapolates well to longer sequences", scene: "rotary", settings: { q: "5" },
      claim: "This approach extrapolates", holds: null },
    { name: "ALiBi (BLOOM): a bias on the attention scores", view: "positions", settings: { scheme: "alibi" },
      place: "ALiBi" },
  ]],
  ["Similarity", [
    { name: "Embedding Similarity: numbers and letters", scene: "similar", settings: { noise: "0.1" },
      claim: "Numbers are similar", holds: true },
    { name: "2D Visualization with PCA", scene: "similar", settings: { noise: "0.1" },
      claim: "Similar tokens cluster", holds: true },
    { name: "The same in a trained table", scene: "real" },
  ]],
  ["Try This, Interactive Exploration", [
    { name: "1 Frequency gradient", scene: "waves", settings: { a: "0", b: "1" }, claim: "Low dimensions",
      holds: true },
    { name: "2 Adjacent positions (0 and 1): ≈ 0.99", scene: "waves", settings: { a: "0", b: "1" },
      claim: "Positions 0 and 1", holds: false },
    { name: "3 Distant positions (0 and 32)", scene: "waves", settings: { a: "0", b: "32" },
      claim: "Positions 0 and 32", holds: true },
    { name: "4 Unique fingerprints", scene: "waves", settings: { a: "10", b: "11" },
      claim: "Each position has a unique", holds: true },
    { name: "5 Sin/Cos pairs", scene: "waves", settings: { a: "10", b: "11" }, claim: "Sine and cosine",
      holds: true },
  ]],
  ["Exercises", [
    { name: "Exercise 1: Learned vs Sinusoidal", scene: "learned", settings: { length: "20" },
      claim: "Learned embeddings start random", holds: true },
    { name: "Exercise 1: extrapolation", scene: "learned", settings: { length: "60" },
      claim: "Sinusoidal embeddings can", holds: null },
    { name: "Exercise 1: learned ones are often slightly better", scene: "learned", settings: { length: "20" },
      claim: "Learned ones are often", holds: null },
    { name: "RoPE and ALiBi extrapolate to longer texts", scene: "learned", settings: { length: "60" },
      claim: "RoPE and ALiBi", holds: null },
    { name: "Exercise 2: Effect of Embedding Dimension", scene: "width", settings: { std: "1" },
      claim: "The scale factor √D", holds: false },
    { name: "Exercise 3: Memory Usage", scene: "memory", settings: { vocab: "1000", dim: "64", tied: "1" },
      claim: "A larger vocabulary", holds: null },
    { name: "Exercise 3: weight tying", scene: "memory", settings: { vocab: "1000", dim: "256", tied: "1" },
      claim: "Weight tying halves", holds: true },
    { name: "Exercise 3: GPT-2, LLaMA and most models tie", scene: "memory",
      settings: { vocab: "32000", dim: "4096", tied: "1" }, claim: "GPT-2, LLaMA", holds: false },
  ]],
  ["Common Pitfalls", [
    { name: "Forgetting the sqrt scale", scene: "width", settings: { std: "0.02" }, claim: "Without the factor",
      holds: null },
    { name: "Exceeding max_seq_len", scene: "learned", settings: { length: "51" },
      claim: "Learned embeddings cannot", holds: true },
    { name: "Ignoring padding", scene: "gradient", settings: { ids: "0.5.0" }, claim: "The padding row", holds: true },
    { name: "Poor initialization", scene: "width", settings: { std: "1" }, claim: "Large initial values",
      holds: null },
  ]],
];

/** @type {Lesson["parts"]} */
const PART_4 = [
  ["1 Setup", [
    { name: "tiktoken: a text becomes token IDs", scene: "pieces", settings: { word: "unhappiness" } },
    { name: "create_dataloader_v1: batch_size 8, max_length 4, stride 4", scene: "batch",
      settings: { length: "4", stride: "4", size: "8" }, claim: "With stride = max_length", holds: true },
  ]],
  ["2 Token Embeddings", [
    { name: "GPT_CONFIG_124M: vocab_size, context_size, emb_dim", scene: "sizes", settings: { tok: "V.D" } },
    { name: "Lookup table [vocab_size, embedding_dim]: token ID 0, tokens [0, 1, 2]", scene: "onehot",
      settings: { id: "0" }, claim: "Only one row of W", holds: true },
    { name: "[50,257, 256]: 12,865,792 learnable parameters", scene: "memory",
      settings: { vocab: "50257", dim: "256", tied: "1" }, claim: "This matrix", holds: true },
    { name: "inputs, targets = next(data_iter): shape [8, 4]", scene: "batch",
      settings: { size: "8", targets: "1" }, claim: "inputs.shape is (8, 4)", holds: true },
    { name: "[8, 4] becomes [8, 4, 256]", scene: "broadcast", settings: WIDE },
    { name: "Are embeddings for tokens inputs[0][0] and inputs[0][1] the same? Their L2 distance", scene: "broadcast",
      settings: WIDE, claim: "Different tokens", holds: true },
  ]],
  ["3 Positional Embeddings", [
    { name: "Token embeddings lose the order of the words", scene: "order", settings: { order: "2.0.1" },
      claim: "The model cannot distinguish", holds: true },
    { name: "[4, 256]: 1,024 learnable parameters", scene: "broadcast", settings: WIDE },
    { name: "pos_ids = arange(4): a vector for each position", scene: "sum",
      settings: { step: "5", scheme: "learned" } },
    { name: "Are position 0 and position 1 embeddings the same? Their L2 distance", scene: "broadcast", settings: WIDE,
      claim: "Different tokens", holds: true },
  ]],
  ["4 Combining Token and Positional Embeddings", [
    { name: "Broadcasting: [8, 4, 256] + [4, 256]", scene: "broadcast", settings: WIDE,
      claim: "PyTorch automatically broadcast", holds: true },
    { name: "Manual addition check", scene: "sum", settings: { step: "6", scheme: "learned", scale: "0" } },
    { name: "Batch 0 and batch 7, position 0: are they the same?", scene: "broadcast",
      settings: { ...WIDE, a: "0", b: "7", t: "0" }, claim: "Are they the same?", holds: false },
  ]],
  ["5 Understanding the Embedding Lookup Process", [
    { name: "6 × 3 table, tokens [2, 3, 4, 1]: both methods are identical", scene: "onehot", settings: { id: "2" },
      claim: "Only one row of W", holds: true },
    { name: "Step by step, with all numbers", view: "pipeline", settings: { layer: "tiny", step: "look_up" },
      place: "Rows" },
  ]],
  ["6 Creating a Complete GPT Embedding Module", [
    { name: "GPTEmbedding: 12,866,816 parameters in total", scene: "memory",
      settings: { vocab: "50257", dim: "256", tied: "1" }, claim: "This matrix", holds: true },
    { name: "Does our module match manual approach?", scene: "broadcast", settings: WIDE, claim: "Does our module",
      holds: false },
    { name: "forward(token_ids): token and positional embeddings, combined", view: "pipeline",
      settings: { layer: "tiny", step: "sum" }, place: "Sum" },
  ]],
  ["Summary", [
    { name: "Token IDs are meaningless numbers", scene: "ids", settings: { text: "the cat sat" } },
    { name: "Rich, learnable vectors", scene: "training", settings: { step: "20" }, claim: "Distance(cat, dog)",
      holds: true },
    { name: "The “bag of words” problem", scene: "order", settings: { order: "2.0.1" },
      claim: "The model cannot distinguish", holds: true },
  ]],
];

/** @type {Lesson["parts"]} */
const LLAMA = [
  ["Token Embeddings", [
    { name: "self.embeddings in LLaMaTransformer: is it computed outside of the model?", scene: "inside",
      settings: { model: "tiny" }, claim: "Embeddings are computed outside", holds: false },
    { name: "n_embd: embedding_dim, d_model, hidden_size", scene: "sizes", settings: { tok: "V.D" } },
    { name: "nn.Embedding(vocab_size, n_embd) is a lookup table", scene: "onehot", settings: { id: "3" },
      claim: "Only one row of W", holds: true },
    { name: "“I” → 73, “an” → 256: unique vectors, all of length n_embd", scene: "broadcast", settings: { dim: "8" },
      claim: "Different tokens", holds: true },
    { name: "Random at initialization; training adjusts them", scene: "training", settings: { step: "20" },
      claim: "Distance(cat, dog)", holds: true },
    { name: "“man” and “woman” in a trained table", scene: "real", settings: { word: "man" } },
    { name: "The vectors are passed on to the Decoder Block", view: "pipeline",
      settings: { ...DOGS, step: "block" }, place: "Block" },
    { name: "Each dimension encodes some feature; dimensions are polysemantic", scene: "similar",
      settings: { noise: "0.1" }, claim: "Each dimension encodes", holds: null },
  ]],
  ["Embeddings in This Project", [
    { name: "n_embd of 768, 1024 or higher", scene: "memory", settings: { vocab: "32000", dim: "1024", tied: "1" },
      claim: "Embeddings are often the largest", holds: null },
    { name: "RoPE for positional encoding by default, following LLaMA", scene: "rotary", settings: { q: "5" },
      claim: "RoPE is used for positional encoding", holds: true },
    { name: "Updated through backpropagation", scene: "gradient", settings: { ids: "3.7.1" },
      claim: "Only the selected rows", holds: true },
    { name: "Tied weights: the embeddings are the final output projection", scene: "back", settings: { row: "5" },
      claim: "Weight tying halves", holds: true },
    { name: "Tied weights: training became unstable", scene: "width", settings: { std: "1" },
      claim: "Large initial values", holds: null },
  ]],
  ["Walkthrough Example: “I love dogs”", [
    { name: "1 Tokenization: a word-level tokenizer gives 73, 786, 2934", view: "pipeline",
      settings: { ...DOGS, step: "tokenize" }, place: "Tokenize" },
    { name: "2 Embedding Matrix: (vocab_size, 8)", scene: "memory", settings: { vocab: "32000", dim: "8", tied: "1" } },
    { name: "3 Lookup: selects the rows at those indices", view: "pipeline",
      settings: { ...DOGS, step: "look_up" }, place: "Rows" },
    { name: "4 Output Tensor: (3, 8)", scene: "broadcast", settings: ONE_TEXT },
    { name: "The batch dimension: (1, 3, 8)", scene: "broadcast", settings: ONE_TEXT, claim: "The batch dimension",
      holds: null },
  ]],
];

/** @type {Lesson[]} */
export const LESSONS = [
  { name: "Module 04: Embeddings", about: "a course module with code in NumPy and PyTorch", parts: MODULE_04 },
  { name: "Building LLMs From Scratch (Part 4): The Embedding Layer", about: "a notebook", parts: PART_4 },
  { name: "Embeddings", about: "a page about a small LLaMA-type model", parts: LLAMA },
];
