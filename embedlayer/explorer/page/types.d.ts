/** Types that several modules of the page share. Fields of the server's data are named as in Python. */

import type { Answers, Cluster, SourceManifest, StepFacts, PipelineStep } from "./answers";

export * from "./answers";

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
export type Load = <Name extends keyof Answers>(name: Name, params?: Params) => Promise<Answers[Name]>;

export interface Data {
  load: Load;
  /** As `load`, but always sent: for answers that change. */
  ask: Load;
  /** As `ask`, for a request that starts or ends something; an exported page has none. */
  act: Load;
  exported: boolean;
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

/** A step of the pipeline with the facts of its name. */
export type StepOf<Name extends keyof StepFacts> = PipelineStep & { facts: StepFacts[Name] };

/** Changes of the URL; null and undefined remove a key. */
export type Changes = Record<string, string | number | boolean | null | undefined>;

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
  /** Change the state and the URL. */
  set(changes: Changes): void;
  /** As `set`, with a new entry in the browser's history: Back returns to the state before. */
  push(changes: Changes): void;
}

export interface ViewContext {
  /** Address of the course, or "". */
  course: string;
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

/** A number for each token. */
export interface NumberColumn {
  values: Float32Array;
  range: Point;
  label: string;
  format: (value: number) => string;
}

export type Column = Groups | NumberColumn;

