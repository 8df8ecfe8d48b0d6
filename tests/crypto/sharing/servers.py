"""Programs of servers that compute on shares, played in one thread; sharing among them and opening."""

import numpy as np

from treaty.crypto.payload import to_words
from treaty.crypto.sharing import shamir as field
from treaty.crypto.sharing.shamir import P, make_shares, open_shares
from treaty.crypto.sharing.shamir_routing import prepare

FALSE_ALARM = 1e-9  # of each statistical test

MALFORMED = {
    "no message": lambda array: None,
    "one row less": lambda array: array[1:],
    "signed": lambda array: array.astype(np.int64),
    "a number of p": lambda array: np.concatenate([to_words([P], 2), array[1:]]),
    "bytes": lambda array: array.tobytes(),
}


class Play:
    """Run the servers' programs in one thread; keep what each sent in every round, as (sender, receiver) -> array."""

    def __init__(self, programs, tamper=lambda number, sent: None):
        self.rounds = []
        self.results = [None] * len(programs)
        outgoing = [next(program) for program in programs]
        while outgoing:
            sent = {(i, j): array for i, messages in enumerate(outgoing) for j, array in messages.items()}
            tamper(len(self.rounds), sent)
            self.rounds.append(sent)
            outgoing = []
            for i, program in enumerate(programs):
                try:
                    outgoing.append(program.send({s: array for (s, r), array in sent.items() if r == i}))
                except StopIteration as end:
                    self.results[i] = end.value
        assert all(result is not None for result in self.results)  # all ended in the same round

    @property
    def nbytes(self):
        return sum(array.nbytes for sent in self.rounds for array in sent.values())


def rounds_of(setting):
    """Rounds of a comparison, as the text says."""
    return 1 + int(np.ceil(np.log2(setting.bits + 2)))


def prepared_for(setting, rows):
    return Play([prepare(setting, i, rows) for i in range(setting.servers)]).results


def share(setting, values):
    values = field.from_signed(values) if isinstance(values, np.ndarray) else to_words([v % P for v in values], 2)
    return make_shares(values, setting.points, setting.degree + 1)


def opened(setting, shares):
    """Open from every run of degree + 1 neighbours; all must agree."""
    few = setting.degree + 1
    found = [
        open_shares(setting.points[i : i + few], np.stack(shares[i : i + few]))
        for i in range(setting.servers - few + 1)
    ]
    assert all(np.array_equal(found[0], other) for other in found)
    assert not found[0][:, 1].any()
    return found[0][:, 0]
