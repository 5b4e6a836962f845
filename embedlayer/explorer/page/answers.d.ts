/** Answers of the server, by `python tools/page_types.py --write`: edit answers.py or text_answers.py. */

export type Neighbor = [number, number];
export type LayoutState = "absent" | "running" | "ready" | "failed" | "cancelled";
export type TableState = "sound" | "faulty" | "undecided";
export type ModelPart = "table" | "position" | "input" | "blocks" | "norm" | "head" | "buffer" | "other";
export type MovedRow = [number, number, number, number];
export type TokenKind = "text" | "byte" | "special";
export type ModelTrace = BpeTrace | WordPieceTrace | UnigramTrace | WholeTrace;
export type TokenModel = "BPE" | "WordPiece" | "Unigram" | "WordLevel" | "names" | "ids";
export type DescribedScheme = UndrawnScheme | AdditiveScheme | SinusoidalScheme | RotationScheme | AlibiScheme | BiasScheme;

/** A float32 tensor in base64, little-endian; see `unpack` of the page. */
export interface PackedTensor {
  shape: number[];
  float32: string;
}

/** A token as the page shows it. */
export interface ShownToken {
  id: number;
  /** Readable text of the token; empty if the tokenizer does not know the ID. */
  decoded: string;
  /** The readable text with spaces and invisible characters in visible form, or `row ID`. */
  text: string;
  kind: TokenKind;
}

/** A source of the page. */
export interface SourceManifest {
  title: string;
  /** Path of its files; "" if there is none. */
  path: string;
  vocab_size: number;
  embed_dim: number;
  /** Kinds of data that it has, see `page_facts`. */
  has: string[];
  /** Class and arguments of the position scheme. */
  position: Record<string, unknown> | null;
  /** Factor on the rows. */
  scale: number | null;
  tied: boolean;
  /** Class of the table. */
  kind: string;
}

/** What the page requests first. */
export interface Manifest {
  version: string;
  /** How the user types the command that opened the page. */
  command: string;
  /** Address of the course; `""` if the package states no address of its documentation. */
  course: string;
  exported: boolean;
  /** What an exported page lacks, as sentences. */
  left_out?: string[];
  sources: SourceManifest[];
}

/** The readable text of each row, and the IDs of the special tokens. */
export interface TokenTexts {
  texts: string[];
  special: number[];
}

/** The share of the variance along each of the first `tokens.COMPONENTS` principal components, largest first. */
export interface AxisShares {
  explained: number[];
}

/** The state of the computation of the map, the share of the work that is done, and the error if it failed. */
export interface LayoutProgress {
  state: LayoutState;
  stage: string;
  share: number;
  error: string | null;
}

/** The share of the true nearest neighbours that the layout used; 1 if it was exact. */
export interface LayoutRecall {
  recall: number;
}

/** A cluster of the map: IDs of the tokens that name it, number of its rows, densest place, and level from 0 on. */
export interface Cluster {
  names: number[];
  size: number;
  x: number;
  y: number;
  level: number;
}

/** All clusters of the map, those of the first level first. */
export interface Clusters {
  clusters: Cluster[];
}

/** IDs of tokens that are added, and of tokens that are subtracted. */
export interface TokenSum {
  plus: number[];
  minus: number[];
}

/** A sum of tokens, and the ID of the nearest of all rows except the terms. */
export interface AnsweredSum {
  plus: number[];
  minus: number[];
  answer: number;
}

/** Examples of a source; all are tokens of it. */
export interface Examples {
  /** IDs of tokens. */
  words: number[];
  /** Whether these are words of everyday language. */
  is_everyday: boolean;
  sums: AnsweredSum[];
}

/** A column of the user's own: numbers, or texts as groups. */
export interface OwnColumn {
  name: string;
  groups: string[] | null;
}

/** A number of rows, and the IDs of the first. */
export interface RowList {
  rows: number;
  ids: number[];
}

/** What random rows of a table have; null if the rows are too few to tell. */
export interface RandomRange {
  noise_share: number | null;
  nearest: number | null;
}

