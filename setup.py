"""What pyproject.toml cannot say: the description that a registry shows, and what is compiled.

The description is the README, whose links would lead nowhere there. What is compiled serves every version of Python
from 3.11 on, and is there in Python too: where it cannot be compiled, the package is built without.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
# A link or picture that is neither on another host nor on the same page.
_RELATIVE = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?![a-z]+:|#)(?P<target>[^)\s]+)\)")


def description(readme: str, source: str | None) -> str:
    """Return a README whose relative links are absolute, or their words alone.

    Args:
        readme: in Markdown.
        source: address of the repository, as in pyproject.toml under [project.urls]; None: it has none yet.
    """

    def absolute(link: re.Match[str]) -> str:
        if source is None:
            return link["text"]
        where = f"{source.rstrip('/')}/{'raw' if link['picture'] else 'blob'}/HEAD/{link['target']}"
        return f"{link['picture']}[{link['text']}]({where})"

    return _RELATIVE.sub(absolute, readme)


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    setup(
        long_description=description((ROOT / "README.md").read_text(encoding="utf-8"), urls.get("Source")),
        long_description_content_type="text/markdown",
        ext_modules=[
            Extension(
                "kv_canary.engines.sglang._items",
                ["kv_canary/engines/sglang/_items.c"],
                define_macros=[("Py_LIMITED_API", "0x030B0000")],
                py_limited_api=True,
                optional=True,
            )
        ],
        options={"bdist_wheel": {"py_limited_api": "cp311"}},
    )
