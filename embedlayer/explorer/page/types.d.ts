/** Types that several modules of the page share. Fields of the server's data are named as in Python. */

export type Rgb = [number, number, number];
export type Point = [number, number];
export type Child = Node | string | number | null | undefined | false | Child[];
export type Context2D = CanvasRenderingContext2D;

/** The page's colours as CSS writes them; `series` are eight colours that can be told apart. */
export interface Theme {
  dark: boolean;
  series: string[];
  page: string;
  paper: string;
  raised: string;
  ink: string;
  muted: string;
  line: string;
  accent: string;
  "accent-soft": string;
  warm: string;
  good: string;
  bad: string;
}

// The data of the server

export type Params = Record<string, string | number>;
export type Load = (name: string, params?: Params) => Promise<any>;

export interface Data {
  load: Load;
  /** As `load`, but always sent: for answers that change. */
  ask: Load;
  /** As `ask`, for a request that starts or ends something; an exported page has none. */
  act: Load;
  exported: boolean;
}

export interface SourceManifest {
  title: string;
  path: string;
  vocab_size: number;
  embed_dim: number;
  has: string[];
  tied: boolean;
  kind: string;
  scale: number | null;
}

export interface Manifest {
  version: string;
  /** How the user types the command that opened the page. */
  command: string;
  exported: boolean;
  left_out?: string[];
  sources: SourceManifest[];
}

/** A float32 tensor in base64. */
export interface PackedTensor {
  shape: number[];
  float32: string;
}

export interface ShownToken {
  id: number;
  decoded: string;
  text: string;
  kind: "text" | "byte" | "special";
}

/** What `explorer.example_tokens.examples` sends: IDs of tokens. */
export interface Examples {
  words: number[];
  is_everyday: boolean;
  sums: (TokenSum & { answer: number })[];
}

/** The state of the computation of the neighbour layout. */
export interface LayoutProgress {
  state: "absent" | "running" | "ready" | "failed" | "cancelled";
  stage: string;
  share: number;
  error: string | null;
}

/** A cluster of the neighbour layout: IDs of the tokens that name it, and its densest place. */
export interface Cluster {
  names: number[];
  size: number;
  x: number;
  y: number;
  level: number;
}

/** The neighbour layout; a row that never learned has NaN coordinates. */
export interface Layout {
  xs: Float32Array;
  ys: Float32Array;
  /** Share of the true nearest neighbours that the layout used. */
  recall: number;
  clusters: Cluster[];
  /** Number of each token's cluster at the first level; -1 for none. */
  of: Int32Array;
}

export interface PipelineStep {
  name: string;
  title: string;
  formula: string;
  sentence: string;
  note: string;
  /** Whether the step changes nothing in this model. */
  idle: boolean;
  values: Record<string, PackedTensor>;
  facts: Record<string, any>;
}

export interface Pipeline {
  text: string;
  /** How the text was split; "" for a tokenizer. */
  how: string;
  tokens: ShownToken[];
  left_out: number;
  vocab_size: number;
  embed_dim: number;
  steps: PipelineStep[];
  /** IDs of tokens that follow those of the text. */
  appended: number[];
}

/** What `explorer.logit_lens.answer` sends: layers, positions, tokens. */
export interface LogitLens {
  top_ids: number[][][];
  top_probs: PackedTensor;
  entropy: PackedTensor;
  next_probs: PackedTensor;
  next_ranks: number[][];
  tokens: ShownToken[];
}

/** What the view Pipeline lets the user choose. */
export interface PipelineChoices {
  texts: string[];
  reads: "tokenizer" | "names" | "ids";
  /** Why only the tiny layer can be shown; "" if the model can. */
  refused: string;
  tiny: { texts: string[]; words: string[]; positions: string[]; embed_dim: number };
}

export interface LikelyToken extends ShownToken {
  chance: number | null;
}

/** The gradient of one looked-up row. */
export interface RowGradient extends ShownToken {
  norm: number;
  through_rows: number;
  through_head: number;
  times: number;
}

/** A position scheme as `explorer.positions.described` sends it. */
export interface DescribedScheme {
  kind: string;
  name: string;
  layers: string;
  trained_length: number | null;
  checked?: number;
  distinct?: number;
  [field: string]: any;
}