/** Facts about a token; null where there is nothing to say, or where a number is not finite. */
export interface TokenFacts {
  id: number;
  /** One of `analysis.token_classes.KINDS`; null without a tokenizer. */
  kind: string | null;
  norm: number | null;
  /** Share of the rows, of those without NaN, that have a smaller norm. */
  norm_share: number | null;
  /** Under-training score, see `UnderTrained.scores`. */
  score: number | null;
  /** Share of the row that is noise, see `analysis.random_rows`. */
  noise_share: number | null;
  /** Cosine with the nearest row; null if the noise share shows that the row was trained. */
  nearest: number | null;
  /** "not learned", "never seen" or "cannot tell", see `RowVerdicts`; null for a learned row. */
  verdict: string | null;
  /** Why, as a sentence; null for a learned row. */
  because: string | null;
  /** What random rows have: a noise share of this or more, and a nearest cosine of this at most. */
  random: RandomRange;
  /** "broken" (NaN or infinity), "zero", "not_learned", "never_seen", "cannot_tell", "unchanged" (the row equals the one before training, up to a factor), "duplicate", "at_mean", "near_duplicate", "norm" (see `TableHealth`) and "unlike_variants" (see `TokenizerFit`). */
  findings: string[] | null;
  /** The verdict about the whole table, see `TableHealth.state`. */
  table_state: TableState;
  /** Sentences that say why the table is not sound; empty if it is. */
  table_reasons: string[];
  /** Rows that are equal to this one. */
  equal_rows: RowList | null;
  /** Rows that are nearly equal. */
  near_rows: RowList | null;
  /** ID and cosine of the spelling variants, largest cosine first. */
  variants: ([number, number | null])[] | null;
  /** Occurrences in the corpus of a run. */
  count?: number;
  /** 1 plus the number of tokens that occur more often. */
  count_rank?: number;
  /** Cosine of the rows before and after the training of a run. */
  cosine_before?: number | null;
  /** Norm before the training of a run. */
  norm_before?: number | null;
}

/** Where other views show a token; null where they do not. */
export interface TokenPlaces {
  /** A text for the view Pipeline that is split into this token and others. */
  text: string | null;
  /** Index of the token in that text. */
  at: number | null;
  /** Index among the tokens of the view Positions. */
  position: number | null;
}

/** A tensor of a model, or those of all blocks that have the same name and shape. */
export interface ModelTensor {
  /** Name in the checkpoint, with `*` in place of numbers. */
  name: string;
  /** How many tensors these are. */
  count: number;
  shape: number[];
  /** Numbers or bytes of all of them, see `ModelTensors`. */
  size: number;
  /** Where the model uses it; `"buffer"` for numbers that are no parameters. */
  part: ModelPart;
  /** Whether it repeats the numbers of the table, so that it is not counted. */
  is_copy: boolean;
}

/** One row of a table, read twice. */
export interface LookedUpRow {
  token: ShownToken;
  /** Result of the model's first step, `(D,)`. */
  inside: PackedTensor;
  /** Row of the table's tensor, read without the model, `(D,)`. */
  outside: PackedTensor;
  /** Largest absolute difference of the two; null if a number is not finite. */
  difference: number | null;
}

/** The tensors of a model, by name. */
export interface ModelTensors {
  title: string;
  /** Why there is no list; "" if there is one. */
  refused: string;
  /** What `size` counts: bytes where rows or weights are stored in a packed form. */
  unit: "parameters" | "bytes";
  /** Whether the head is the table. */
  is_tied: boolean;
  /** Whether the rows outside are read from a file; if not, from the table, which decodes packed rows. */
  is_file: boolean;
  tensors: ModelTensor[];
  /** Empty where only the sizes of a model are known, or an ID reads several rows. */
  rows: LookedUpRow[];
}

/** Groups of equal rows, with the IDs of the first. */
export interface RowGroups {
  rows: number;
  groups: number;
  ids: number[][];
}

/** What the rows of a table share, see `SharedVariance` of the analysis; null without rows, or without variance. */
export interface SharedVariance {
  rows: number;
  scale: number | null;
  offset_share: number | null;
  dimension: number;
  dimension_share: number | null;
  component_share: number | null;
  constant: number[];
  rank: number;
  most_rank: number;
  is_measured: boolean;
  /** Whether rows that never learned are left out. */
  learned_only: boolean;
}

/** Values from which on measures are at fault; `scale` is a range, and `nearest` the cosine of nearly equal rows. */
export interface HealthLimits {
  nearest: number;
  gap: number;
  variance: number;
  offset: number;
  rank: number;
  scale: [number, number];
}

/** What a run learned, in nats per token. */
export interface LossOfRun {
  validation_loss: number;
  unigram_entropy: number;
  gain: number;
}

