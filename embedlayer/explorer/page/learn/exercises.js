/** What five lessons on embeddings say and try, by its name, each with the scene or the view that shows it. */

/**
 * @typedef {object} Exercise
 * @property {string} name as in the lesson, with its sizes and IDs: the page shows the same where the link leads
 * @property {string} [scene] of the story
 * @property {string} [view] another view
 * @property {string} [place] what that view shows: the title of a step, or the name of a scheme
 * @property {Record<string, string>} [settings] of the view, or of the scene, as the lesson sets them; with at least
 *   one, those that the reader left in the scene are not restored
 * @property {string} [claim] start of what the lesson says; the scene computes whether it is so
 * @property {boolean | null} [holds] whether it is so with these settings; null: it depends
 * @property {string[]} [shows] further texts that the page shows there
 * @property {string} [lesson] file of the course that has the same as code, without its ending
 *
 * @typedef {object} Lesson
 * @property {string} name
 * @property {string} letter by which the course names it
 * @property {string} about
 * @property {[part: string, exercises: Exercise[]][]} parts
 */

const WIDE = { dim: "256" }; // the notebook's batch of (8, 4), D = 256
const NOTEBOOK = { vocab: "50257", dim: "256" };
const SMALL_ONE = { vocab: "10", dim: "4" };
const DOGS = { vocab: "3000", dim: "8", ids: "73 786 2934", words: "I love dogs" };
const [METHODS, REPEATED, ANYWHERE] = ["Both methods are identical", "The same token always", "The same token at diff"];
const GENDER = "A combination of dimensions"; // in the words of MiniLM
const IDX = { ids: "2 3 1" }; // in a table of 4 × 5

/** @type {Lesson["parts"]} */
const LINEAR = [
  ["Using nn.Embedding", [
    { name: "idx = [2, 3, 1]: three training examples", scene: "lookup", settings: IDX, shows: ["(3,)"] },
    { name: "num_idx = max(idx) + 1: 4 rows for the IDs 0, 1, 2, 3", scene: "lookup", settings: IDX,
      claim: "A table needs as many rows", holds: null, shows: ["W (4, 5)", "4 rows"] },
    { name: "out_dim = 5 is a hyperparameter", scene: "width", settings: { std: "1" }, claim: "A larger dimension",
      holds: true, lesson: "05-scale" },
    { name: "nn.Embedding(4, 5): small random weights", scene: "lookup", settings: IDX, shows: ["nn.Embedding(4, 5)"],
      lesson: "02-look-up" },
    { name: "The vector of ID 1", scene: "lookup", settings: { ids: "1" }, shows: ["[0] ID 1", "W[ids] (1, 5)"] },
    { name: "The vector of ID 2", scene: "lookup", settings: { ids: "2" }, shows: ["[0] ID 2", "W[ids] (1, 5)"] },
    { name: "All examples: [2, 3, 1] give (3, 5)", scene: "lookup", settings: IDX, claim: METHODS, holds: true },
  ]],
  ["Using nn.Linear", [
    { name: "One-hot representation of [2, 3, 1]: (3, 4)", scene: "lookup", settings: IDX, shows: ["one_hot (3, 4)"],
      lesson: "02-look-up" },
    { name: "nn.Linear(4, 5, bias=False): its weight is (5, 4)", scene: "lookup", settings: IDX,
      shows: ["nn.Linear(4, 5, bias=False)"], claim: "A linear layer", holds: true },
    { name: "linear.weight = embedding.weight.T: the same result", scene: "lookup", settings: IDX,
      shows: ["weight.T"], claim: METHODS, holds: true, lesson: "02-look-up" },
    { name: "X Wᵀ for the first example, ID 2", scene: "onehot", settings: { id: "2" }, shows: ["= W[2]"],
      claim: "Only one row of W", holds: true },
    { name: "X Wᵀ for the second example, ID 3", scene: "onehot", settings: { id: "3" }, shows: ["= W[3]"],
      claim: "Only one row of W", holds: true },
    { name: "Wasteful multiplications by zero", scene: "lookup", settings: { ...NOTEBOOK, ids: "2 3 1" },
      claim: "The product is wasteful", holds: true, lesson: "02-look-up" },
  ]],
];

