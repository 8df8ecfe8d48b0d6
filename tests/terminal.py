"""A person at a terminal who compares a card's fingerprint."""

import os
import pty
import re
import subprocess


def compare_at_terminal(words, fingerprint, **given):
    """Run a command at a terminal, type the two groups that it asks for; return its code and words."""
    person, stdin = pty.openpty()
    try:
        with subprocess.Popen(
            words, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **given
        ) as process:
            said = ""
            for answered in range(2):
                while len(asked := re.findall(r"Group (\d+) of 16\b.*?:", said)) == answered:
                    letter = process.stdout.read(1)
                    if not letter:  # it has ended, and asked nothing
                        return process.wait(), said
                    said += letter
                group = fingerprint.removeprefix("SHA256:").split()[int(asked[-1]) - 1]
                os.write(person, f"{group}\n".encode())
            return process.wait(), said + process.stdout.read()
    finally:
        os.close(person)
        os.close(stdin)
