"""Formulas as MathML, made while the site is built: a browser draws them without a script, a font or a network."""

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator

_LOGGER = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _visit_inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(_mathml(node, "inline"))
    raise nodes.SkipNode


def _visit_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(translator.starttag(node, "div", CLASS="formula"))
    translator.body.append(_mathml(node, "block"))
    if node["number"]:
        translator.body.append(
            f'<span class="eqno">({get_node_equation_number(translator, node)})'
        )
        translator.add_permalink_ref(node, "Link to this equation")
        translator.body.append("</span>")
    translator.body.append("</div>\n")
    raise nodes.SkipNode


def _mathml(node: nodes.Element, display: str) -> str:
    latex = node.astext().strip()
    if r"\\" in latex and r"\begin" not in latex:  # lines of one formula
        latex = rf"\begin{{split}}{latex}\end{{split}}"
    latex = re.sub(
        r"(\\(?:begin|end)){aligned}", r"\1{split}", latex
    )  # the name that the converter knows
    try:
        markup = convert(latex, display=display)
    except Exception as error:  # the converter has many, one for each thing that it misses
        _LOGGER.warning(
            "formula %r: %s", latex, type(error).__name__, location=node, type="mathml"
        )
        return ""
    # What the converter does not know it hands on as it is.
    unknown = re.search(r"\\[A-Za-z]+|<mi>&</mi>|linebreak", markup)
    if unknown:
        _LOGGER.warning("formula %r: unknown %s", latex, unknown[0], location=node, type="mathml")
    return markup