/** Cosine of a row with its nearest row, of each row of a sample; null without two usable rows. */
export interface NearestCosines {
  rows: number;
  median: number | null;
  by_chance: number | null;
  mean_pair: number | null;
  ids: number[];
  cosines: number[];
}

/** How alike the rows of spelling variants are, see `TokenizerFit`. */
export interface SpellingFit {
  pairs: number;
  cosine: number | null;
  error: number | null;
  shift: number | null;
  shifted_cosine: number | null;
  /** Share of the pairs that are as unlike as unrelated tokens; by chance 1. */
  unlike: number | null;
  is_mixed: boolean;
  odd_rows: RowList;
}

/** A group of rows whose norms are beyond a gap, see `NormOutliers` of the analysis. */
export interface NormOutliers {
  rows: number;
  ids: number[];
  low: number;
  high: number;
  nearest: number;
  median: number;
}

/** A group of rows with nearly one direction, see `Cone` of the analysis. */
export interface Cone {
  rows: number;
  median_angle: number;
  edge_angle: number;
  mean_cosine: number;
  outside_cosine: number | null;
  peak: number;
  valley: number;
  contrast: number | null;
  never_occur: number | null;
  doubt: string;
}

/** A row that is not learned or was never seen. */
export interface UnderTrainedToken {
  id: number;
  text: string;
  kind: string | null;
  score: number;
  norm: number;
  verdict: string;
}

/** The rows of one kind of token, and how many of them are not learned or were never seen. */
export interface KindCount {
  kind: string;
  rows: number;
  under_trained: number;
}

/** Rows that are not learned or were never seen, and the cones that unused rows form. */
export interface UnderTrained {
  rows: number;
  threshold: number;
  explanation: string;
  tokens: UnderTrainedToken[];
  by_kind: KindCount[];
  cones: Cone[];
  undecided: Cone[];
}

/** A number of rows. */
export interface RowCount {
  rows: number;
}

/** How the rows compare with random ones; `share` is the estimated share of random rows. */
export interface RandomShare {
  noise_share: number | null;
  nearest: number | null;
  share: number | null;
}

/** The rows with each verdict, see `RowVerdicts`; `sentence` states their numbers. */
export interface Verdicts {
  learned: RowCount;
  not_learned: RowList;
  never_seen: RowList;
  cannot_tell: RowList;
  sentence: string;
  random: RandomShare;
}

/** Whether the columns of a table belong to the same rows, see `ColumnBlocks` of the analysis. */
export interface ColumnBlocks {
  correlation: number;
  apart: number;
  start: number;
  stop: number;
  shift: number;
  shifted_correlation: number;
}

/** The report of `table_health`. */
export interface Health {
  zero_rows: RowList;
  nonfinite_rows: RowList;
  at_mean: RowList;
  never_touched: RowList | null;
  duplicates: RowGroups;
  near_duplicates: RowGroups;
  /** Sentences that say why the table is not sound; empty if it is. */
  reasons: string[];
  /** Sentences about what is no fault. */
  notes: string[];
  /** Sentences that say what is wrong, worst first, or that the table is sound, then notes. */
  summary: string;
  is_sound: boolean;
  state: TableState;
  shared: SharedVariance;
  /** Names of measures in `shared`, "loss" and "rows" (not learned), because of which it is not sound. */
  at_fault: string[];
  limits: HealthLimits;
  /** Tokens that never occur in the training text; null if the occurrences are unknown. */
  absent: RowList | null;
  /** Null for a table that is not of a run. */
  loss: LossOfRun | null;
  nearest: NearestCosines;
  spelling: SpellingFit | null;
  norm_outliers: NormOutliers[];
  /** Texts of the listed rows, by ID. */
  texts: Record<string, string>;
  under_trained: UnderTrained;
  verdicts: Verdicts;
  /** Share of the rows that come from the start of another row; null if that cannot be told. */
  exchanged: number | null;
  /** Null if that cannot be told. */
  columns: ColumnBlocks | null;
}

/** The measures of `Spectrum` for random numbers, see `ChanceGeometry`. */
export interface ChanceMeasures {
  effective_rank: number;
  isotropy: number;
  isotropy_rows: number;
  mean_cosine_deviation: number;
}

