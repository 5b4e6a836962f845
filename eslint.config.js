import js from "@eslint/js";
import globals from "globals";

/** The rules of STYLE.md for the explorer's page; all of them are errors. */
export default [
  js.configs.recommended,
  {
    files: ["embedlayer/explorer/page/**/*.js"],
    languageOptions: { ecmaVersion: 2022, sourceType: "module", globals: globals.browser },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      eqeqeq: "error",
      "max-len": ["error", { code: 120 }],
      "max-lines-per-function": ["error", { max: 40 }],
      "no-undef": "error",
      "no-unused-vars": "error",
      "no-var": "error",
      "prefer-const": "error",
    },
  },
];
