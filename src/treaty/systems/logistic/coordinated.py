"""Each party's columns times the sum of all parties' vectors, under an additive cipher whose key a coordinator has.

Every data party k has columns X_k and, for a batch, a vector v_k: its part of 4 d, or of the Hessian's product. Each is
to get X_k^T (sum of all v_j) and nothing else. `CoordinatedProducts` follows Yang et al. (and Hardy et al.): the
coordinator has the key.

=============  ======================  =====================================================  ========================
message        from -> to              content                                                protection
=============  ======================  =====================================================  ========================
`SharedKey`    coordinator -> all      public key                                             TLS
`Vector`       host -> guest           <v_k>, a ciphertext per row                            cipher
`Vector`       guest -> host           <4 d>, sum of all of them, re-randomised               cipher
`Masked`       data party -> coord.    <X_k^T 4 d + R_k>, packed, re-randomised               cipher, mask
`Opened`       coord. -> data party    X_k^T 4 d + R_k                                        mask
`LossPart`     host -> coord.          its part of an epoch's loss                            masks that cancel
`LossCipher`   guest -> coord.         the same, and <- sum of y u over hosts + R>            masks that cancel, cipher
`LossTotal`    coord. -> guest         the loss + R                                           mask
=============  ======================  =====================================================  ========================

The loss of a batch needs no product of vectors of its own: with 4 d = u - 2 y, the Taylor loss is
log 2 + mean(d u) / 2 - mean(y u) / 4, and the mean of d u is w^T g, of which every party has its own part.

*Assumptions*: honest-but-curious parties; the cipher. The coordinator must not collude with the guest, who has all
hosts' <v_k>. Without a coordinator see `own_key_products`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.crypto import parameters
from treaty.crypto.additive import okamoto_uchiyama, paillier
from treaty.crypto.additive.key_generation import generate_key, generate_paillier_key
from treaty.crypto.additive.montgomery import from_words, to_words
from treaty.crypto.keystream import Keystream
from treaty.crypto.sums.additive_sums import AdditivePrivateKey
from treaty.crypto.vectors.cancelling_masks import RING_BITS, CancellingMasks, total
from treaty.crypto.vectors.encrypted_vectors import Fields, Hider, PublicKey, opened, product_bits
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.systems.linear_options import LinearOptions
from treaty.systems.logistic.setup import WEIGHT_BITS, Setting
from treaty.systems.vertical.encrypted_columns import pack, unpack

Words = NDArray[np.uint64]
Integers = NDArray[np.int64]

_PIECE = 12  # bits of a vector: with 28 of a column, products of 2^23 rows fit


class SharedKey(Message):
    """The coordinator's public key. Tells nothing."""

    payload: list[Array]


class Vector(Message):
    """A vector, uint64 (batch_size, words), a ciphertext per row. Tells nothing to who has no key."""

    rows: Array


class Masked(Message):
    """Packed ciphertexts of a party's products and masks, uint64 (plaintexts, words). Tells how many there are."""

    products: Array


class Opened(Message):
    """What the coordinator decrypted, uint64 (n_columns, limbs). Tells the owner of the masks its products."""

    numbers: Array


class LossPart(Message):
    """A part of an epoch's loss modulo 2^128, uint64 (1, 2), masked. Tells nothing but in the sum over all."""

    part: Array


class LossCipher(Message):
    """The guest's part, and a ciphertext uint64 (1, words) of what it got from hosts' vectors; both masked."""

    part: Array
    hidden: Array


class LossTotal(Message):
    """The sum of all parts, uint64 (1, 2), masked by the guest. Tells the guest an epoch's mean loss."""

    total: Array


def make_key(cipher: str, options: LinearOptions) -> AdditivePrivateKey:
    """Make a key for a job."""
    make = generate_key if cipher == "ou" else generate_paillier_key
    return make(_key_bits(cipher, options), insecure_test_key_bits=options.insecure_test_key_bits)


def read_key(payload: Sequence[Array], cipher: str, options: LinearOptions, peer: str, what: str) -> PublicKey:
    """Read a peer's public key; PeerProtocolError when it is shorter than agreed."""
    arrays = unpack(payload, peer, what)
    kind = okamoto_uchiyama.PublicKey if cipher == "ou" else paillier.PublicKey
    key = kind.from_payload(arrays, options.insecure_test_key_bits)
    bits, least = key.n.bit_length(), options.insecure_test_key_bits or _key_bits(cipher, options)
    if bits < least:
        raise PeerProtocolError(peer, f"expected a key of {least} bits, got {bits} - at {what} from {peer}")
    return key


