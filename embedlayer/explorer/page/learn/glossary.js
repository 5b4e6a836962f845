/** The special words of the story, each with a definition in one or two sentences. */

/** Pattern of a word and its definition. The first group that matches in a text is explained. */
/** @type {[name: string, pattern: string, definition: string][]} */
export const GLOSSARY = [
  ["tokenizer", "tokenizer", "A program that splits a text into tokens (words, parts of words, punctuation) and gives "
    + "the ID of each."],
  ["pre-token", "pre-tokens?", "A part of a text that the tokenizer cuts out before its model runs, mostly a word with "
    + "the space before it. No token goes beyond it."],
  ["BPE", "BPE|byte-pair encoding", "Byte-pair encoding: it begins with bytes or characters and joins two neighbours "
    + "at a time, in the order of a list of merges."],
  ["merge", "merges?", "Two tokens that become one. Training adds one merge at a time, that of the most frequent pair "
    + "of neighbours; its rank is its place in this list."],
  ["UTF-8", "UTF-8", "The usual way to write text as bytes: one byte for a letter of English, two to four for other "
    + "characters."],
  ["vocabulary", "vocabulary", "The fixed list of all tokens that a model knows. Its size is V."],
  ["one-hot vector", "one-hot vectors?", "A vector with a single 1, at the index of the ID, and zeros elsewhere."],
  ["loss", "loss", "A number that says how wrong the model's predictions are. Training makes it smaller."],
  ["gradient", "gradients?", "For each number of the model: how fast the loss grows if that number grows. A training "
    + "step moves each number against its gradient."],
  ["dL/dW", "dL/dW", "The gradient of the loss L with respect to the table W: one number for each number of W."],
  ["transpose ᵀ", "one_hotᵀ", "The one-hot vectors of all tokens as a matrix with rows and columns exchanged."],
  ["SGD", "SGD", "Stochastic gradient descent: number − learning rate · gradient. No gradient, no change."],
  ["AdamW", "AdamW", "The usual optimizer of language models. It divides by the typical size of a number's gradient, "
    + "and adds momentum and weight decay."],
  ["momentum", "momentum", "An average over the gradients of the last steps. It still moves a row some steps after its "
    + "last gradient."],
  ["weight decay", "weight decay", "Each step makes every number a little smaller, also those without a gradient."],
  ["RowAdamW", "RowAdamW", "An optimizer with the results of AdamW that writes only the rows that were looked up in "
    + "the step. It applies the updates of another row when that row is read."],
  ["padding", "<pad>|padding row|padding", "A token that fills short texts up to the length of the longest of a "
    + "batch. It has no meaning, so its row is kept at zero."],
  ["batch", "batch", "The texts, or windows of a text, of one training step. Their number is B."],
  ["window", "windows?", "T tokens of a text, one after another: the input of one row of a batch."],
  ["stride", "stride", "The number of tokens from the start of one window to the start of the next."],
  ["target", "targets?", "The token that the model should predict at a place: the one that follows in the text."],
  ["drop_last", "drop_last", "Whether a last batch that is not full is left out."],
  ["broadcasting", "broadcasting|broadcast", "The rule by which PyTorch adds tensors of different shapes: a size that "
    + "is missing or 1 is repeated, without a copy."],
  ["nats", "nats", "The unit of a loss with natural logarithms: a loss of x nats is a probability of e^(−x) for the "
    + "right token."],
  ["output head", "output head|tied head|untied head", "The last matrix of a model, V × D: its product with a vector "
    + "gives a score for each token. Tied: it is the input table itself."],
  ["softmax", "softmax", "The function that makes probabilities of scores: e^score, divided by the sum over all "
    + "tokens. So every token takes part."],
  ["hidden state", "hidden states?", "The vector of a token between the blocks of a model. The one after the last "
    + "block and the final norm is the input of the head."],
  ["final norm", "final norm", "The normalisation after the last block. It gives every hidden state about the same "
    + "length before the head reads it."],
  ["logit", "logits?", "The score of a token before softmax: the dot product of the hidden state and the token's row."],
  ["cross entropy", "cross[- ]entropy", "The loss of language models: −ln of the probability of the token that really "
    + "follows, in the mean over all tokens."],
  ["cosine", "cosines?", "Of two vectors: their dot product divided by their lengths, 1 for the same direction, 0 "
    + "for a right angle, −1 for opposite directions. Of an angle: the sine of the angle + 90°."],
  ["heat map", "heat map", "A picture of a table of numbers: each number is a coloured cell."],
  ["PCA", "PCA|PC1", "Principal component analysis: it rotates the vectors so that the first axis (PC1) shows most of "
    + "their variance, the second one (PC2) most of the rest."],
  ["variance", "variance", "The mean squared distance of numbers from their mean; the square of the standard "
    + "deviation."],
  ["standard deviation", "standard deviation|std", "How far random numbers typically are from their mean. At the start "
    + "of training, rows are drawn at random with this width around 0."],
  ["attention weights", "attention weights?", "The softmax of the scores of one query: how much it reads from each "
    + "token. They add up to 1."],
  ["attention", "attention", "The part of a model in which each token reads from other tokens, more from those with a "
    + "higher score."],
  ["score", "scores?", "The dot product of two vectors: the sum of the products of their numbers. In attention: how "
    + "much one token reads from another."],
  ["permutation-invariant", "permutation-invariant", "The result stays the same if the inputs change places."],
  ["equivariant", "equivariant", "If the inputs change places, the results change places in the same way."],
  ["causal mask", "causal mask", "The rule of a decoder: a token reads from itself and from tokens before it only."],
  ["decoder", "decoder", "A model that predicts the next token, such as GPT-2 or LLaMA."],
  ["sinusoidal", "sinusoidal|sinusoids?", "Made of sines and cosines of the position, with one wavelength for each "
    + "pair of dimensions."],
  ["dimension", "dimensions?", "The index of a number in a vector. A vector of width D has the dimensions 0 to D − 1."],
  ["width D", "width D", "How many numbers a row of the table has. In code: embedding_dim, n_embd, d_model or "
    + "hidden_size."],
  ["base 10,000", "base 10,000", "The number in 10000^(2i/D), by which position is divided in pair i. A larger base "
    + "gives longer wavelengths."],
  ["wavelength", "short waves|wavelengths?", "The number of positions after which a sine repeats."],
  ["linear function", "linear function", "A product with a matrix. Here the matrix depends on the offset k only, not "
    + "on the position."],
  ["parameters", "parameters", "The numbers of a model that training changes."],
  ["tensor", "tensors?", "A block of numbers with a shape: a vector, a matrix such as V × D, or more dimensions."],
  ["checkpoint", "checkpoint", "The files of a model after training: the numbers of its tensors, each with a name, and "
    + "a configuration with its sizes."],
  ["context length T", "context length", "The largest number of tokens that a text may have in a model; a table of "
    + "learned positions has T rows."],
  ["extrapolate", "extrapolate", "To work on texts longer than those of the training."],
  ["RoPE", "RoPE|rotary positions", "Rotary positions: queries and keys inside attention are rotated by an angle "
    + "proportional to the position; nothing is added to the row."],
  ["query and key", "quer(?:y|ies)", "Two vectors that attention computes from the vector of a token. Their dot "
    + "product, of the query of one token and the key of another, is the score."],
  ["radian", "radians?|rad", "A unit of angles: 2π radians, about 6.28, are a full rotation."],
  ["residual stream", "residual stream", "The vector of a token from block to block. Each part of a block reads it, "
    + "and adds its result to it."],
  ["RMSNorm", "RMSNorm", "x / √(mean(x²) + ε), times a weight for each dimension: it brings a vector of width D to a "
    + "length of about √D."],
  ["SwiGLU", "SwiGLU", "The part of a block that computes with each token alone: two matrix products g and u, then "
    + "silu(g) · u with silu(g) = g / (1 + e^(−g)), then a third matrix back to width D."],
  ["ALiBi", "ALiBi", "Attention with linear biases: each score gets a penalty in proportion to the distance of the two "
    + "tokens."],
  ["nn.Embedding", "nn.Embedding", "The table lookup of PyTorch. It draws rows with standard deviation 1."],
  ["normalisation", "normali[sz]ation", "A step that divides a vector by its typical size, so that its length no "
    + "longer matters."],
  ["tied", "untied|tied|tying", "Weight tying: the output head uses the input table, so it is stored once."],
  ["float32", "float32", "A number of 4 bytes. bfloat16 has 2 bytes, int8 has 1, int4 has half a byte."],
  ["MiB", "MiB", "1,048,576 bytes = 1024 · 1024. MB is 1,000,000 bytes."],
  ["mutual", "mutual", "In both directions: A is in the list of B, and B in the list of A."],
];
