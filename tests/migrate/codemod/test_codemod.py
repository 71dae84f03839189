"""The codemod's cases, and what holds for every file that it is given."""

import collections
import contextlib
import difflib
import io
import tokenize

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.migrate.codemod import case_files
from tf_lossscale.migrate.codemod.migrate_file import migrate
from tools import migration_table

CASES = [pytest.param(case, id=f"{case.topic}: {case.title}") for case in case_files.load()]


def comments(source):
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return collections.Counter(token.string for token in tokens if token.type == tokenize.COMMENT)


@pytest.mark.parametrize("case", CASES)
def test_a_case_becomes_what_it_says(case):
    outcomes = case.migrated()
    for name, outcome in outcomes.items():
        expected, got = case.after[name].splitlines(), outcome.source.decode()
        joined = case_files.joined(got).splitlines()
        for i, (want, line) in enumerate(zip(expected, joined, strict=False)):
            if want.endswith(" …") and line.startswith(want[:-2]):
                expected[i] = line
        difference = "\n".join(difflib.unified_diff(expected, joined, "wanted", "got", lineterm=""))
        assert not difference, difference
        assert not comments(case.before[name]) - comments(got), "a comment is lost"
        lines = case.before[name].splitlines()
        for finding in outcome.findings:
            assert lines[finding.line - 1][finding.column :].startswith(finding.old.split()[0][:8])
            assert finding.kind != "todo" or any(finding.reason in line for line in joined)
    found = {f.reason for outcome in outcomes.values() for f in outcome.findings if f.kind == "notice"}
    for text in case.notices:
        assert any(text in reason for reason in found), (text, found)
    for reason in found:
        assert any(text in reason for text in case.notices), reason
    # A second run changes nothing, and still reports what is left to do.
    twice = case_files.migrate_files(frozenset((name, outcome.source.decode()) for name, outcome in outcomes.items()))
    for name, outcome in outcomes.items():
        assert twice[name].source == outcome.source
        left = [any(f.kind == "todo" for f in run[name].findings) for run in (outcomes, twice)]
        assert left[0] == left[1]


USE = "optimizer = tf.keras.mixed_precision.LossScaleOptimizer(größe)"


@pytest.mark.parametrize(
    ("encoding", "cookie"), [("utf-8", ""), ("utf-8-sig", ""), ("latin-1", "# -*- coding: latin-1 -*-")]
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", [True, False])
def test_encoding_line_ends_and_the_end_of_the_file_stay(encoding, cookie, newline, end):
    def text(*lines):
        lines = [cookie, *lines] if cookie else lines
        return (newline.join(lines) + newline * end).encode(encoding)

    outcome = migrate(text("import tensorflow as tf", USE))
    new = "optimizer = tf_lossscale.LossScaleOptimizer(größe)"
    assert outcome.source == text("import tensorflow as tf", "import tf_lossscale", new)


@pytest.mark.parametrize(
    "source",
    [
        b"",
        b"# only a comment, LossScaleOptimizer",
        b"\xef\xbb\xbfimport tensorflow as tf\r\nx = 1",
        b"# -*- coding: latin-1 -*-\nname = '\xe4'\n",
        b"import os\n\x0c\nx = 1\n",
        b"if x :\n\ty=( 1,\n 2 )  ;z  =3\n",
    ],
)
def test_a_file_without_uses_is_the_same_bytes(source):
    assert migrate(source) == (source, ())


@hypothesis.given(st.text(st.sampled_from("ab=():\n\r\t #'\\\x0c"), max_size=60))
def test_any_text_without_uses_is_left_as_it_is_or_refused(source):
    with contextlib.suppress(ValueError):
        assert migrate(source.encode()).source == source.encode()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (b"x = 1\nprint 'Python 2'\n", r"does not parse: .*print.*\(line 2\)"),
        (b"x = 1\ntry:\n    x\nexcept Exception, e:\n    print `e`\n", r"does not parse: .*\(line [45]\)"),
        (b"if 1:\n        a = 1\n\tb = 2\n", r"does not parse: inconsistent use of tabs.*\(line 3\)"),
        (b"x = 1\n%matplotlib inline\n", r"does not parse: invalid syntax \(line 2\)"),
        (b"# -*- coding: klingon -*-\nx = 1\n", "does not parse: .*klingon"),
        (b"name = '\xff'\n", "does not parse: "),
        ("x = 1\n".encode("utf-16"), "does not parse: "),
        (b"# -*- coding: utf-7 -*-\nx = '+AGE-'\n", "cannot be rewritten"),
    ],
)
def test_a_file_that_does_not_parse_is_an_error_that_says_what_and_where(source, said):
    with pytest.raises(ValueError, match=said):
        migrate(source)


def test_a_todo_of_an_earlier_run_is_found_again_when_its_cause_is_not():
    source = b"# TODO(tf-lossscale): look at this.\nx = 1\n"
    (finding,) = migrate(source).findings
    assert (finding.kind, finding.line, finding.reason) == ("todo", 1, "look at this.")
    assert migrate(source).source == source


@pytest.mark.parametrize(("longest", "width"), [(10, 79), (90, 90), (200, 100)])
def test_a_todo_comment_is_no_wider_than_the_file(longest, width):
    use = "    opt = tf.keras.mixed_precision.LossScaleOptimizer(opt, 1024)\n"
    source = f"import tensorflow as tf\n{'x' * longest}\ndef f(opt):\n{use}"
    comment = migrate(source.encode()).source.decode().removesuffix(use).splitlines()[3:]
    assert width - 16 < max(map(len, comment)) <= width
    assert [line[:8] for line in comment] == ["    # TO", *["    #   "] * (len(comment) - 1)]


def test_the_tables_of_the_migration_guide_are_those_of_the_cases():
    assert migration_table.PAGE.read_text() == migration_table.page(), "run: python -m tools.migration_table"
