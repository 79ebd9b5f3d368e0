"""Nothing of a record, or of a folder's name, becomes markup, code or YAML in what is written about it."""

import ast
import re
import shlex
from typing import Any

import pytest
import yaml

from attnlab.export import serving
from attnlab.export.card import card
from attnlab.report.table import Grid
from attnlab.run.markup import literal, spreadsheet

markdown_it = pytest.importorskip("markdown_it")
HOSTILE = [
    "```\nimport os\n```", "````", "`a` ``b``", "`", '"); import os; os.system("x")  #', "'); import os #", "a\\",
    '\\"',
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!-- hidden", "-->", "&lt;b&gt;", "</td></table>",
    "[click](javascript:alert(1))", "![x](x.png)", "[x]: http://evil", "[a][b]", "<http://evil>", "https://evil.org",
    "a | b | c", "\\| b", "|---|---|", "# heading", "a\n# heading", "a\n\n---\n\nb", "\n---\ntags: [evil]\n---\n",
    "!!python/object/apply:os.system [ls]", "&a [*a]", "*a", "key: value", "- item", "> quote", "1. item", "null", "no",
    "*bold* **bold** _it_ __it__ ~~gone~~", "$x^2$", "{{ 7*7 }}", "{folder}", "%s %(a)s", "\x1b[31mred", "\u202eabc",
    "a\tb", "\udce4", "\x00", " lead", "trail ", "=1+1", "@SUM(1)", "+cmd|' /C calc'!A0", "-2+3+cmd|' /C calc'!A0",
    "\\input{/etc}", "$(rm -rf ~)", "; rm -rf ~", "-x", "naïve ümlaut", "模型",
]  # fmt: skip


def rendered(text: str) -> Any:
    return markdown_it.MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text)


def structure(tokens: Any) -> list[str]:
    """The kinds of all parts; texts and code inside lines are left out."""
    kinds = [kind for token in tokens for kind in (token.type, *structure(token.children or []))]
    return [kind for kind in kinds if kind not in ("text", "text_special", "code_inline")]


def model_card(text: str) -> str:
    record = {
        "task": text, "attention": text, "compress": text, "stride": text, "rank": text, "corpus": text, "seed": text,
        "command": text, "quality": {text: 1.5, "unit": text, "signature": text}, "environment": {"git": text},
        "config": {"hardware": {"precision": text}}, "identity": {"run": text}, "training": {"steps": text},
    }  # fmt: skip
    python = f"model = load({literal(text)})"
    return card(record, title=text, python=python, folder=text, usage=".", notes=[f"A note on {text}"])


@pytest.mark.parametrize("text", HOSTILE)
def test_a_model_card(text: str) -> None:
    written = model_card(text)
    written.encode()
    front, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", written, re.DOTALL).groups()  # type: ignore[union-attr]
    values = yaml.safe_load(front)
    assert list(values) == ["license", "tags"] and [type(tag) for tag in values["tags"]] == [str] * 4
    assert values["tags"][1] == text or not text.isprintable()
    tokens = rendered(body)
    assert structure(tokens) == structure(rendered(model_card("plain").split("\n---\n", 1)[1]))
    python, command = [token.content for token in tokens if token.type == "fence"]
    (call,) = (node for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Call))
    assert ast.literal_eval(call.args[0]) == text and len(ast.parse(python).body) == 1
    assert command.removesuffix("\n") == text or not text.replace("\n", "").isprintable()


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_and_latex(text: str) -> None:
    """Code in backquotes and links to files are what a table can have."""

    def grid(text: str) -> Grid:
        return Grid("Title", ["Model", "Score"], [[f"a {text}", f"b {text}"]], notes=[f"Left out: {text}"])

    assert structure(rendered(grid(text).markdown())) == structure(rendered(grid("plain").markdown()))
    latex = grid(text).latex()
    assert latex.count("\n") == grid("plain").latex().count("\n") and "\\input" not in latex
    assert not re.search(r"(?<!\\)[%#_]", latex)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_spreadsheet_computes_no_text(text: str) -> None:
    written = spreadsheet(text)
    assert written in (text, f"'{text}") and not str(written).startswith(("=", "@", "+cmd", "-2+3+cmd"))


@pytest.mark.parametrize("value", [-0.5, "-0.5", "+1.25, p = 0.030", "-1.2 ± 3", "–", "a=b", "", "-:80; 32:96"])
def test_numbers_stay_in_a_spreadsheet(value: object) -> None:
    assert spreadsheet(value) == value


@pytest.mark.parametrize("folder", [text for text in HOSTILE if "/" not in text and "\0" not in text])
def test_a_command_that_serves_a_folder(folder: str) -> None:
    first = shlex.split(serving.command(folder, {"dtype": "float32"}))[0]
    assert first in (folder, f"./{folder}") and not first.startswith("-")
