"""Subjects of commits: ``area: verb what``, imperative, at most 72 characters, no semicolon."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CHECKED = "267923c"  # Commits after this one follow the rule.
MOST_CHARACTERS = 72
VERBS = """
    add adopt align allow avoid bound build bump cache call check choose clarify clean compare
    compile complete compute convert copy correct count cover cut deduplicate define delete derive
    describe document draw drop enable export extend extract fill find fix fold follow format free
    fuse generate give group handle hold index inline interpolate join keep launch layer let limit
    link list load look lower make mark measure mend mention merge move name open order pack pad pass
    patch pin place pool predict print prove publish put quantize raise read record reduce refuse
    register release remember remove rename reorder replace report require reset restore return reuse revert
    rewrite round run save schedule set shard share shorten show simplify skip sort speed split
    start state stop store support swap take teach test time train treat trim tune unify update use
    validate wait warn write
"""
SUBJECT = re.compile(rf"[a-z][\w ,./*-]*: (?:{'|'.join(VERBS.split())})\b[^;]*[^;.]")


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)


def follows_the_rule(subject: str) -> bool:
    return len(subject) <= MOST_CHARACTERS and SUBJECT.fullmatch(subject) is not None


def test_subjects_of_new_commits():
    if shutil.which("git") is None or git("rev-parse", "--git-dir").returncode:
        pytest.skip("not in a git repository")
    if git("merge-base", "--is-ancestor", CHECKED, "HEAD").returncode:
        pytest.skip(f"{CHECKED}, after which subjects are checked, is not in this clone's history")
    subjects = git("log", "--no-merges", "--format=%s", f"{CHECKED}..HEAD").stdout.splitlines()
    wrong = [subject for subject in subjects if not follows_the_rule(subject)]
    assert wrong == [], "CONTRIBUTING.md has the rule, VERBS above the verbs"


@pytest.mark.parametrize(
    "subject",
    ["backward: cut digits with hot rows at any position", "docs, README: name the H100's tests"],
)
def test_a_subject_that_follows_the_rule(subject):
    assert follows_the_rule(subject)


@pytest.mark.parametrize(
    "subject",
    [
        "cut digits with hot rows",
        "backward: digits with hot rows are cut",
        "backward: cuts digits",
        "backward: cut digits; sort rows",
        "backward: cut digits.",
        f"backward: cut {'digits ' * 10}",
    ],
)
def test_a_subject_that_breaks_the_rule(subject):
    assert not follows_the_rule(subject)