/** @type {Lesson["parts"]} */
const MODULE_04 = [
  ["Introduction", [
    { name: "Token ID 42 becomes a vector", scene: "lookup", settings: { vocab: "100", dim: "8", ids: "42" },
      shows: ["[0] ID 42"] },
    { name: "Similarity, learning: “cat” and “dog” become close", scene: "training", settings: { step: "20" },
      claim: "Distance(cat, dog)", holds: true, lesson: "08-trained-table" },
    { name: "Composition: vectors can be combined", scene: "real", settings: { word: "man", direction: "gender" },
      shows: ["man − woman"], claim: GENDER, holds: true, lesson: "08-trained-table" },
    { name: "Position: where tokens are in the sequence", scene: "sum", settings: { step: "5" },
      shows: ["Position 1, dimension 0"] },
    { name: "The role of embeddings in the transformer", scene: "inside", settings: { model: "gpt2" },
      shows: ["wte.weight"] },
    { name: "Memory table: GPT-2 small, 50,257 × 768", scene: "memory",
      settings: { vocab: "50257", dim: "768", tied: "1" }, shows: ["147.2 MiB", "38,597,376"],
      claim: "Embeddings are often the largest", holds: null, lesson: "07-tying-and-memory" },
    { name: "Memory table: LLaMA 7B, 32,000 × 4,096", scene: "memory", shows: ["500.0 MiB", "131,072,000"],
      settings: { vocab: "32000", dim: "4096", tied: "1" }, claim: "Embeddings are often the largest", holds: null },
    { name: "Memory table: LLaMA 70B, 32,000 × 8,192", scene: "memory", shows: ["1,000.0 MiB", "262,144,000"],
      settings: { vocab: "32000", dim: "8192", tied: "1" }, claim: "Embeddings are often the largest", holds: null },
    { name: "Vocabulary size is a critical decision", scene: "memory", settings: { vocab: "50257", dim: "768" },
      claim: "A larger vocabulary", holds: null },
    { name: "Intuition: Distance(cat, dog) < Distance(cat, code)", scene: "training", settings: { step: "20" },
      claim: "Distance(cat, dog)", holds: true },
    { name: "Try This, Embedding Architecture: step through the pipeline", scene: "sum", settings: { step: "1" } },
  ]],
  ["Lookup and gradient", [
    { name: "One-hot lookup: token 3 in a vocabulary of 10", scene: "onehot", settings: { id: "3" },
      shows: ["= W[3]", "of the 40 products"], claim: "Only one row of W", holds: true, lesson: "02-look-up" },
    { name: "ScratchEmbedding, 10 × 4: [[3, 7, 1], [5, 3, 9]] becomes (2, 3, 4)", scene: "lookup",
      settings: { ...SMALL_ONE, ids: "3 7 1 / 5 3 9" }, claim: METHODS, holds: true, lesson: "02-look-up" },
    { name: "nn.Embedding skips the one-hot vector", scene: "lookup", shows: ["copies rows"],
      settings: { ...SMALL_ONE, ids: "3 7 1 / 5 3 9" }, claim: METHODS, holds: true },
    { name: "dL/dW = one_hot.T @ dL/doutput", scene: "gradient", settings: { ids: "3.7.1" }, shows: ["dL/dW"],
      lesson: "03-gradients" },
    { name: "Gradient flow: tokens 3, 7, 1", scene: "gradient", settings: { ids: "3.7.1" },
      shows: ["Rows with a gradient: 1, 3, 7"], claim: "Only the selected rows", holds: true, lesson: "03-gradients" },
    { name: "Sparse updates", scene: "gradient", settings: { ids: "3.7.1" }, claim: "Each batch", holds: null,
      lesson: "03-gradients" },
    { name: "Padding token handling", scene: "gradient", settings: { ids: "0.5.0" }, claim: "The padding row",
      holds: true },
  ]],
  ["Positions", [
    { name: "Attention is permutation-invariant: [1, 5, 7] and [7, 1, 5]", scene: "order",
      settings: { order: "2.0.1" }, claim: "Attention is permutation-invariant", holds: false, lesson: "04-order" },
    { name: "ScratchPositionEmbedding: a table by position", scene: "sum", settings: { step: "5", scheme: "learned" },
      shows: ["the same for every word at position 1"], lesson: "04-order" },
    { name: "Token 42 at positions 0 to 3, D = 8: all different", scene: "twice", shows: ["Token ID 42", "0, 1, 2, 3"],
      settings: { id: "42", a: "0", b: "3", dim: "8", scheme: "learned", scale: "0" }, claim: ANYWHERE, holds: true },
    { name: "Learned positions (GPT-2, BERT) end at max_seq_len", scene: "learned", settings: { length: "51" },
      claim: "Learned embeddings cannot", holds: true, lesson: "06-positions" },
    { name: "Sinusoidal positions: waves of different frequencies", scene: "waves", settings: { a: "10", b: "11" },
      claim: "Each position has a unique", holds: true, lesson: "06-positions" },
    { name: "Try This, Same Token: same position (0 and 0)", scene: "twice", settings: { a: "0", b: "0" },
      shows: ["positions 0 and 0"], claim: "Same position", holds: true },
    { name: "Try This, Same Token: adjacent positions (0 and 1)", scene: "twice", settings: { a: "0", b: "1" },
      shows: ["positions 0 and 1"], claim: "Positions 0 and 1 are very similar", holds: true },
    { name: "Try This, Same Token: distant positions (0 and 5)", scene: "twice", settings: { a: "0", b: "5" },
      shows: ["positions 0 and 5"], claim: "Positions 0 and 5", holds: true },
    { name: "PE(pos+k) is a linear function of PE(pos)", scene: "waves", settings: { a: "0", b: "1" },
      claim: "PE(pos+k)", holds: true },
  ]],
  ["Code walkthrough", [
    { name: "nn.Embedding(100, 32): 3,200 parameters, tokens [5, 10, 15, 20]", scene: "lookup",
      settings: { vocab: "100", dim: "32", ids: "5 10 15 20 /" }, shows: ["nn.Embedding(100, 32)", "(1, 4, 32)"] },
    { name: "Same token, same embedding: token 42 twice", scene: "lookup",
      settings: { vocab: "100", dim: "32", ids: "42 42" }, shows: ["IDs [42, 42]"], claim: REPEATED, holds: true },
    { name: "Positional encoding by dimension, D = 64", view: "positions",
      settings: { scheme: "sinusoidal", dim: "64" }, place: "Sinusoidal", lesson: "06-positions" },
    { name: "Similarity matrix: positions 5 and 6, 5 and 15", scene: "waves", settings: { a: "5", b: "15" },
      claim: "Nearby positions", holds: null, lesson: "06-positions" },
    { name: "Combined embedding: token, position, sum; scaling by √D", scene: "sum", settings: { step: "6" },
      claim: "Scaling by √D", holds: false, lesson: "05-scale" },
    { name: "Initialization: a small standard deviation (0.02)", scene: "width", settings: { std: "0.02" },
      claim: "Large initial values", holds: null, lesson: "05-scale" },
    { name: "Dropout (0.1), applied after combining embeddings", scene: "sum", settings: { step: "7" },
      shows: ["p = 0.1"], claim: "Dropout is applied", holds: null },
    { name: "Token 42 at positions 0, 5 and 9, D = 64", scene: "twice", settings: { id: "42", a: "0", b: "9" },
      shows: ["Token ID 42", "0, 1, 2, 3, 5, 9", "64 numbers"], claim: ANYWHERE, holds: true },
  ]],
  ["Rotary and other positions", [
    { name: "Position embeddings broadcast over the batch dimension", scene: "broadcast", settings: WIDE,
      claim: "PyTorch automatically broadcast", holds: true },
    { name: "RoPE (LLaMA, Mistral) encodes relative positions", scene: "rotary", settings: { q: "5" },
      claim: "RoPE encodes relative", holds: true, lesson: "06-positions" },
    { name: "RoPE extrapolates well to longer sequences", scene: "rotary", settings: { q: "5" },
      claim: "This approach extrapolates", holds: null },
    { name: "ALiBi (BLOOM): a bias on the attention scores", view: "positions", settings: { scheme: "alibi" },
      place: "ALiBi", lesson: "06-positions" },
  ]],
  ["Similarity", [
    { name: "Embedding Similarity: numbers and letters", scene: "similar", settings: { noise: "0.1" },
      claim: "Numbers are similar", holds: true },
    { name: "2D Visualization with PCA", scene: "similar", settings: { noise: "0.1" },
      claim: "Similar tokens cluster", holds: true },
    { name: "The same in a trained table", scene: "real", lesson: "08-trained-table" },
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
      claim: "Learned embeddings start random", holds: true, lesson: "06-positions" },
    { name: "Exercise 1: extrapolation", scene: "learned", settings: { length: "60" },
      claim: "Sinusoidal embeddings can", holds: null },
    { name: "Exercise 1: learned ones are often slightly better", scene: "learned", settings: { length: "20" },
      claim: "Learned ones are often", holds: null },
    { name: "RoPE and ALiBi extrapolate to longer texts", scene: "learned", settings: { length: "60" },
      claim: "RoPE and ALiBi", holds: null },
    { name: "Exercise 2: Effect of Embedding Dimension", scene: "width", settings: { std: "1" },
      shows: ["8", "32", "128", "512"], claim: "The scale factor √D", holds: false, lesson: "05-scale" },
    { name: "Exercise 2: capacity and cost of a dimension", scene: "width", settings: { std: "1" },
      claim: "A larger dimension", holds: true },
    { name: "Exercise 2: without √D the magnitude varies", scene: "width", settings: { std: "1", scale: "0" },
      claim: "Without the factor", holds: null },
    { name: "Exercise 3: Memory Usage, 1,000 × 64", scene: "memory", settings: { vocab: "1000", dim: "64", tied: "1" },
      shows: ["0.2 MiB", "64,000", "LLaMA"], claim: "A larger vocabulary", holds: null,
      lesson: "07-tying-and-memory" },
    { name: "Exercise 3: bf16 halves the memory, 100,000 × 4,096", scene: "memory", shows: ["781.3 MiB"],
      settings: { vocab: "100000", dim: "4096", tied: "1", dtype: "bfloat16" } },
    { name: "Exercise 3: int8 and int4 reduce it further", scene: "memory", shows: ["195.3 MiB"],
      settings: { vocab: "100000", dim: "4096", tied: "1", dtype: "int4" } },
    { name: "Exercise 3: weight tying, 1,000 × 256", scene: "memory",
      settings: { vocab: "1000", dim: "256", tied: "1" }, shows: ["256,000 parameters"], claim: "Weight tying halves",
      holds: true, lesson: "07-tying-and-memory" },
    { name: "Exercise 3: GPT-2, LLaMA and most models tie", scene: "memory",
      settings: { vocab: "32000", dim: "4096", tied: "1" }, claim: "GPT-2, LLaMA", holds: false,
      lesson: "07-tying-and-memory" },
  ]],
  ["Common Pitfalls", [
    { name: "Forgetting the sqrt scale", scene: "width", settings: { std: "0.02" }, claim: "Without the factor",
      holds: null, lesson: "05-scale" },
    { name: "Exceeding max_seq_len", scene: "learned", settings: { length: "51" },
      claim: "Learned embeddings cannot", holds: true },
    { name: "Ignoring padding", scene: "gradient", settings: { ids: "0.5.0" }, claim: "The padding row", holds: true },
    { name: "Poor initialization", scene: "width", settings: { std: "1" }, claim: "Large initial values",
      holds: null, lesson: "05-scale" },
  ]],
];