export interface PositionsData {
  schemes: DescribedScheme[];
  embed_dim: number;
  tokens: { id: number; text: string; kind: string }[];
  vectors: PackedTensor;
  queries?: PackedTensor;
  keys?: PackedTensor;
}

export interface UnderTrainedToken {
  id: number;
  text: string;
  kind: string | null;
  score: number;
  norm: number;
}

export interface RowList {
  rows: number;
  ids: number[];
}

/** "undecided" if nothing shows that the table was trained. */
export type TableState = "sound" | "faulty" | "undecided";

/** What the rows of a table share, see `SharedVariance` of the analysis; null of fewer rows than can be measured. */
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

export interface Health {
  zero_rows: RowList;
  nonfinite_rows: RowList;
  at_mean: RowList;
  never_touched?: RowList | null;
  duplicates: RowGroups;
  near_duplicates: RowGroups;
  /** Sentences that say what is wrong, worst first. */
  summary: string;
  is_sound: boolean;
  state: TableState;
  shared: SharedVariance;
  /** Names of measures in `shared`, and "loss", because of which the table is not sound. */
  at_fault: string[];
  /** Values from which on measures in `shared` are at fault. */
  limits: { variance: number; offset: number; rank: number; scale: Point };
  /** Tokens that never occur in the training text; null if the occurrences are unknown. */
  absent: RowList | null;
  /** What the run learned, in nats per token; null for a table that is not of a run. */
  loss: { validation_loss: number; unigram_entropy: number; gain: number } | null;
  /** Cosine of a row with its nearest row; null without two usable rows. */
  nearest: { rows: number; median: number | null; by_chance: number | null; mean_pair: number | null };
  spelling: {
    pairs: number;
    cosine: number;
    error: number;
    shift: number;
    shifted_cosine: number;
    /** Share of the pairs that are as unlike as unrelated tokens; by chance 1. */
    unlike: number;
    is_mixed: boolean;
    odd_rows: RowList;
  } | null;
  norm_outliers: (RowList & { low: number; high: number; nearest: number; median: number })[];
  /** Texts of the listed rows, by ID. */
  texts: Record<string, string>;
  /** Rows inside a cone; rows that are named as equal, or at the mean, are not counted. */
  under_trained: {
    rows: number;
    threshold: number;
    explanation: string;
    tokens: UnderTrainedToken[];
    by_kind: { kind: string; rows: number; under_trained: number }[];
    cones: Cone[];
    undecided: Cone[];
  };
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

export interface RowGroups {
  rows: number;
  groups: number;
  ids: number[][];
}

export interface Spectrum {
  explained: number[];
  effective_rank: number;
  isotropy: number;
  mean_cosine: number;
  /** The same measures of random numbers. */
  chance: {
    effective_rank: number;
    isotropy: number;
    isotropy_rows: number;
    mean_cosine_deviation: number;
  };
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
}

export interface Metrics {
  lines: MetricsLine[];
  uniform_loss: number;
  options: Record<string, any>;
  made_of: Record<string, any>;
  neighbors_before: { id: number; token: string; near: [string, number][] }[];
}

/** `norm` is the ratio of the row's norms over the median ratio. */
export type MovedRow = [id: number, otherId: number, cosine: number, norm: number];

export interface Comparison {
  title: string;
  shared: number;
  mean_cosine: number;
  residual: number | null;
  /** Median ratio of a row's norm to that in the other table. */
  scale: number;
  relation: {
    verdict: "same" | "changed" | "related" | "unrelated" | "unknown";
    sentence: string;
    held_out: number | null;
    shuffled: number | null;
    as_stored: number | null;
    as_stored_shuffled: number | null;
  };
  /** What only this table and only the other one has: the number of rows, and the first tokens. */
  only: { title: string; rows: number; tokens: string[] }[];
  moved_most: MovedRow[];
  moved_least: MovedRow[];
  /** Tokens that never occur in the training text; null if the occurrences are unknown. */
  moved_never: MovedRow[] | null;
}

/** Facts about a token; null where there is nothing to say. Numbers about a run are missing for other sources. */
export interface TokenFacts {
  id: number;
  kind: string | null;
  norm: number | null;
  /** Share of the rows that have a smaller norm. */
  norm_share: number | null;
  score: number | null;
  findings: string[] | null;
  table_state: TableState;
  /** Sentences that say why the table is not sound; empty if it is. */
  table_reasons: string[];
  equal_rows: RowList | null;
  near_rows: RowList | null;
  variants: [id: number, cosine: number | null][] | null;
  count?: number;
  count_rank?: number;
  cosine_before?: number | null;
  norm_before?: number | null;
}

/** Where other views show a token: a text and the index in it, and the index among the tokens of Positions. */
export interface TokenPlaces {
  text: string | null;
  at: number | null;
  position: number | null;
}

// Views

/** The token that is chosen in the whole page. */
export interface ChosenToken {
  get(): number | null;
  /** Choose a token that the view shows; null for none. */
  choose(id: number | null): void;
}

export interface ViewState {
  get(key: string): string | undefined;
  get(key: string, fallback: string): string;
  /** Return a copy of all keys and values. */
  all(): Record<string, string>;
  /** Change the state and the URL; null and undefined remove a key. */
  set(changes: Record<string, any>): void;
  /** As `set`, with a new entry in the browser's history: Back returns to the state before. */
  push(changes: Record<string, any>): void;
}

export interface ViewContext {
  manifest: SourceManifest & { exported: boolean; left_out: string[] };
  sources: SourceManifest[];
  source: number;
  /** How the user types the command that opened the page. */
  command: string;
  theme: () => Theme;
  data: Data;
  state: ViewState;
  token: ChosenToken;
}

export interface OpenView {
  close(): void;
  /** Show the token that was chosen outside of the view; null for none. */
  tokenChosen?(id: number | null): void;
  /** Follow a change of the URL. */
  stateChanged?(): void;
}

export interface View {
  id: string;
  title: string;
  sentence: string;
  /** Create a link beside the sentence, for readers who look for another view. */
  link?: () => HTMLElement;
  needs: string[];
  keys?: [string, string][];
  open(element: HTMLElement, context: ViewContext): Promise<OpenView>;
}

// Pictures

/** Numbers row by row; NaN for a missing one. */
export interface Matrix {
  rows: number;
  cols: number;
  data: Float32Array | Float64Array;
}

export interface Closable {
  element: HTMLElement;
  close(): void;
}

export type CellTest = (row: number, column: number) => boolean;

/** A frame around a row or a column of a heat map. */
export interface HeatMark {
  row?: number;
  column?: number;
  colour?: string;
}

/** Centre in data units and CSS pixels per unit: `screen = centre of the canvas + zoom * (point - centre)`, y up. */
export interface Viewport {
  x: number;
  y: number;
  zoom: number;
}

/** The points of a map and how they are drawn. */
export interface PointScene {
  xs: Float32Array;
  ys: Float32Array;
  viewport: Viewport | null;
  /** Zoom at which all points fit. */
  home: number;
  /** A pixel for each point, as in `splat.js`. */
  colours: Uint32Array;
  /** 1 for each point to draw; null draws all. */
  only: Uint8Array | null;
  /** The points in the order in which they are drawn, see `drawingOrder`. */
  order: Uint32Array;
  /** Points that are drawn larger, above the others. */
  marked: Int32Array;
  markColour: number;
  dense: boolean;
  /** 256 pixels for density. */
  scale: Uint32Array;
  paper: Rgb;
  showAxes: boolean;
}

/** The group of each token, by number. */
export interface Groups {
  names: string[];
  of: Uint8Array;
  rest?: number; // from this group on, groups are drawn without colour: what is in no other
  colours?: number[]; // the number of each group's colour; without it, that of the group
}

/** A column of the user's own: numbers, or texts as groups. */
export interface OwnColumn {
  name: string;
  groups: string[] | null;
}

/** A number for each token. */
export interface NumberColumn {
  values: Float32Array;
  range: Point;
  label: string;
  format: (value: number) => string;
}

export type Column = Groups | NumberColumn;

/** Tokens that are added and tokens that are subtracted. */
export interface TokenSum {
  plus: number[];
  minus: number[];
}
