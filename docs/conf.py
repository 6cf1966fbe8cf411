"""The documentation site: `make docs` writes it to build/site, static files for any host.

Nothing is fetched, while it is built or while it is read: formulas are MathML, fonts are the system's.
"""

import logging
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "_extensions")]

logging.getLogger("datasets").setLevel(logging.WARNING)  # says which frameworks it found

import annotate  # noqa: E402

import linbias  # noqa: E402

annotate.write()  # docs/annotated/*.md, from the sources

project = "linbias"
author = "the authors of linbias"
version = release = linbias.__version__
extensions = [
    "myst_parser",
    "docstrings",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.githubpages",  # a file that tells one host to serve _static
    "mathml",
    "sources",
    "commands",
    "explorer",
]
exclude_patterns = ["_extensions"]

# Markdown
myst_enable_extensions = ["deflist", "dollarmath", "attrs_inline", "colon_fence"]
myst_heading_anchors = 4

# The reference: what a docstring says, in its order
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say dtype, shape and meaning
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 72
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_custom_sections = [(name, "params_style") for name in ("Attributes", "Fields", "Raises")]

smartquotes = False  # a quote of code stays one

# Strict: every name of ours that is mentioned has an entry. Those of others are not looked up, which would need a network.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!linbias\.).*")]

# The pages
html_theme = "furo"
html_title = "linbias"
html_math_renderer = "mathml"
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "gruvbox-dark"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["linbias.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_domain_indices = False
html_use_index = False
templates_path: list[str] = []