/** @type {Lesson["parts"]} */
const PART_4 = [
  ["1 Setup", [
    { name: "tiktoken: a text becomes token IDs", scene: "pieces", settings: { word: "unhappiness" },
      lesson: "01-text-to-vectors" },
    { name: "create_dataloader_v1: batch_size 8, max_length 4, stride 4", scene: "batch",
      settings: { length: "4", stride: "4", size: "8" }, claim: "With stride = max_length", holds: true,
      lesson: "01-text-to-vectors" },
  ]],
  ["2 Token Embeddings", [
    { name: "GPT_CONFIG_124M: vocab_size, context_size, emb_dim", scene: "sizes", settings: { tok: "V.D" } },
    { name: "drop_rate: 0.1", scene: "sum", settings: { step: "7" }, shows: ["p = 0.1"], claim: "Dropout is applied",
      holds: null },
    { name: "[50,257, 256]: 12,865,792 learnable parameters", scene: "memory",
      settings: { ...NOTEBOOK, tied: "1" }, claim: "This matrix", holds: true },
    { name: "Token ID 0 of (50,257, 256)", scene: "lookup", settings: { ...NOTEBOOK, ids: "0" },
      shows: ["IDs [0]", "[0] ID 0"] },
    { name: "Tokens [0, 1, 2] of (50,257, 256): (3, 256)", scene: "lookup", settings: { ...NOTEBOOK, ids: "0 1 2" } },
    { name: "inputs, targets = next(data_iter): shape [8, 4]", scene: "batch",
      settings: { size: "8", targets: "1" }, claim: "inputs.shape is (8, 4)", holds: true },
    { name: "[8, 4] becomes [8, 4, 256]", scene: "broadcast", settings: WIDE },
    { name: "Are embeddings for tokens inputs[0][0] and inputs[0][1] the same? Their L2 distance", scene: "broadcast",
      settings: WIDE, claim: "Different tokens", holds: true },
  ]],
  ["3 Positional Embeddings", [
    { name: "Token embeddings lose the order of the words", scene: "order", settings: { order: "2.0.1" },
      claim: "The model cannot distinguish", holds: true, lesson: "04-order" },
    { name: "[4, 256]: 1,024 learnable parameters", scene: "broadcast", settings: WIDE },
    { name: "pos_ids = arange(4): a vector for each position", scene: "sum",
      settings: { step: "5", scheme: "learned" } },
    { name: "Are position 0 and position 1 embeddings the same? Their L2 distance", scene: "broadcast", settings: WIDE,
      claim: "Different tokens", holds: true },
  ]],
  ["4 Combining Token and Positional Embeddings", [
    { name: "Broadcasting: [8, 4, 256] + [4, 256]", scene: "broadcast", settings: WIDE,
      claim: "PyTorch automatically broadcast", holds: true, lesson: "04-order" },
    { name: "Manual addition check", scene: "sum", settings: { step: "6", scheme: "learned", scale: "0" } },
    { name: "Batch 0 and batch 7, position 0: are they the same?", scene: "broadcast",
      settings: { ...WIDE, a: "0", b: "7", t: "0" }, shows: ["x[0, 0]", "x[7, 0]"], claim: "Are they the same?",
      holds: false, lesson: "04-order" },
  ]],
  ["5 Understanding the Embedding Lookup Process", [
    { name: "6 × 3 table, tokens [2, 3, 4, 1]: both methods are identical", scene: "lookup",
      settings: { vocab: "6", dim: "3", ids: "2 3 4 1" }, shows: ["weight[ids]", "result (4, 3)"], claim: METHODS,
      holds: true, lesson: "02-look-up" },
    { name: "Step by step, with all numbers", view: "pipeline", settings: { layer: "tiny", step: "look_up" },
      place: "Rows" },
  ]],
  ["6 Creating a Complete GPT Embedding Module", [
    { name: "GPTEmbedding: 12,866,816 parameters in total", scene: "memory",
      settings: { ...NOTEBOOK, tied: "1" }, claim: "This matrix", holds: true },
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
      claim: "Only one row of W", holds: true, lesson: "02-look-up" },
    { name: "“I” → 73, “an” → 256: unique vectors, all of length n_embd", scene: "lookup",
      settings: { vocab: "3000", dim: "8", ids: "73 256", words: "I an" }, shows: ["“I” 73", "“an” 256", "(2, 8)"] },
    { name: "Random at initialization; training adjusts them", scene: "training", settings: { step: "20" },
      claim: "Distance(cat, dog)", holds: true },
    { name: "n_embd gives flexibility", scene: "width", settings: { std: "1" }, claim: "A larger dimension",
      holds: true },
    { name: "“man” 1,098 and “woman” 1,290: rows of shape (n_embd,)", scene: "lookup",
      settings: { vocab: "3000", dim: "8", ids: "1098 1290", words: "man woman" },
      shows: ["“man” 1,098", "“woman” 1,290"] },
    { name: "“man” and “woman” in a trained table", scene: "real", settings: { word: "man" },
      lesson: "08-trained-table" },
    { name: "A gender-like difference (man vs. woman)", scene: "real", settings: { word: "man", direction: "gender" },
      shows: ["man − woman"], claim: GENDER, holds: true },
    { name: "An animate being or an object", scene: "real", claim: "Another one can", holds: null,
      settings: { word: "dog", direction: "living", count: "2" }, shows: ["living being − thing"] },
    { name: "Each dimension encodes some feature; dimensions are polysemantic", scene: "similar",
      settings: { noise: "0.1" }, claim: "Each dimension encodes", holds: null },
    { name: "The vectors are passed on to the Decoder Block", view: "pipeline",
      settings: { layer: "tiny", text: "I love dogs", step: "block" }, place: "Block" },
  ]],
  ["Embeddings in This Project", [
    { name: "n_embd of 768, 1024 or higher", scene: "memory", settings: { vocab: "32000", dim: "1024", tied: "1" },
      shows: ["125.0 MiB", "32,768,000"], claim: "Embeddings are often the largest", holds: null },
    { name: "RoPE for positional encoding by default, following LLaMA", scene: "rotary", settings: { q: "5" },
      claim: "RoPE is used for positional encoding", holds: true, lesson: "06-positions" },
    { name: "Updated through backpropagation", scene: "gradient", settings: { ids: "3.7.1" },
      claim: "Only the selected rows", holds: true, lesson: "03-gradients" },
    { name: "Tied weights: the embeddings are the final output projection", scene: "back", settings: { row: "5" },
      claim: "Weight tying halves", holds: true },
    { name: "Tied weights: training became unstable", scene: "memory", settings: { vocab: "4096", dim: "192" },
      shows: ["187.87", "4.715", "4.745"], claim: "Training with tied weights", holds: null,
      lesson: "07-tying-and-memory" },
  ]],
  ["Walkthrough Example: “I love dogs”", [
    { name: "1 Tokenization: a word-level tokenizer gives [73, 786, 2934]", scene: "lookup", settings: DOGS,
      shows: ["“I” 73, “love” 786, “dogs” 2,934"], lesson: "01-text-to-vectors" },
    { name: "2 Embedding Matrix: (vocab_size, 8)", scene: "lookup", settings: DOGS, shows: ["W (3,000, 8)"] },
    { name: "3 Lookup: selects the rows 73, 786 and 2,934", scene: "lookup", settings: DOGS, claim: METHODS,
      holds: true, shows: ["[0] ID 73 “I”", "[1] ID 786 “love”", "[2] ID 2,934 “dogs”"] },
    { name: "4 Output Tensor: (3, 8)", scene: "lookup", settings: DOGS, shows: ["result (3, 8)"] },
    { name: "The batch dimension: (1, 3, 8)", scene: "lookup", settings: { ...DOGS, ids: "73 786 2934 /" },
      shows: ["result (1, 3, 8)"] },
    { name: "The batch dimension is the first", scene: "broadcast",
      settings: { size: "1", length: "3", dim: "8", b: "0" }, claim: "The batch dimension", holds: null },
    { name: "The same sentence with all numbers, in a layer of 10 × 4", view: "pipeline",
      settings: { layer: "tiny", text: "I love dogs", step: "look_up" }, place: "Rows" },
  ]],
];

