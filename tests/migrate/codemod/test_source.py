"""The places of nodes and arguments in the text of a file."""

import ast

import hypothesis
import pytest
from hypothesis import strategies as st

from tf_lossscale.migrate.codemod.source import Source

VALUES = ("x", "'é, ('", "(1)", "( # c,)\n 2)", "g(a, b)", "[1, 2]", "{'a': (1, 2)}", "lambda a, b=1: (a, b)", "-x")
SPACES = ("", " ", "\n  ", "  # a, (b\n  ", "\r\n")
KINDS = ("{value}", "key{i}={value}", "key{i} = {value}", "*{value}", "**{value}")


@st.composite
def calls(draw):
    """A call, and its arguments as they are written."""
    chosen = draw(st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(VALUES)), max_size=5))
    written = [kind.format(value=value, i=i) for i, (kind, value) in enumerate(chosen)]
    written.sort(key=lambda argument: (argument.startswith("**"), argument.startswith("key")))
    spaced = [f"{draw(st.sampled_from(SPACES))}{argument}{draw(st.sampled_from(SPACES))}" for argument in written]
    function = draw(st.sampled_from(["f", "(f)", "é.f", "f(1)(2)", "(\nf)"]))
    return f"{function}({','.join(spaced)}{draw(st.sampled_from(['', ',' if written else '']))})", written


@hypothesis.given(calls(), st.sampled_from(["", "y = 'é'; ", "if é:\n\tx = "]))
def test_the_arguments_of_a_call_are_found_with_their_parentheses(call, before):
    source = Source((before + call[0]).encode())
    node = source.nodes(ast.Call)[0]
    found = source.arguments(node)
    assert [source.text[slice(*argument.span)] for argument in found] == call[1]
    for argument in found:
        value = ast.parse(f"({source.text[slice(*argument.value_span)]})", mode="eval").body
        assert ast.dump(value) == ast.dump(argument.value)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_line_break_ends_one_line(end):
    source = Source(f"x = 1{end}é = 2{end}y{end}".encode())
    (name,) = [node for node in source.nodes(ast.Name) if node.id == "y"]
    assert source.text[slice(*source.span(name))] == "y"
    assert source.line_of(source.span(name)[0]) == 3
