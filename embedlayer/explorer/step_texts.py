"""Title, formula and explanation of each step of the pipeline, for readers of the page."""

TITLES = {
    "tokenize": ("Tokenize", "text → pre-tokens → tokens → id[t]"),
    "one_hot": ("One-hot", "e[t, v] = 1 if v = id[t], else 0"),
    "look_up": ("Rows", "e · W, which is W[id[t]]"),
    "scale": ("Scale", "x = s · W[id[t]]"),
    "types": ("Types", "x + types[0]"),
    "position": ("Positions", "p[t]"),
    "sum": ("Sum", "x[t] + p[t]"),
    "injections": ("Other tables", "x[t] + vectors of other tables"),
    "mask": ("Mask", "0 for padding"),
    "length_mask": ("Mask", "0 for padding"),
    "token_dropout": ("Token dropout", "0 for the mask token, the others rescaled"),
    "streams": ("Streams", "x and the vectors that predict later tokens"),
    "codes": ("Codes", "x and the sum of the rows of codes"),
    "norm": ("Normalise", "LayerNorm(x)"),
    "project": ("Project", "x · P"),
    "dropout": ("Dropout", "0 with probability p, else x / (1 − p)"),
    "rotation": ("Rotation", "(a, b) → (a cos θ − b sin θ, a sin θ + b cos θ), θ = t · base^(−2i/K)"),
    "bias": ("Bias", "q[i] · k[j] / √K + bias[h, i, j]"),
    "block": ("Block", "y = x′ + SwiGLU(RMSNorm(x′)), x′ = x + attention(RMSNorm(x))"),
    "head": ("Next token", "p = softmax(head(norm(x)) / temperature)"),
    "head only": ("Head", "p = softmax(head(x))"),
    "lens": ("Logit lens", "softmax(head(norm(x[l, t])))"),
    "gradient": ("Gradient", "∂loss / ∂W"),
}
"""Title and formula of each step; a sentence may have its own. `head_formula` writes out those of a model's head."""

SENTENCES = {
    "tokenize": "The tokenizer normalises the text and splits it into pre-tokens; its model splits each of them into "
    "tokens of the vocabulary. The ID of a token is the number of its row.",
    "tokenize names": "Each word is looked up among the names of the rows. The ID of a token is the number of its row.",
    "tokenize ids": "The text lists IDs: each is the number of a row.",
    "one_hot": "Each token is a vector with a 1 at its ID and zeros at all other entries of the vocabulary.",
    "look_up": "All products but those of one row are 0, so the sum is that row. Therefore nothing is multiplied in "
    "practice: the row is read from the table.",
    "scale": "Every number of the row is multiplied by the same factor.",
    "no scale": "This model uses its rows without a factor; others multiply them, often by √D.",
    "types": "A vector for the token's segment is added; here all tokens are in the first segment.",
    "position": "Each position in the text has its own vector, the same for every token.",
    "position none": "This model adds no information about positions to the input.",
    "position rotate": "Nothing is added here: this scheme rotates queries and keys inside attention, in the step "
    "Rotation.",
    "position bias": "Nothing is added here: this scheme is a bias on the scores inside attention, in the step Bias.",
    "sum": "Token and position become one vector: the same token at two positions now has two vectors.",
    "injections": "The vectors of further tables are added, such as those of the n-gram that ends at the token.",
    "mask": "The vectors of padding become zero; this text has no padding.",
    "length_mask": "The vectors of padding become zero; this text has no padding.",
    "token_dropout": "The vector of the mask token becomes zero, and the others are multiplied to make up for it.",
    "streams": "Vectors that predict later tokens are appended.",
    "codes": "The sum of the rows of K streams of codes is added, or takes the place of some tokens; this text has no "
    "codes.",
    "norm": "Each vector is shifted to mean 0 and scaled to variance 1; each dimension has its own weight and bias.",
    "project": "Narrow rows are projected to the width of the blocks.",
    "dropout": "In training only: random numbers become 0, others in each step, and the rest grow to keep the mean. "
    "In use, nothing is dropped.",
    "no dropout": "This model drops nothing. Others set random numbers to 0 in training, as in this example.",
    "rotation": "Inside attention, each pair of numbers of a query or key is rotated by an angle that grows with the "
    "position: the first pairs fast, the last slowly.",
    "bias": "A number that depends on the distance to the key is added to each score, in each head another one.",
    "block": "A block adds two vectors to that of each token: what attention reads from the tokens, weighted by the "
    "softmax of the scores, and what SwiGLU computes from the token's own numbers. RMSNorm comes before each. The next "
    "block reads the sum, the residual stream.",
    "head": "The final norm makes the output x of the last block the hidden state h. The head multiplies h by all rows "
    "of W: a score for each token, the logit z. Softmax makes the logits the probabilities of the next token.",
    "head only": "Only the embedding layer of this source is known, so there are no blocks to read. The blocks and the "
    "final norm are left out, and the head is applied to the input vectors x. Its scores are not the model's "
    "predictions.",
    "lens": "The hidden state after each block goes through the model's own final norm and head, as if no block "
    "followed. The last row is the model's own output; earlier blocks were not trained to be read in this way.",
    "gradient": "The head is tied: it multiplies by the same table, and every row takes part in the scores. So every "
    "row gets a gradient through the head; looked-up rows also get one through the look-up.",
    "gradient untied": "Only rows that were looked up get a gradient; all other rows of the table stay the same. The "
    "head has rows of its own, and those all get one.",
}
"""Explanation of each step for readers."""