def _key_bits(cipher: str, options: LinearOptions) -> int:
    default = parameters.OU_DEFAULT_KEY_BITS if cipher == "ou" else parameters.PAILLIER_DEFAULT_KEY_BITS
    return options.key_bits or default


def ciphertexts(array: Array, hider: Hider, shape: tuple[int, ...], peer: str, what: str) -> Words:
    """View received ciphertexts, uint64 (*shape, words), all in range."""
    found = view(array, np.uint64, (*shape, hider.modulus.words), peer=peer, what=what)
    return hider.check(found, shape, f"{what} from {peer}")


def sum_fields(setting: Setting, plaintext_bits: int, *, masked: bool = True) -> Fields:
    """How products of <4 d> with columns are packed for the coordinator."""
    bits = product_bits(setting.batch_size, WEIGHT_BITS, setting.vector_bits) + len(setting.parties).bit_length()
    return Fields.of(bits, plaintext_bits, masks=int(masked), most=None if masked else 1)


def loss_fields(setting: Setting, plaintext_bits: int, masks: int) -> Fields:
    """How an epoch's loss lies in a plaintext."""
    return Fields.of(setting.loss_bits, plaintext_bits, masks=masks, most=1)


class CoordinatedProducts:
    """A data party's end.

    Parameters
    ----------
    party : Party
    setting : Setting
    options : LinearOptions
    columns : int64 (n_rows, n_columns)
        Own columns, in fixed point.
    labels : int64 (n_rows,) or None
        -1 and 1, at the guest.
    masks : CancellingMasks
        Among data parties.
    threads : int
    """

    def __init__(
        self,
        party: Party,
        setting: Setting,
        options: LinearOptions,
        columns: Integers,
        labels: Integers | None,
        masks: CancellingMasks,
        threads: int,
    ) -> None:
        assert setting.coordinator is not None
        self._party, self._setting, self._columns, self._labels = party, setting, columns, labels
        self._masks, self._lead = masks, setting.coordinator
        told = party.receive(self._lead, SharedKey)
        key = read_key(told.payload, setting.cipher, options, self._lead, "SharedKey")
        self._hider = Hider(key, key.plaintext_bits - 2, threads)
        self._fields = sum_fields(setting, key.plaintext_bits)
        self._of_class: dict[int, list[Words]] = {-1: [], 1: []}
        self._offsets = 0

    def times(self, rows: Integers, own: Integers, *, counted: bool) -> list[int]:
        """Return the own columns' products with the sum of all parties' vectors.

        Parameters
        ----------
        rows : int64 (batch_size,)
            The batch.
        own : int64 (batch_size,)
            The own vector.
        counted : bool
            Whether hosts' vectors are margins that the loss is made of.
        """
        hidden = self._all_vectors(rows, own, counted)
        products = self._hider.weigh(hidden, self._columns[rows], WEIGHT_BITS)
        masks, half = self._fields.masks(len(products)), 1 << (self._fields.bits - 1)
        covered = self._hider.cover(products, [half + mask for mask in masks], self._fields)
        self._party.send(self._lead, Masked(Array.of(covered)))
        limbs = -(-self._fields.width // 64)
        answer = self._party.receive(self._lead, Opened).numbers
        numbers = view(answer, np.uint64, (len(masks), limbs), peer=self._lead, what="Opened.numbers")
        found = self._fields.signed(from_words(numbers), masks)
        offset = len(self._setting.parties) << (self._setting.vector_bits - 1)
        sums: list[int] = self._columns[rows].sum(axis=0).tolist()
        return [product - offset * of_column for product, of_column in zip(found, sums, strict=True)]

    def _all_vectors(self, rows: Integers, own: Integers, counted: bool) -> Words:
        """Return <4 d>: the guest adds up everybody's."""
        party, setting, shape = self._party, self._setting, (len(rows),)
        hidden = self._hider.hide(own, setting.vector_bits)
        if party.name != setting.guest:
            party.send(setting.guest, Vector(Array.of(hidden)))
            answer = party.receive(setting.guest, Vector)
            return ciphertexts(answer.rows, self._hider, shape, setting.guest, "Vector.rows")
        theirs = [
            ciphertexts(party.receive(host, Vector).rows, self._hider, shape, host, "Vector.rows")
            for host in setting.hosts
        ]
        of_hosts = theirs[0] if len(theirs) == 1 else self._hider.multiply(theirs)
        if counted:
            self._count(rows, of_hosts)
        hidden = self._hider.multiply([of_hosts, hidden])  # the own ciphertexts are fresh: so is the product
        for host in setting.hosts:
            party.send(host, Vector(Array.of(hidden)))
        return hidden

    def _count(self, rows: Integers, of_hosts: Words) -> None:
        """Add to <sum of hosts' u> of either class."""
        assert self._labels is not None
        for label, found in self._of_class.items():
            mine = of_hosts[self._labels[rows] == label]
            if len(mine):
                out = np.empty((1, mine.shape[1]), np.uint64)
                index = np.arange(len(mine), dtype=np.int32)
                self._hider.modulus.segment_products(mine, index, np.array([0, len(mine)]), out)
                found.append(out)
                each = len(self._setting.hosts) << (self._setting.vector_bits - 1)
                self._offsets += label * len(mine) * each

    def loss(self, own: int) -> int | None:
        """Add up an epoch's loss, of every party's own part less hosts' y u; to the guest alone."""
        party, setting, place = self._party, self._setting, self._party.round
        if party.name != setting.guest:
            covered = self._masks.cover([own], place, "loss")
            party.send(self._lead, LossPart(Array.of(covered)))
            return None
        zero = self._hider.hide_words(np.zeros((2, 1), np.uint64))  # a class may have no row in any batch
        more, less = (
            self._hider.multiply([zero[k : k + 1], *self._of_class[label]]) for k, label in enumerate((1, -1))
        )
        fields = loss_fields(setting, self._hider.plaintext_bits, 1)
        (mask,), half = fields.masks(1), 1 << (fields.bits - 1)
        hidden = self._hider.cover(self._hider.subtract(less, more), [half + mask], fields)
        pad = from_words(Keystream().bits(RING_BITS, 1))[0]  # the coordinator must not see the sum
        covered = self._masks.cover([own + self._offsets - half - mask + pad], place, "loss")
        party.send(self._lead, LossCipher(Array.of(covered), Array.of(hidden)))
        answer = party.receive(self._lead, LossTotal).total
        padded = view(answer, np.uint64, (1, 2), peer=self._lead, what="LossTotal.total")
        self._of_class, self._offsets = {-1: [], 1: []}, 0
        minus_pad = to_words([-pad % (1 << RING_BITS)], 2)
        return total([padded, minus_pad])[0]

    def close(self) -> None:
        """Nothing is kept."""


class Opener:
    """The coordinator's end: makes the key, decrypts what is masked."""

    def __init__(self, party: Party, setting: Setting, options: LinearOptions, threads: int) -> None:
        self._party, self._setting, self._threads = party, setting, threads
        self._key = make_key(setting.cipher, options)
        self._fields = sum_fields(setting, self._key.public.plaintext_bits)
        for name in setting.parties:
            party.send(name, SharedKey(pack(self._key.public.to_payload())))

    def open(self) -> None:
        """Decrypt every party's masked products, and return them."""
        words, limbs = self._key.public.modulus.words, -(-self._fields.width // 64)
        for name in self._setting.parties:
            count = self._setting.n_columns[name]
            plaintexts = len(self._fields.starts(count)) - 1
            message = self._party.receive(name, Masked)
            hidden = view(message.products, np.uint64, (plaintexts, words), peer=name, what="Masked.products")
            numbers = opened(self._key, hidden, count, self._fields, self._threads)
            self._party.send(name, Opened(Array.of(to_words(numbers, limbs))))

    def loss(self) -> None:
        """Add up an epoch's masked loss for the guest."""
        party, setting, words = self._party, self._setting, self._key.public.modulus.words
        fields = loss_fields(setting, self._key.public.plaintext_bits, 1)
        parts = []
        for name in setting.hosts:
            part = party.receive(name, LossPart).part
            parts.append(view(part, np.uint64, (1, 2), peer=name, what="LossPart.part"))
        told = party.receive(setting.guest, LossCipher)
        parts.append(view(told.part, np.uint64, (1, 2), peer=setting.guest, what="LossCipher.part"))
        hidden = view(told.hidden, np.uint64, (1, words), peer=setting.guest, what="LossCipher.hidden")
        parts.append(to_words(opened(self._key, hidden, 1, fields, self._threads), 4)[:, :2])  # modulo 2^128
        ring = total(parts)[0] % (1 << RING_BITS)
        party.send(setting.guest, LossTotal(Array.of(to_words([ring], 2))))


def exact_products(columns: Integers, vector: Integers) -> list[int]:
    """X^T v of (rows, columns) and (rows,), in Python's integers: int64 might not hold it, but of 12 bits of v."""
    totals = [0] * columns.shape[1]
    for shift in range(0, 64, _PIECE):
        piece = vector >> shift if shift + _PIECE >= 64 else vector >> shift & ((1 << _PIECE) - 1)
        for k, product in enumerate((columns.T @ piece).tolist()):
            totals[k] += product << shift
    return totals
