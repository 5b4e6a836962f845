import js from "@eslint/js";
import globals from "globals";

/** Report `any` in the types of JSDoc comments: a value of unknown type is `unknown`. */
const noAny = {
  meta: { type: "problem", schema: [] },
  create: ({ sourceCode, report }) => ({
    Program() {
      for (const comment of sourceCode.getAllComments()) {
        if (/\{[^@]*\bany\b[^@]*\}/.test(comment.value)) report({ loc: comment.loc, message: "A type is `any`." });
      }
    },
  }),
};

/** The rules of STYLE.md for the explorer's page; all of them are errors. */
export default [
  js.configs.recommended,
  {
    files: ["embedlayer/explorer/page/**/*.js"],
    languageOptions: { ecmaVersion: 2022, sourceType: "module", globals: globals.browser },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    plugins: { types: { rules: { "no-any": noAny } } },
    rules: {
      eqeqeq: "error",
      "max-len": ["error", { code: 120 }],
      "max-lines-per-function": ["error", { max: 40 }],
      "no-undef": "error",
      "no-unused-vars": "error",
      "no-var": "error",
      "prefer-const": "error",
      "types/no-any": "error",
    },
  },
];
