"""Check a commit message: the subject is an imperative of at most 72 characters.

    python tools/check_commit_message.py FILE

`pre-commit install --hook-type commit-msg` runs this for each commit.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 72
# first words of a subject that is not an imperative
NO_IMPERATIVE = re.compile(r"(?i)(a|an|the|this|these|it|we|i|and|\w+(ed|ing))\b")


def problems(subject: str) -> list[str]:
    """Describe each problem of a commit's subject. Merges, reverts and fixups have none."""
    if re.match(r"Merge |Revert |fixup! |squash! ", subject):
        return []
    found = []
    if len(subject) > LONGEST:
        found.append(f"The subject has {len(subject)} characters. Shorten it to {LONGEST}.")
    if NO_IMPERATIVE.match(subject) or re.match(r"\w+s\b(?<!ss)", subject):
        found.append(
            f"The subject starts with {subject.split()[0]!r}. Start with an imperative, such as 'Add' or 'Fix'."
        )
    if not subject[:1].isupper() or subject.endswith("."):
        found.append("Start the subject with a capital letter, and end it without a full stop.")
    return found


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines() or [""]
    found = problems(lines[0])
    print(*found, sep="\n")
    sys.exit(bool(found))
