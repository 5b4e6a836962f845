"""Write the list of what the five texts say into docs/course/texts.md: `python docs/texts.py --write`.

The list is that of the explorer's page, in learn/exercises.js, which Node.js reads. The measured tables of the page
stay as they are; `examples/width_and_tying.py` writes them.
"""

import json
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tables import between_markers, write_between_markers

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "course" / "texts.md"
LEARN = ROOT / "embedlayer" / "explorer" / "page" / "learn"
VERDICTS = {True: "holds", False: "not so", None: "it depends"}

Lesson = dict[str, Any]


def linked_lessons() -> list[Lesson]:
    """Return the lessons of the page with the link and the place of each exercise."""
    code = 'import { linkedLessons } from "./lesson.js"; console.log(JSON.stringify(linkedLessons()));'
    command = ["node", "--no-warnings", "--experimental-default-type=module", "--input-type=module", "--eval", code]
    return json.loads(subprocess.run(command, cwd=LEARN, check=True, capture_output=True, text=True).stdout)


def row(exercise: dict[str, Any]) -> str:
    """Return the line of one exercise: its name and words, its link, its verdict, and the lesson with its code."""
    texts = [exercise["name"]] + ([f"“{exercise['said']}”"] if "said" in exercise else [])
    name = "<br>".join("".join("\\" + sign if sign in "[]|*_<" else sign for sign in text) for text in texts)
    link = f'<a href="../story.html{escape(exercise["link"])}">{exercise["place"]}</a>'
    verdict = VERDICTS[exercise["holds"]] if "holds" in exercise else ""
    lesson = exercise.get("lesson", "")
    return f"| {name} | {link} | {verdict} | {f'[{int(lesson[:2])}]({lesson}.md)' if lesson else ''} |\n"


def listed(lessons: list[Lesson]) -> str:
    """Return the part of the page that lists all exercises."""
    count = sum(len(part["exercises"]) for lesson in lessons for part in lesson["parts"])
    parts = [f"\n{count} entries.\n"]
    for lesson in lessons:
        parts.append(f"\n## {lesson['name']} \\[{lesson['letter']}\\]\n\nThis text is {lesson['about']}.\n")
        for part in lesson["parts"]:
            parts.append(f"\n### {part['part']}\n\n| in the text | opens | verdict | lesson |\n|---|---|---|---|\n")
            parts.extend(row(exercise) for exercise in part["exercises"])
    return "".join(parts) + "\n"


def page(lessons: list[Lesson]) -> str:
    """Return the page with the list of these lessons."""
    return between_markers(PAGE, "entries", listed(lessons))


if __name__ == "__main__":
    if "--write" in sys.argv:
        write_between_markers(PAGE, "entries", listed(linked_lessons()))
    else:
        print(listed(linked_lessons()))
