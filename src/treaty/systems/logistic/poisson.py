"""Products with the rates of a Poisson regression between two parties, under keys of their own.

A row's rate is exp(u_A + u_B) = e_A e_B. Each party encrypts its own factors e_k under its own key; the other party
multiplies these by its columns times its own factors, and so has X^T (e_A e_B) under a key that it does not have. It
adds a mask and has the product opened. (FATE's Poisson regression multiplies exponentials likewise, under the key of a
third party.)

The gradient is the mean of (e_A e_B - y) x. The active party has y. The other party's mean of y x is made in the same
way, once, with y in the place of e_B; its first gradient, where all rates are 1, would show it that anyway.

*Assumptions*: two honest-but-curious parties with data; the cipher. A part of u beyond 16 in size is cut off while
training; at the optimum, none may be.
"""

from __future__ import annotations

import math
from itertools import zip_longest

import numpy as np

from treaty.crypto.sums.hidden_vectors import Fields, Hider, hide_rows, product_bits
from treaty.errors import ConfigError, DataError
from treaty.linear.lbfgs import ROWS_PER_COLUMN
from treaty.linear.preparation import Target
from treaty.machine.arrays import Floats, Integers
from treaty.messaging.messages import Array, Arrays, Message, leaks, pack, row_pieces
from treaty.messaging.party import Party
from treaty.systems.logistic.coordinated import (
    OWN_GRADIENT,
    Words,
    ciphertexts,
    cover,
    make_key,
    open_fields,
    pack_numbers,
    read_key,
    uncover,
)
from treaty.systems.logistic.setup import Setting, diverged

# Bits of signed factors
VALUE_BITS = 60
# Bits of signed columns times factors, to which most of the work is proportional
WEIGHT_BITS = 44
FRACTION_BITS = 32
# Of the logarithm of a rate, in size: factors stay below 2^24
LARGEST_PART = 16.0


@leaks("a public key", "control")
class RateKey(Message):
    """A party's public key."""

    key: Arrays


@leaks("the sender's factor of each row's rate, under its own key", "encrypted")
class HiddenFactors(Message):
    """Factors of rows' rates, uint64 (rows, 1, words) under the sender's key, of many rows the next ones."""

    values: Array


@leaks("products under masks; how many columns", "masked")
class MaskedRates(Message):
    """Masked products uint64 (plaintexts, words) under the receiver's key."""

    values: Array


@leaks(OWN_GRADIENT, "aggregated")
class OpenedRates(Message):
    """What the sender decrypted, uint64 (n, limbs), for the party that masked it."""

    numbers: Array


class RateProducts:
    """Products of one party's vector with the other's columns: the own key, and the other party's."""

    def __init__(self, party: Party, setting: Setting, threads: int) -> None:
        (self.peer,) = setting.others(party.name)
        self._party, self._setting, self._threads = party, setting, threads
        self._key = make_key(setting)
        party.send(self.peer, RateKey(pack(self._key.public.to_payload())))
        theirs = read_key(party.receive(self.peer, RateKey).key, setting, self.peer, "RateKey.key")
        self._hider = Hider(theirs, theirs.plaintext_bits - 2, threads)

    def times(self, vector: Floats | None, weights: Floats | None, *, asked: int = 0) -> Floats:
        """Give the other party the own vector (n_rows,), take its own, or both, as it does the opposite.

        Returns the own weights (n_rows, n) times the other's vector, float64 (n,), none without weights. `asked` is how
        many products the other party gets.
        """
        party, peer = self._party, self.peer
        hidden = self._exchange(vector, 0 if weights is None else len(weights))
        if weights is None:
            self._open(asked)
            return np.zeros(0)
        # as many fractional bits as the largest weight leaves room for
        fraction = min(
            FRACTION_BITS, WEIGHT_BITS - 2 - math.ceil(math.log2(max(1.0, np.abs(weights).max(initial=0.0))))
        )
        own, fields = _fixed(weights, fraction, WEIGHT_BITS), self._fields(self._hider.plaintext_bits)
        covered, masks = cover(self._hider, self._hider.weigh(hidden, own, WEIGHT_BITS), fields)
        party.send(peer, MaskedRates(covered))
        if vector is not None:
            self._open(asked)
        numbers = uncover(party.receive(peer, OpenedRates).numbers, masks, fields, peer, "OpenedRates.numbers")
        # entries of a hidden vector are shifted by 2^(VALUE_BITS - 1)
        shifts = [sum(column) << (VALUE_BITS - 1) for column in own.T.tolist()]
        unit = 1 << (FRACTION_BITS + fraction)
        return np.array([(n - shift) / unit for n, shift in zip(numbers, shifts, strict=True)], np.float64)

    def _exchange(self, vector: Floats | None, n_theirs: int) -> Words:
        """Send the own vector, encrypted, if there is one; return the other's (n_theirs, words), piece for piece."""
        layout = Fields.of(VALUE_BITS, self._key.public.plaintext_bits, most=1)
        column = None if vector is None else _fixed(vector, FRACTION_BITS, VALUE_BITS)[:, np.newaxis]
        words, theirs = self._key.public.modulus.words, self._hider.modulus.words
        hidden = np.empty((n_theirs, theirs), np.uint64)
        # a piece of each in turn, so that neither party has many of them unread
        sent = [] if column is None else row_pieces(len(column), 64 * words)
        for own, of in zip_longest(sent, row_pieces(n_theirs, 64 * theirs) if n_theirs else []):
            if own is not None and column is not None:
                mine = hide_rows(self._key, column[own], VALUE_BITS, layout, self._threads)
                self._party.send(self.peer, HiddenFactors(Array.of(mine)))
            if of is not None:
                values, shape = self._party.receive(self.peer, HiddenFactors).values, (of.stop - of.start, 1)
                hidden[of] = ciphertexts(values, self._hider, shape, self.peer, "HiddenFactors.values")[:, 0]
        return hidden

    def _open(self, count: int) -> None:
        """Decrypt the products that the other party masked."""
        fields, masked = self._fields(self._key.public.plaintext_bits), self._party.receive(self.peer, MaskedRates)
        numbers = open_fields(self._key, masked.values, count, fields, self._threads, self.peer, "MaskedRates.values")
        self._party.send(self.peer, OpenedRates(pack_numbers(numbers, fields)))

    def _fields(self, plaintext_bits: int) -> Fields:
        bits = product_bits(self._setting.n_rows, WEIGHT_BITS, VALUE_BITS)
        return Fields.of(bits, plaintext_bits, masks=1)