/** Measures of the table's geometry, see `TableGeometry`. */
export interface Spectrum {
  /** Share of the variance along each principal direction, largest first. */
  explained: number[];
  effective_rank: number;
  isotropy: number;
  mean_cosine: number;
  chance: ChanceMeasures;
}

/** What a monitor read at a step, see `MonitorReport`; lists have the deciles of token frequency, rarest first. */
export interface Monitored {
  never_seen: number;
  norms: (number | null)[];
  update_ratios: (number | null)[];
  losses: (number | null)[];
  new_loss?: number | null;
  rows_not_finite: number;
  tokens_not_finite: string[];
  gradients_not_finite?: number;
  tokens_of_gradients: string[];
  logit_std?: number | null;
  log_z?: number | null;
  largest_logit?: number | null;
}

/** One line of a run's `metrics.jsonl`. */
export interface MetricsLine {
  step: number;
  loss: number;
  lr?: number;
  validation_loss?: number;
  validation_bits_per_byte?: number;
  /** The loss of each corpus of a mixture. */
  validation_losses?: number[];
  rows_touched?: number;
  tokens_per_second?: number;
  monitor?: Monitored;
}

/** The parts of a run's model; "" for what is not known. */
export interface MadeOf {
  table: string;
  position: string;
  head: string;
  layers: number | "";
  heads: number | "";
  parameters: number | "";
}

/** A token, and the text and the cosine of its nearest tokens before training. */
export interface ProbedToken {
  id: number;
  token: string;
  near: ([string, number])[];
}

/** The training progress of a run, and its options. */
export interface Metrics {
  /** Lines of `metrics.jsonl`, evenly spaced, with the last one. */
  lines: MetricsLine[];
  /** `ln V`, the loss in nats per token of a uniform distribution. */
  uniform_loss: number;
  options: Record<string, unknown>;
  made_of: MadeOf;
  neighbors_before: ProbedToken[];
}

/** Whether two tables are related, see `TableRelation`. */
export interface Relation {
  verdict: "same" | "changed" | "related" | "unrelated" | "unknown";
  headline: string;
  details: string;
  held_out: number | null;
  shuffled: number | null;
  as_stored: number | null;
  as_stored_shuffled: number | null;
}

/** Rows that only one of two tables has: their number, and the first tokens. */
export interface RowsOfOne {
  title: string;
  rows: number;
  tokens: string[];
}

/** How far the tokens that two tables share moved. */
export interface Comparison {
  /** Title of the other source. */
  title: string;
  /** Number of these tokens. */
  shared: number;
  mean_cosine: number;
  /** Residual of the alignment; null without one. */
  residual: number | null;
  /** Median ratio of a row's norm to that in the other table. */
  scale: number;
  relation: Relation;
  /** Rows that only this table has, and rows that only the other one has. */
  only: RowsOfOne[];
  /** Tokens of the training text if the occurrences are known, else all. */
  moved_most: MovedRow[];
  moved_least: MovedRow[];
  /** Tokens that never occur in the training text; null if the occurrences are unknown. */
  moved_never: MovedRow[] | null;
}

/** A float32 tensor in base64, little-endian; see `unpack` of the page. */
export interface PackedTensor {
  shape: number[];
  float32: string;
}

/** A token as the page shows it. */
export interface ShownToken {
  id: number;
  /** Readable text of the token; empty if the tokenizer does not know the ID. */
  decoded: string;
  /** The readable text with spaces and invisible characters in visible form, or `row ID`. */
  text: string;
  kind: TokenKind;
}

/** A token, and its bytes `start:stop` of the text in UTF-8, which are equal for a token without bytes. */
export interface TracedToken {
  id: number;
  decoded: string;
  text: string;
  kind: TokenKind;
  start: number;
  stop: number;
}

/** One merge of byte-pair encoding. */
export interface TracedMerge {
  /** Place of the left symbol among the symbols before this merge. */
  index: number;
  /** Place of the pair in the list of merges, from 0 on. */
  rank: number;
  /** The symbol that replaces the pair, as it is written in the vocabulary. */
  result: string;
}

/** How byte-pair encoding splits a pre-token; symbols are as they are written in the vocabulary. */
export interface BpeTrace {
  kind: "bpe";
  /** The symbols before the first merge. */
  symbols: string[];
  merges: TracedMerge[];
  /** Every pair that was adjacent at some moment and is in the list of merges, with its rank. */
  pairs: ([string, string, number])[];
  /** Visible form of each symbol. */
  shown: Record<string, string>;
  /** Whether the pre-token is a token of the vocabulary, and the model ignores merges then (`ignore_merges`). */
  whole: boolean;
}

