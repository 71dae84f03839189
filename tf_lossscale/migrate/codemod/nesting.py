"""The depth of nesting of a source file, measured on its tokens.

LibCST's parser is native code that recurses: a file that is nested too deeply overflows the stack and ends the process.
The tokenizer does not recurse, so the measure is taken before the parser sees the file.
"""

from __future__ import annotations

import dataclasses
import io
import re
import tokenize

#: Blocks and brackets within one another, as many as Python's own parser takes.
MOST_BLOCKS = 100
MOST_BRACKETS = 200
#: Tokens between two commas, added up over the brackets around them. LibCST's visitors reach Python's recursion limit
#: at fewer; its parser overflows a stack of 8 MiB at about three times as many.
MOST_TOKENS = 1000

_IGNORED = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
# Between these words and what ends them a comma separates parameters or targets: the nesting goes on behind it.
_GOES_ON_UNTIL = {"lambda": ":", "for": "in"}
_IN_F_STRING = re.compile(r"\{\{|\}\}|\w+|[^\w\s]")


class TooDeepError(ValueError):
    """A file is nested more deeply than it can be parsed."""

    def __init__(self, line: int | None = None):
        where = f" (line {line})" if line else ""
        super().__init__(
            f"is nested too deeply{where}: fewer than {MOST_BLOCKS} blocks, {MOST_BRACKETS} brackets and {MOST_TOKENS} "
            "operators or operands may stand within one another, still fewer calls. Split it, and migrate again"
        )


@dataclasses.dataclass
class _Level:
    """Tokens of one bracket level, counted since the last comma that ends an item."""

    tokens: int = 0
    ends: list[str] = dataclasses.field(default_factory=list)


def require_shallow(source: bytes) -> None:
    """Raise if a file is nested so deeply that parsing it could end the process.

    >>> require_shallow(b"x = " + b"-" * 900 + b"1")
    >>> try:
    ...     require_shallow(b"x = " + b"-" * 1100 + b"1")
    ... except TooDeepError as error:
    ...     print(str(error)[:30])
    is nested too deeply (line 1):

    Args:
        source: the file's bytes.

    Raises:
        TooDeepError: it is nested too deeply.
        SyntaxError, tokenize.TokenError: Python's tokenizer does not take it.
    """
    levels = [_Level()]
    branches = [0]  # for each open block its `elif`s in a row: each is nested in the one before
    total, begins = 0, True
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        kind, text = token.type, token.string
        if kind in _IGNORED:
            continue
        if kind == tokenize.INDENT:
            branches.append(0)
        elif kind == tokenize.DEDENT:
            branches.pop()
        elif kind == tokenize.NEWLINE:
            levels, total, begins = [_Level()], 0, True
        else:
            if begins and text != "else":
                branches[-1] = branches[-1] + 1 if text == "elif" else 0
            begins = False
            total += _count(levels, kind, text)
        inside = _in_braces(text) if kind == tokenize.STRING else 0
        if len(branches) > MOST_BLOCKS or len(levels) > MOST_BRACKETS or total + sum(branches) + inside > MOST_TOKENS:
            raise TooDeepError(token.start[0])


def _count(levels: list[_Level], kind: int, text: str) -> int:
    """Enter a token into the levels; return by how much their sum changes."""
    level = levels[-1]
    if kind == tokenize.OP and text in (",", ";") and not level.ends:
        change = -level.tokens
    elif kind == tokenize.OP and text in (")", "]", "}") and len(levels) > 1:
        return -levels.pop().tokens
    else:
        change = 1
    level.tokens += change
    if level.ends and text == level.ends[-1]:
        level.ends.pop()
    elif text in _GOES_ON_UNTIL:
        level.ends.append(_GOES_ON_UNTIL[text])
    elif kind == tokenize.OP and text in ("(", "[", "{"):
        levels.append(_Level())
    return change


def _in_braces(string: str) -> int:
    """The tokens of the longest `{...}` in an f-string, which is one token before Python 3.12; 0 for other strings."""
    if "f" not in string.partition(string[-1])[0].lower():
        return 0
    longest = count = depth = 0
    for piece in _IN_F_STRING.findall(string):
        if piece[0] in "{}" and (depth or len(piece) == 1):
            depth = max(0, depth + (len(piece) if piece[0] == "{" else -len(piece)))
        count = count + 1 if depth else 0
        longest = max(longest, count)
    return longest