/** @type {Lesson["parts"]} */
const GLOSSARY = [
  ["Embedding Layer", [
    { name: "E: {1, …, V} → ℝᵈ counts from 1", scene: "lookup", settings: { ids: "1 4", first: "1" },
      shows: ["row t − 1", "IDs [1, 4]"], claim: "IDs count from 1", holds: null },
    { name: "Words, subwords, or other categorical IDs", scene: "pieces", settings: { word: "unhappiness" } },
    { name: "E(t) is the t-th row of E", scene: "lookup", settings: { ids: "4", first: "1" }, shows: ["IDs [4]"],
      claim: METHODS, holds: true },
    { name: "E(t) = onehot(t)ᵀ E", scene: "onehot", settings: { id: "3" }, claim: "Only one row of W", holds: true,
      lesson: "02-look-up" },
    { name: "The input layer of every modern language model", scene: "inside", settings: { model: "gpt2" },
      shows: ["wte.weight"] },
    { name: "Gradients update only the rows of the batch", scene: "gradient", settings: { ids: "3.7.1" },
      claim: "Each batch", holds: null, lesson: "03-gradients" },
    { name: "Similar tokens have similar embeddings after training", scene: "real", settings: { word: "king" },
      lesson: "08-trained-table" },
    { name: "The geometry of word2vec", scene: "real", settings: { word: "man", direction: "gender" },
      shows: ["man − woman"], claim: GENDER, holds: true },
  ]],
  ["Tied embeddings", [
    { name: "Input embedding and output unembedding share weights", scene: "back", settings: { row: "5" },
      shows: ["“cat”"], lesson: "07-tying-and-memory" },
    { name: "Tying halves the parameters of the embedding layers", scene: "memory", settings: { vocab: "1000",
      dim: "256", tied: "1" }, claim: "Weight tying halves", holds: true },
    { name: "Tying improves regularisation", scene: "memory", settings: { vocab: "2000", dim: "64", tied: "1" },
      claim: "Tying improves regularisation", holds: null, shows: ["128,000 parameters"] },
    { name: "Modern GPT models often tie", scene: "memory", settings: { vocab: "50257", dim: "768", tied: "1" },
      claim: "GPT-2, LLaMA", holds: false },
  ]],
  ["Subwords and positions", [
    { name: "From millions of words to tens of thousands of subwords", scene: "memory",
      settings: { vocab: "1000000", dim: "768", tied: "1" }, shows: ["2,929.7 MiB", "147.2 MiB"],
      claim: "Subwords reduce millions", holds: null, lesson: "01-text-to-vectors" },
    { name: "Unseen words are made of parts", scene: "pieces", settings: { word: "unhappiness" } },
    { name: "Positions 1, …, T have an embedding of their own", scene: "sum",
      settings: { step: "5", scheme: "learned" } },
    { name: "RoPE rather than learned positions", scene: "rotary", settings: { q: "5" },
      claim: "RoPE encodes relative", holds: true, lesson: "06-positions" },
    { name: "ALiBi rather than learned positions", view: "positions", settings: { scheme: "alibi" }, place: "ALiBi" },
  ]],
  ["Very large vocabularies", [
    { name: "The matrix can dominate the parameter count", scene: "memory",
      settings: { vocab: "50257", dim: "768", tied: "1" }, claim: "Embeddings are often the largest", holds: null },
    { name: "Factorised embeddings E = E1 E2 (ALBERT: 30,000 × 128 and 128 × 768)", scene: "memory",
      settings: { vocab: "30000", dim: "768", tied: "1" }, shows: ["3,938,304"], claim: "Factorised embeddings",
      holds: true, lesson: "07-tying-and-memory" },
    { name: "Compression for little memory: 4 bits a number", scene: "memory",
      settings: { vocab: "50257", dim: "768", tied: "1", dtype: "int4" }, shows: ["18.4 MiB"] },
  ]],
];

/** @type {Lesson[]} */
export const LESSONS = [
  { name: "Module 04: Embeddings", letter: "M", about: "a course module with code in NumPy and PyTorch",
    parts: MODULE_04 },
  { name: "Building LLMs From Scratch (Part 4): The Embedding Layer", letter: "N", about: "a notebook", parts: PART_4 },
  { name: "Embeddings", letter: "E", about: "a page about a small LLaMA-type model", parts: LLAMA },
  { name: "Understanding the Difference Between Embedding Layers and Linear Layers", letter: "L",
    about: "code that comes with a book", parts: LINEAR },
  { name: "Embedding Layer", letter: "G", about: "an entry of a glossary", parts: GLOSSARY },
];