class RateGradients:
    """A party's end of a Poisson regression; `target` is that of the active party.

    The own slice of the gradient is the mean of rates times own columns, less that of labels times own columns.
    """

    def __init__(self, products: RateProducts, setting: Setting, X: Floats, target: Target | None) -> None:
        self._products, self._X, self._n_theirs = products, X, setting.n_columns[products.peer]
        if target is None:
            self._pull = self._products.times(None, X) / len(X)
        else:
            self._products.times(target.labels, None, asked=self._n_theirs)
            self._pull = X.T @ target.labels / len(X)
        self._is_active = target is not None
        self._factors = np.ones(len(X))

    def block(self, weights: Floats | None) -> Floats:
        """Return the own block of the mean Hessian at these weights; None: at 0, where all rates are 1."""
        if weights is None:
            start: Floats = self._X.T @ self._X / len(self._X)
            return start
        # the sums of rates times any two of the own columns
        own, n, asked = self._take_factors(weights), self._X.shape[1], self._n_theirs * (self._n_theirs + 1) // 2
        left, right = np.triu_indices(n)
        pairs = self._products.times(own, own[:, np.newaxis] * self._X[:, left] * self._X[:, right], asked=asked)
        block = np.zeros((n, n))
        block[left, right] = pairs / len(self._X)
        return block + np.triu(block, 1).T

    def gradient(self, weights: Floats) -> Floats:
        """Return the own slice of the gradient at all parties' weights."""
        own = self._take_factors(weights)
        rates = self._products.times(own, own[:, np.newaxis] * self._X, asked=self._n_theirs)
        return rates / len(self._X) - self._pull

    def own_loss(self, weights: Floats, gradient: Floats) -> float:
        """Return the own part of the mean loss less that at 0; the mean rate is of the intercept's column."""
        own = -float(weights @ self._pull)
        return own + float(gradient[-1] + self._pull[-1]) - 1.0 if self._is_active else own

    def check(self, weights: Floats) -> None:
        """Raise DataError for parts that were cut off at the optimum, which is none then."""
        if np.abs(self._X @ weights).max(initial=0.0) > LARGEST_PART:
            raise DataError(
                f"the optimum has a row whose rate differs from the mean by a factor above e^{LARGEST_PART:g} in one "
                "party's columns, which is more than parties compute: raise l2, or transform or leave out columns with "
                "values far from the others",
                public=f"a part of the logarithm of a rate exceeds {LARGEST_PART:g} at the optimum",
            )

    def times(self, owner: str, vector: Floats | None) -> Floats | None:
        """Multiply the own columns with a party's vector, which its owner gives, under the Hessian."""
        if vector is not None:
            self._products.times(self._factors * vector, None, asked=self._n_theirs)
            return None
        return self._products.times(None, self._factors[:, np.newaxis] * self._X) / len(self._X)

    def _take_factors(self, weights: Floats) -> Floats:
        # where parts are cut off, the loss is too large and the step is undone
        self._factors = np.exp(np.clip(self._X @ weights, -LARGEST_PART, LARGEST_PART))
        return self._factors


def check_pairs(setting: Setting) -> None:
    """Raise ConfigError for so few rows that sums of rates times two columns would show them; see `fewest_rows`."""
    for name, n_columns in setting.n_columns.items():
        least = ROWS_PER_COLUMN * (n_columns * (n_columns + 1) // 2)
        if setting.n_rows < least:
            raise ConfigError(
                f"standard errors show {name} the sums of rates times any two of its {n_columns} columns, with "
                f"the intercept: expected at least {least} rows, got {setting.n_rows}; leave columns out"
            )


def _fixed(values: Floats, fraction: int, bits: int) -> Integers:
    if not np.all(np.abs(values) < 2.0 ** (bits - 1 - fraction)):
        raise diverged("a rate is too large")
    return np.rint(values * 2.0**fraction).astype(np.int64)
