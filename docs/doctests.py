"""For the site: an example in a docstring, from `>>>` to the next empty line, is shown as code; `::` is a colon."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


class Fenced(griffe.Extension):
    """Puts a fence of Markdown around each example."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        del kwargs
        if obj.docstring is not None:
            text = obj.docstring.value.replace("::\n\n", ":\n\n")
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)