/** One look-up: characters `start:stop` of the pre-token, in visible form, and the ID; null without such a token. */
export interface WordPieceTry {
  start: number;
  stop: number;
  text: string;
  id: number | null;
}

/** How WordPiece splits a pre-token: all look-ups, in order. */
export interface WordPieceTrace {
  kind: "wordpiece";
  tries: WordPieceTry[];
  /** Whether the pre-token has more characters than are read, so that it is the unknown token. */
  too_long: boolean;
}

/** A part of a pre-token in visible form, its log-probability, and the IDs of its tokens. */
export interface ScoredPart {
  text: string;
  score: number;
  ids: number[];
}

/** One segmentation of a pre-token, and the sum of the scores of its parts. */
export interface UnigramPath {
  pieces: ScoredPart[];
  score: number;
}

/** How a Unigram model splits a pre-token: the best segmentation, then the best of all others if there is one. */
export interface UnigramTrace {
  kind: "unigram";
  paths: UnigramPath[];
}

/** A pre-token that is looked up whole, and the ID of its token; null if it has none and is unknown, or left out. */
export interface WholeTrace {
  kind: "whole";
  id: number | null;
}

/** A pre-token, a part of a text that the model splits by itself; or an added token. */
export interface TracedPiece {
  /** First byte in the text in UTF-8. */
  start: number;
  /** First byte behind it. */
  stop: number;
  /** The pre-token as the model gets it, in visible form. */
  text: string;
  /** Whether it is an added token, which is cut out of the text before all else. */
  added: boolean;
  /** Index of its first token. */
  first: number;
  /** Index behind its last token. */
  behind: number;
  /** How the model splits it; null for an added token. */
  trace: BpeTrace | WordPieceTrace | UnigramTrace | WholeTrace | null;
}

/** How a text becomes tokens. */
export interface Tokenization {
  /** Name of the source or of the page's own tokenizer. */
  title: string;
  model: TokenModel;
  /** Rows of the table, or tokens of a tokenizer without a table. */
  vocab_size: number;
  /** Width of a row of the source. */
  embed_dim: number;
  /** The text in visible form. */
  text: string;
  /** The text after normalisation, in visible form; the text itself if `refused` is not "". */
  normalized: string;
  tokens: TracedToken[];
  pieces: TracedPiece[];
  /** Number of later tokens, which are not shown. */
  left_out: number;
  /** Number of all tokens of the text, without those that the tokenizer adds around it. */
  text_tokens: number;
  /** Why there are no pre-tokens; "" if there are. */
  refused: string;
}

/** What can be chosen for the tiny layer. */
export interface TinyChoices {
  texts: string[];
  words: string[];
  positions: string[];
  embed_dim: number;
}

/** What the view Pipeline lets the user choose. */
export interface PipelineChoices {
  /** Example texts of the model. */
  texts: string[];
  /** How the model reads texts. */
  reads: "tokenizer" | "names" | "ids";
  /** Why only the tiny layer can be shown; "" if the model can. */
  refused: string;
  tiny: TinyChoices;
  /** Words, with and without a space before them, whose tokens by the page's small tokenizer are known. */
  pieces: string[];
}

/** Consecutive rows of a table: the ID of the first, and the text of each. */
export interface TablePart {
  first: number;
  names: string[];
}

/** The rows around the looked-up ones. */
export interface RowsFacts {
  parts: TablePart[];
  /** Index of each token's part. */
  part_of: number[];
  /** Whether the part is the whole table. */
  whole: boolean;
}

/** The factor on the rows; 1 if the model does not scale. */
export interface ScaleFacts {
  factor: number;
  scaled: boolean;
}

/** Where the position scheme is applied, and its class. */
export interface PositionsFacts {
  kind: "added" | "rotation" | "bias" | "none";
  scheme: string;
}

/** The probability of dropout, null if the source states none; `shown_p` is that of the example. */
export interface DropoutFacts {
  p: number | null;
  shown_p: number;
}

/** The two channels of each pair, and the width of a head. */
export interface RotationFacts {
  channels: ([number, number])[];
  head_dim: number;
}

/** The number of heads with a bias, and whether it is for keys before the query only. */
export interface BiasFacts {
  causal: boolean;
  heads: number;
}

