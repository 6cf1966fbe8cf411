"""The directive `commands`: the help of `linbias` and of every command, from themselves."""

import re
from collections.abc import Iterator
from typing import Any

import typer
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from linbias import cli


def setup(app: Sphinx) -> None:
    app.add_directive("commands", Commands)


class Commands(SphinxDirective):
    """A section for each command: what it does, examples, arguments and options."""

    def run(self) -> list[nodes.Node]:
        root = typer.main.get_command(cli.app)
        return [self._section(context) for context in contexts(root, "linbias")]

    def _section(self, context: Any) -> nodes.section:
        title = context.command_path
        section = nodes.section(ids=[nodes.make_id(title)], names=[title])
        section += nodes.title("", "", nodes.literal("", title))
        self.state.document.note_explicit_target(section)
        lines = StringList(list(describe(context)), source=f"<{title}>")
        self.state.nested_parse(lines, self.content_offset, section)
        return section


def contexts(command: Any, name: str, parent: Any = None) -> Iterator[Any]:
    """Every command as Click sees it when it is called, groups before what they hold."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    yield context
    for inner_name, inner in getattr(command, "commands", {}).items():
        yield from contexts(inner, inner_name, context)


def describe(context: Any) -> Iterator[str]:
    """One command, as Markdown: what `--help` shows, without Rich's markup."""
    for paragraph in re.split(r"\n\s*\n", context.command.help or ""):
        if paragraph.startswith("\b"):  # examples, one a line
            yield from (
                "```sh",
                *re.sub(r"\[/?[a-z ]*\]", "", paragraph.strip("\b\n")).split("\n"),
                "```",
                "",
            )
        else:
            yield from (_prose(" ".join(paragraph.split())), "")
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts:
            yield from (f"`{record[0]}`", f": {_prose(record[1])}", "")


def _prose(text: str) -> str:
    """Text whose marked words are commands."""
    text = re.sub(r"\[bold(?: cyan)?\](.*?)\[/(?:bold)?\]", r"`\1`", text)
    text = re.sub(r"\[dim\](.*?)\[/\]", r"\1", text)
    return re.sub(r"([*<>])", r"\\\1", text)
