"""Replaces the part of a page of the documentation that a tool writes."""

import pathlib

DOCS = pathlib.Path(__file__).parents[1] / "docs"


def with_part(name, tool, text):
    """Return the text of a page, with a new text between the comments that name the tool."""
    begin, end = f"<!-- begin: written by tools/{tool}.py -->", "<!-- end -->"
    head, rest = (DOCS / name).read_text().split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n\n{text}\n\n{end}{tail}"
