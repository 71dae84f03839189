"""Records the behavior of an original implementation, and compares the recording with the stored recording.

    python -m tools.record ORIGINAL [--only PATTERN] [--write]

The exit code is 0 if the recordings agree, 1 if a case differs, and 2 if the original cannot be installed.
"""

import argparse
import collections
import gzip
import json
import os
import subprocess
import sys
import tarfile

from . import checkpoints, comparison, originals, program

DATA = originals.ROOT / "tests" / "conformance" / "data"
# The maximum number of differences to print for each case.
SHOWN = 3

# The recording programs some of whose cases run under MirroredStrategy.
DISTRIBUTED = ("loss_scale_optimizer", "dynamic_loss_scale")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tools.record", description=__doc__.splitlines()[0])
    parser.add_argument("original", choices=sorted(originals.ORIGINALS))
    parser.add_argument(
        "--only",
        default="*",
        metavar="PATTERN",
        help='record only cases whose "part/case" matches, such as "traces/sgd|*"',
    )
    parser.add_argument("--write", action="store_true", help="store the new recording, even if it differs")
    options = parser.parse_args(arguments)
    if options.write and options.only != "*":
        parser.error("--write stores a whole recording: leave out --only")
    try:
        python = originals.environment(options.original)
    except originals.NotHere as error:
        print(f"{options.original} cannot be recorded here: {error}")
        return 2
    results = []
    for name in originals.ORIGINALS[options.original].recordings:
        results.append(record(python, name, options.only, options.write))
        if name in checkpoints.WRITTEN_BY and options.only == "*":
            results.append(repeat_checkpoints(python, name))
    return 0 if all(results) else 1


def record(python, name, pattern, write):
    """Make a recording in the environment of its original. Return whether it equals the stored recording."""
    folder = originals.ENVIRONMENTS / "recorded"
    folder.mkdir(exist_ok=True)
    stored = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    cases, result = folder / f"{name}.cases.json", folder / f"{name}.json"
    cases.write_text(json.dumps(stored))
    new = {}
    for distributed in ("", "distributed") if program.RECORDERS[name][0] in DISTRIBUTED else ("",):
        command = [python, "-m", "record.program", name, str(cases), str(result), pattern, distributed]
        made = run(command)
        if made.returncode:
            print(f"{name}: {' '.join(command)} failed:\n{made.stderr[-3000:]}")
            return False
        new = merged(new, json.loads(result.read_text()))
    result.write_text(json.dumps(new))
    found = report(name, stored, new, pattern)
    if write:
        whole = merged(stored, new)
        whole["made_with"]["kept"] = kept(stored, new)
        (DATA / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(whole).encode(), mtime=0))
    return not found


def repeat_checkpoints(python, name):
    """Repeat the training that wrote an original's checkpoints, and read them. Return whether all results agree."""
    folder = originals.ENVIRONMENTS / "recorded" / "checkpoints"
    with tarfile.open(DATA / "checkpoints.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    result = folder.parent / f"{name}.checkpoints.json"
    command = [python, "-m", "record.checkpoints", name, str(folder), str(result)]
    made = run(command)
    if made.returncode:
        print(f"{name}: {' '.join(command)} failed:\n{made.stderr[-3000:]}")
        return False
    metas = {each: checkpoints.read(folder, each) for each in checkpoints.names(name, folder)}
    stored = {"checkpoints": {each: {"ok": checkpoints.expected(meta)} for each, meta in metas.items()}}
    new = {"checkpoints": json.loads(result.read_text()), "made_with": {"program": "checkpoints.py"}}
    return not report(f"{name}, its checkpoints", stored, new, "")


def run(command):
    """Run a program in the folder of environments, because MindSpore writes files into the current folder."""
    environment = {**os.environ, "PYTHONPATH": str(originals.ROOT / "tools")}
    return subprocess.run(command, cwd=originals.ENVIRONMENTS, env=environment, stderr=subprocess.PIPE, text=True)


def merged(one, other):
    """Merge two recordings. If both contain a case, keep the case of `other`."""
    parts = {**one, **other}
    for part in set(one) & set(other) - {"made_with"}:
        if isinstance(one[part], dict):
            parts[part] = {**one[part], **other[part]}
    return parts


def kept(stored, new):
    """Return a dictionary that contains, for each part, the number of stored cases that no program records."""
    inputs = {"file", "split", "made_with"}
    left = {
        part: len(set(comparison.cases(cases)) - set(comparison.cases(new.get(part, {}))))
        for part, cases in stored.items()
        if part not in inputs
    }
    return {part: count for part, count in left.items() if count}


def report(name, stored, new, pattern):
    """Print the differences by case, and return their number."""
    chosen = comparison.recorded(new)
    differences = collections.defaultdict(list)
    for case, where, old, now in comparison.differences(stored, new, chosen):
        differences[case].append(f"{where or 'all'}: {str(old)[:80]} -> {str(now)[:80]}")
    for case, lines in differences.items():
        print(f"  {case}: {len(lines)} differences")
        for line in lines[:SHOWN]:
            print(f"    {line}")
    count = sum(chosen(part, case) for part in stored for case in comparison.cases(stored[part]))
    left = "" if pattern != "*" else f", {sum(kept(stored, new).values())} have no program"
    versions = ", ".join(f"{key} {value}" for key, value in new["made_with"].items())
    print(f"{name}: {count} cases recorded, {len(differences)} differ{left}; {versions}", flush=True)
    return len(differences)


if __name__ == "__main__":
    sys.exit(main())