/** One vector inside of a block: its value in the step, its symbol, its formula, and how many numbers it has. */
export interface BlockVector {
  name: string;
  symbol: string;
  formula: string;
  size: number;
}

/** What the first block of a decoder computes. */
export interface BlockFacts {
  /** The vectors in the order of the computation. */
  vectors: BlockVector[];
  /** Term that RMSNorm adds to the mean square. */
  eps: number;
  /** Query heads, H. */
  heads: number;
  /** Key/value heads, G. */
  kv_heads: number;
  /** How many units of SwiGLU one column of `gate`, `up` and `product` is chosen from. */
  units_a_column: number;
  /** Number of blocks. */
  blocks: number;
}

/** A token with its probability and its logit. */
export interface LikelyToken {
  id: number;
  decoded: string;
  text: string;
  kind: TokenKind;
  chance: number | null;
  logit: number | null;
}

/** The most likely next tokens. */
export interface HeadFacts {
  /** The most likely tokens after each token of the text. */
  top_tokens: LikelyToken[][];
  /** Probability of the token that follows each token of the text but the last. */
  next: (number | null)[];
  tied: boolean;
  /** The tokens that can be appended, of a whole decoder. */
  candidates?: ShownToken[];
  /** Number of tokens by which the text can be longer, of a whole decoder. */
  tokens_left?: number;
  /** Term that the final norm adds to the mean square, of a whole decoder. */
  norm_eps?: number;
}

/** The norm of the gradient of one looked-up row, in all and through the look-up and the head. */
export interface RowGradient {
  id: number;
  decoded: string;
  text: string;
  kind: TokenKind;
  norm: number | null;
  through_rows: number | null;
  through_head: number | null;
  times: number;
}

/** The gradient of the loss for the rows of the table. */
export interface GradientFacts {
  /** Nats per token. */
  loss: number | null;
  /** Number of rows with a gradient. */
  touched: number;
  /** Number of rows that were looked up. */
  used: number;
  touched_by_look_up: number;
  touched_by_head: number;
  tied: boolean;
  /** The looked-up rows, largest gradient first. */
  rows: RowGradient[];
  /** Number of rows in one bin of the picture of all rows. */
  rows_a_bin: number;
}

/** Nothing beside the values. */
export interface NoFacts {
}

/** The facts of each step that has some, by the name of the step. */
export interface StepFacts {
  look_up: RowsFacts;
  scale: ScaleFacts;
  position: PositionsFacts;
  dropout: DropoutFacts;
  rotation: RotationFacts;
  bias: BiasFacts;
  block: BlockFacts;
  head: HeadFacts;
  gradient: GradientFacts;
}

/** One step from text to gradient. */
export interface PipelineStep {
  name: string;
  title: string;
  formula: string;
  sentence: string;
  note: string;
  /** Whether the step changes nothing in this model. */
  idle: boolean;
  values: Record<string, PackedTensor>;
  /** The entry of `StepFacts` with the name of the step. */
  facts: RowsFacts | ScaleFacts | PositionsFacts | DropoutFacts | RotationFacts | BiasFacts | BlockFacts | HeadFacts | GradientFacts | NoFacts;
}

/** A text and all steps from its tokens to the gradient of its loss. */
export interface Pipeline {
  text: string;
  /** How the text was split, as sentences; "" for a tokenizer. */
  how: string;
  tokens: ShownToken[];
  /** Number of later tokens, which are not shown. */
  left_out: number;
  vocab_size: number;
  embed_dim: number;
  steps: PipelineStep[];
  /** IDs of tokens that follow those of the text. */
  appended: number[];
}

/** The most likely next tokens after each block, see `explorer.logit_lens.LogitLens`. */
export interface LogitLens {
  /** IDs by layer, position and rank. */
  top_ids: number[][][];
  /** Their probabilities, with layers and positions in one dimension. */
  top_probs: PackedTensor;
  /** Entropy of the probabilities by layer and position, in nats. */
  entropy: PackedTensor;
  /** Probability of the following token. */
  next_probs: PackedTensor;
  /** Rank of the following token, from 1 on. */
  next_ranks: number[][];
  /** Every listed token. */
  tokens: ShownToken[];
}

/** What the page shows of every position scheme. */
export interface SchemeFacts {
  /** Class and arguments. */
  name: string;
  /** Type of the layers that use it, in a model with several schemes; else "". */
  layers: string;
  /** Number of positions that it has rows for or was trained on; null if unknown. */
  trained_length: number | null;
}

