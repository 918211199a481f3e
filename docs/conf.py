"""The settings of Sphinx, which makes a site of the pages and of the API's docstrings: `make docs`."""

from __future__ import annotations

import re
from typing import Any

import kv_canary

project = "kv-canary"
author = "the kv-canary developers"
version = release = kv_canary.__version__

# The whole checkout is the source, so that links between README.md, docs/ and examples/ lead where they do on GitHub.
root_doc = "docs/README"
include_patterns = ["README.md", "docs/**"]
# Folders that hold no page are not looked through: environments are large.
exclude_patterns = [".*", "bench", "build", "difftest", "examples", "kernels", "kv_canary", "reference", "tests"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
# Links to headings are made as GitHub makes them.
myst_heading_anchors = 6

# Members in the order of the source, those that have a docstring.
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"
napoleon_custom_sections = [("Args of the function", "params_style")]
napoleon_use_ivar = True

html_theme = "furo"
html_title = "kv-canary"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_additional_pages = {"index": "to-the-pages.html"}
templates_path = ["templates"]

_GROUP = re.compile(r"^## (?P<caption>.+)\n(?P<body>(?:(?!## ).*\n?)*)", re.MULTILINE)
_PAGE = re.compile(r"\]\((?P<page>[^)#]+?)\.(?:md|rst)\)")
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_MADE = re.compile(r"<factory>|<function [\w.]*(?:<lambda>)?>")
# Stands for a colon where napoleon would take what is before it for a type.
_COLON = "\ue000"


def add_the_order(app: Any, page: str, source: list[str]) -> None:
    """Append to the index a table of contents for each of its groups, of the pages that the group links to."""
    if page != root_doc:
        return
    groups = [(found["caption"], _PAGE.findall(found["body"])) for found in _GROUP.finditer(source[0])]
    trees = [["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""] for caption, pages in groups]
    source[0] += "\n" + "\n".join(line for tree in trees for line in tree)


def keep_sentence(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Hide the colons in the first sentence about a property from napoleon: they are nothing but colons."""
    if isinstance(thing, int):
        # What Python says of every int. The page says what this one is.
        lines.clear()
    elif what in ("attribute", "data", "property") and lines:
        lines[0] = lines[0].replace(":", _COLON)


def read_code(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Rewrite the code in a docstring, which stands between single backticks: a name is a link where one is known."""

    def rewritten(found: re.Match[str]) -> str:
        return f":py:obj:`{found[1]}`" if _NAME.fullmatch(found[1]) else f"``{found[1]}``"

    # Code may go on in the next line.
    lines[:] = _CODE.sub(rewritten, "\n".join(lines).replace(_COLON, ":")).split("\n")


def leave_out_made_defaults(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Replace defaults that are no Python, and that keep a signature from being read, by an ellipsis."""
    return signature and _MADE.sub("...", signature), returned


def setup(app: Any) -> None:
    app.connect("source-read", add_the_order)
    # napoleon comes between, at 500.
    app.connect("autodoc-process-docstring", keep_sentence, priority=400)
    app.connect("autodoc-process-docstring", read_code, priority=600)
    app.connect("autodoc-process-signature", leave_out_made_defaults)
