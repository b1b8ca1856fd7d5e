"""What pyproject.toml cannot say: the README for package indices, whose pages have no files to link to."""

import re
from pathlib import Path

from setuptools import setup


def without_links(text: str) -> str:
    """Replace links to files of the repository by the files' names, and pictures by what they show."""
    text = re.sub(r"!\[([^\]]*)\]\((?!\w+:)[^)]*\)", r"\1.", text)
    text = re.sub(r"\[`?([^\]`]*)`?\]\((?!\w+:)\1(?:#[^)]*)?\)", r"`\1`", text)
    return re.sub(r"\[([^\]]*)\]\((?!\w+:)([^)#]*)(?:#[^)]*)?\)", r"\1 (`\2`)", text)


readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(long_description=without_links(readme), long_description_content_type="text/markdown")
