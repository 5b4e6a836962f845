/** The small vocabulary of the story: ten words, with the IDs of seed 001, and a tokenizer of whole words. */

/** Word of each ID. */
export const WORDS = ["<pad>", "the", "<unk>", "code", "on", "cat", "mat", "sat", "and", "dog"];

export const PADDING = 0;
export const UNKNOWN = 2;

/**
 * Split a text into words and punctuation; return each with its ID. Capitals are ignored.
 * @param {string} text
 * @returns {{word: string, id: number}[]}
 */
export function tokenize(text) {
  const words = text.toLowerCase().match(/[\p{L}\p{N}]+|[^\s\p{L}\p{N}]/gu) ?? [];
  return words.map((word) => {
    const id = WORDS.indexOf(word);
    return { word, id: id > UNKNOWN || id === 1 ? id : UNKNOWN };
  });
}
