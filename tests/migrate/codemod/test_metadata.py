"""The metadata is LibCST's own."""

import libcst as cst
import pytest
from libcst.metadata import ExpressionContextProvider, MetadataWrapper, PositionProvider, ScopeProvider

from tests.migrate.codemod import case_files
from tf_lossscale.migrate.codemod import metadata

EVERYTHING = """\
from __future__ import annotations
import a.b.c as d, e.f
from typing import cast, Literal, NewType
@decorated(x := 1)
class C(Base, metaclass=Meta):
    field: "List[d]" = [i for j in k if j for i in j]
    def method(self, p: int, /, q: d = e, *rest, r=lambda z, w=1: z + w, **more) -> "C":
        global g
        def inner():
            nonlocal p
            del p, self.x[0], (u, v)
        with open(q) as (s, t), more["x"] as self.y:
            for s.z, *t[0] in {m: n for m, n in rest}:
                print(f"{s!r:>{t}}", s if t else q, *rest, **more)
            else:
                a.b.c += e.f
        try:
            return cast("d", q), NewType("N", "C"), x[1:2, ...]
        except (E, F) as error:
            raise error from None
        match p:
            case {"k": [o, *oo], **kk} if o: pass
            case D(attr=1 | 2 as h): pass
async def f():
    async for y in {1, *z}: await (yield y)
    assert not -y < 3 <= 4, "no"; return y if (w := y) else w
"""
SOURCES = [EVERYTHING, *(source for case in case_files.load()[::8] for source in case.before.values())]


@pytest.fixture(scope="module", params=SOURCES, ids=range(len(SOURCES)))
def both(request):
    wrapper = MetadataWrapper(cst.parse_module(request.param), unsafe_skip_copy=True)
    return wrapper, wrapper.module, metadata.children(wrapper.module)


def test_contexts_are_those_of_libcst(both):
    wrapper, module, children = both
    assert metadata.contexts(module, children) == dict(wrapper.resolve(ExpressionContextProvider))


def assignments(scopes, module):
    """For every name: the kind of its scope, what it refers to, and from where it is used."""
    found = {}
    for node, scope in scopes.items():
        if isinstance(node, cst.Name) and scope is not None:
            of_name = [
                (a.node, {access.node for access in a.references}) for a in scope[node.value] if hasattr(a, "node")
            ]
            found[node] = (type(scope), sorted(of_name, key=lambda each: id(each[0])))
    return found


def test_scopes_are_those_of_libcst(both):
    wrapper, module, children = both
    mine = metadata.scopes(module, children, metadata.contexts(module, children))
    in_tree = set(children)
    theirs = {node: scope for node, scope in wrapper.resolve(ScopeProvider).items() if node in in_tree}
    assert assignments({node: scope for node, scope in mine.items() if node in in_tree}, module) == assignments(
        theirs, module
    )
    assert {node for node in theirs if isinstance(node, cst.BaseExpression)} <= mine.keys()


def test_nodes_start_where_libcst_says(both):
    wrapper, module, children = both
    written = metadata.WrittenModule(module)
    theirs = wrapper.resolve(PositionProvider)
    assert written.code == module.code
    assert {node: written.start(node) for node in children} == {
        node: (theirs[node].start.line, theirs[node].start.column) for node in children
    }