/** No scheme, or one that does more to queries and keys than rotate pairs of channels: the page draws none. */
export interface UndrawnScheme {
  name: string;
  layers: string;
  trained_length: number | null;
  kind: "none" | "undrawn";
}

/** The vectors that are added at the first positions. */
export interface AdditiveScheme {
  name: string;
  layers: string;
  trained_length: number | null;
  kind: "learned";
  embed_dim: number;
  rows: PackedTensor;
  /** Number of position vectors. */
  checked: number;
  /** Number of different ones. */
  distinct: number;
}

/** The arguments of `SinusoidalPositionalEmbedding`; `checked` and `distinct` as in `AdditiveScheme`. */
export interface SinusoidalScheme {
  name: string;
  layers: string;
  trained_length: number | null;
  kind: "sinusoidal";
  embed_dim: number;
  base: number;
  layout: "interleaved" | "concatenated" | "cosines_first";
  endpoint: boolean;
  offset: number;
  padding_idx: number | null;
  scale: number;
  checked: number;
  distinct: number;
}

/** Rotations of pairs of channels, `(a, b) -> (a cos - b sin, a sin + b cos)`, see `explorer.rotation`. */
export interface RotationScheme {
  name: string;
  layers: string;
  trained_length: number | null;
  kind: "rotation";
  /** Width of a head. */
  head_dim: number;
  /** The two channels of each pair. */
  channels: ([number, number])[];
  /** For each position the cosine and the sine of each pair, and the factor of all other channels. */
  queries: PackedTensor;
  /** The same of keys; null if it is equal. */
  keys: PackedTensor | null;
  /** What the numbers are for, if they depend on the length of the text. */
  note: string;
}

/** The slope of each head. */
export interface AlibiScheme {
  name: string;
  layers: string;
  trained_length: number | null;
  kind: "alibi";
  num_heads: number;
  slopes: number[];
}

/** The bias of each head by distance; the middle column is distance 0, later ones are keys after the query. */
export interface BiasScheme {
  name: string;
  layers: string;
  trained_length: number | null;
  kind: "relative";
  biases: PackedTensor;
  causal: boolean;
}

/** A token that the view Positions places at two positions. */
export interface PlacedToken {
  id: number;
  text: string;
  kind: TokenKind;
}

/** The position schemes of a model, that of the first block first, and N example tokens. */
export interface PositionsData {
  schemes: DescribedScheme[];
  embed_dim: number;
  tokens: PlacedToken[];
  /** Rows of the tokens with the scale applied, `(N, D)`. */
  vectors: PackedTensor;
  /** Queries of the first block before positions are applied, `(H, N, K)`; of a decoder with a scheme inside attention. */
  queries?: PackedTensor;
  /** Keys of the same block, `(G, N, K)`. */
  keys?: PackedTensor;
}

/** The answer to the request of each name. */
export interface Answers {
  "manifest": Manifest;
  "tokens": TokenTexts;
  "axes": AxisShares;
  "coordinates": ArrayBuffer;
  "layout-start": LayoutProgress;
  "layout-cancel": LayoutProgress;
  "layout-progress": LayoutProgress;
  "layout": ArrayBuffer;
  "layout-recall": LayoutRecall;
  "clusters": Clusters;
  "cluster-of": ArrayBuffer;
  "folded": ArrayBuffer;
  "norms": ArrayBuffer;
  "examples": Examples;
  "frequencies": ArrayBuffer;
  "neighbors": Neighbor[];
  "along": ArrayBuffer;
  "columns": OwnColumn[];
  "column": ArrayBuffer;
  "encode": number[];
  "vectors": ArrayBuffer;
  "nearest": ArrayBuffer;
  "card": TokenFacts;
  "card-places": TokenPlaces;
  "cards": ArrayBuffer;
  "pipeline-choices": PipelineChoices;
  "pipeline": Pipeline;
  "tokenization": Tokenization;
  "logit-lens": LogitLens;
  "positions": PositionsData;
  "health": Health;
  "verdicts": ArrayBuffer;
  "noise-shares": ArrayBuffer;
  "spectrum": Spectrum;
  "metrics": Metrics;
  "tensors": ModelTensors;
  "compare": Comparison;
  "compare-places": ArrayBuffer;
  "compare-neighbors": ([string, number])[];
}
