"""Each party's columns times the sum of all parties' vectors, under an additive cipher whose key a coordinator has.

Every data party k has columns X_k and, for a batch, a vector v_k: its part of 4 d, or of the Hessian's product. It gets
X_k^T (sum of all v_j) and nothing else. As in Yang et al. (and Hardy et al.), the coordinator has the key.

===================  =============================  ==============================================  ===================
message              from -> to                     content                                         protection
===================  =============================  ==============================================  ===================
`SharedKey`          coordinator -> all             public key                                      TLS
`EncryptedVector`    passive -> active party        <v_k>, a ciphertext per row                     cipher
`EncryptedVector`    active -> passive party        <4 d>, sum of all of them, re-randomised        cipher
`MaskedProducts`     data party -> coordinator      <X_k^T 4 d + R_k>, packed, re-randomised        cipher, mask
`DecryptedProducts`  coordinator -> data party      X_k^T 4 d + R_k                                 mask
`LossPart`           passive -> coordinator         its part of an epoch's loss                     masks that cancel
`LossCipher`         active party -> coordinator    the same, and <-sum of y u of passives + R>     the same; cipher
`LossTotal`          coordinator -> active party    the loss + R                                    mask
===================  =============================  ==============================================  ===================

The loss of a batch needs no product of vectors of its own: with 4 d = u - 2 y, the Taylor loss is
log 2 + mean(d u) / 2 - mean(y u) / 4, and the mean of d u is w^T g, of which every party has its own part.

*Assumptions*: honest-but-curious parties; the cipher. The coordinator must not collude with the active party, who has
all passive parties' <v_k>. Without a coordinator see `products`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.additive.ciphers import (
    OUPublicKey,
    PaillierPublicKey,
    PrivateKey,
    PublicKey,
    generate_key,
    generate_paillier_key,
)
from treaty.crypto.keystream import RING_BITS, CancellingMasks, Keystream, total
from treaty.crypto.payload import from_words, to_words
from treaty.crypto.sums.hidden_vectors import Fields, Hider, opened, product_bits
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.messages import Array, Arrays, Message, MessageLeakage, pack, row_pieces, send_rows, unpack, view
from treaty.messaging.party import Party
from treaty.systems.logistic.setup import WEIGHT_BITS, OwnData, Setting

Words = NDArray[np.uint64]

_PIECE = 12  # bits of a vector: with 28 of a column, products of 2^23 rows fit


class SharedKey(Message):
    """The coordinator's public key. Tells nothing."""

    leakage: ClassVar = MessageLeakage("the coordinator's public key", "control")

    payload: Arrays


class EncryptedVector(Message):
    """A vector, uint64 (rows, words), a ciphertext per row, of many the next ones. Tells nothing without the key."""

    leakage: ClassVar = {
        "margins": MessageLeakage("the sender's part of margins, under the coordinator's key", "encrypted"),
        "residuals": MessageLeakage("residuals of all rows, under the coordinator's key", "encrypted"),
    }

    rows: Array


class MaskedProducts(Message):
    """Packed ciphertexts of a party's products and masks, uint64 (plaintexts, words). Tells how many there are."""

    leakage: ClassVar = MessageLeakage("products under masks; how many columns", "masked")

    products: Array


class DecryptedProducts(Message):
    """What the coordinator decrypted, uint64 (n_columns, limbs). Tells its products to the party that masked them."""

    leakage: ClassVar = MessageLeakage(
        "its own gradient: the products of its columns with the hidden vector, summed over all parties",
        "aggregated",
        guard="batch_size",
    )

    numbers: Array


class LossPart(Message):
    """A part of an epoch's loss modulo 2^128, uint64 (1, 2), masked. Tells nothing but in the sum over all."""

    leakage: ClassVar = MessageLeakage("a part of an epoch's loss", "masked")

    part: Array


class LossCipher(Message):
    """The active party's part, and a ciphertext uint64 (1, words) of its sum over passive vectors; both masked."""

    leakage: ClassVar = MessageLeakage("a part of an epoch's loss", "masked")

    part: Array
    hidden: Array


class LossTotal(Message):
    """The sum of all parts, uint64 (1, 2), masked by the active party. Tells it an epoch's mean loss."""

    leakage: ClassVar = MessageLeakage("the mean loss of an epoch", "aggregated")

    total: Array


def make_key(setting: Setting) -> PrivateKey:
    """Make a key pair of the agreed cipher and size."""
    make = generate_key if setting.cipher == "ou" else generate_paillier_key
    return make(setting.key_bits, insecure_test_key_bits=setting.insecure_test_key_bits)


def read_key(payload: Sequence[Array], setting: Setting, peer: str, what: str) -> PublicKey:
    """Read a peer's public key; PeerProtocolError when it is shorter than agreed."""
    arrays = unpack(payload, peer, what)
    kind = OUPublicKey if setting.cipher == "ou" else PaillierPublicKey
    key = kind.from_payload(arrays, setting.insecure_test_key_bits)
    bits, least = key.n.bit_length(), setting.insecure_test_key_bits or setting.key_bits
    if bits < least:
        raise PeerProtocolError(peer, f"expected a key of {least} bits, got {bits} - at {what} from {peer}")
    return key


def ciphertexts(array: Array, hider: Hider, shape: tuple[int, ...], peer: str, what: str) -> Words:
    """View received ciphertexts, uint64 (*shape, words), all in range."""
    found = view(array, np.uint64, (*shape, hider.modulus.words), peer=peer, what=what)
    return hider.check(found, shape, f"{what} from {peer}")


def send_vector(party: Party, peer: str, hidden: Words, kind: type[EncryptedVector] = EncryptedVector) -> None:
    """Send a peer an encrypted vector (n, words)."""
    send_rows(party, peer, len(hidden), 64 * hidden.shape[1], lambda of: kind(Array.of(hidden[of])))


def take_vectors(party: Party, peers: Sequence[str], n_rows: int, hider: Hider) -> Words:
    """Receive encrypted vectors of some peers; return the vector (n_rows, words) of their sums."""
    added = np.empty((n_rows, hider.modulus.words), np.uint64)
    for of in row_pieces(n_rows, 64 * hider.modulus.words):
        shape = (of.stop - of.start,)
        theirs = [
            ciphertexts(party.receive(peer, EncryptedVector).rows, hider, shape, peer, "EncryptedVector.rows")
            for peer in peers
        ]
        added[of] = add_up(theirs, hider)
    return added


def product_of_all(rows: Words, hider: Hider) -> Words:
    """Multiply ciphertexts (n, words) into one, of the sum of their plaintexts (1, words)."""
    product = np.empty((1, rows.shape[1]), np.uint64)
    hider.modulus.segment_products(rows, np.arange(len(rows), dtype=np.int32), np.array([0, len(rows)]), product)
    return product


def add_up(vectors: Sequence[Words], hider: Hider) -> Words:
    """Add up encrypted vectors (n, words)."""
    return vectors[0] if len(vectors) == 1 else hider.multiply(vectors)


def sum_fields(setting: Setting, plaintext_bits: int, *, masked: bool = True) -> Fields:
    """Return how products of <4 d> with columns are packed for the coordinator."""
    bits = product_bits(setting.batch_size, WEIGHT_BITS, setting.vector_bits) + len(setting.owners).bit_length()
    return Fields.of(bits, plaintext_bits, masks=int(masked), most=None if masked else 1)


def loss_fields(setting: Setting, plaintext_bits: int, masks: int) -> Fields:
    """Return how an epoch's loss lies in a plaintext, under `masks` masks."""
    return Fields.of(setting.loss_bits, plaintext_bits, masks=masks, most=1)


class CoordinatedProducts:
    """A data party's end; `masks` cancel in sums over all data parties."""

    def __init__(self, party: Party, setting: Setting, own: OwnData, masks: CancellingMasks, threads: int) -> None:
        assert setting.coordinator is not None
        self._party, self._setting, self._columns, self._labels = party, setting, own.columns, own.labels
        self._masks, self._coordinator = masks, setting.coordinator
        payload = party.receive(self._coordinator, SharedKey).payload
        key = read_key(payload, setting, self._coordinator, "SharedKey")
        self._hider = Hider(key, key.plaintext_bits - 2, threads)
        self._fields = sum_fields(setting, key.plaintext_bits)
        self._of_class: dict[int, list[Words]] = {-1: [], 1: []}
        self._offsets = 0

    def times(self, rows: Integers, own: Integers, *, counted: bool) -> list[int]:
        """Return the own columns' products with the sum of all parties' vectors, one integer per column.

        `rows` is the batch, int64 (batch_size,), `own` the own vector of as many entries; `counted` says that passive
        vectors are margins, which enter the epoch's loss.
        """
        hidden = self._all_vectors(rows, own, counted)
        products = self._hider.weigh(hidden, self._columns[rows], WEIGHT_BITS)
        masks, half = self._fields.masks(len(products)), 1 << (self._fields.bits - 1)
        covered = self._hider.cover(products, [half + mask for mask in masks], self._fields)
        self._party.send(self._coordinator, MaskedProducts(Array.of(covered)))
        limbs = -(-self._fields.width // 64)
        answer = self._party.receive(self._coordinator, DecryptedProducts).numbers
        numbers = view(answer, np.uint64, (len(masks), limbs), peer=self._coordinator, what="DecryptedProducts.numbers")
        found = self._fields.signed(from_words(numbers), masks)
        offset = len(self._setting.owners) << (self._setting.vector_bits - 1)
        sums: list[int] = self._columns[rows].sum(axis=0).tolist()
        return [product - offset * of_column for product, of_column in zip(found, sums, strict=True)]

    def _all_vectors(self, rows: Integers, own: Integers, counted: bool) -> Words:
        """Return <4 d>: the active party adds up all parties' vectors."""
        party, setting = self._party, self._setting
        hidden = self._hider.hide(own, setting.vector_bits)
        if party.name != setting.active:
            send_vector(party, setting.active, hidden)
            return take_vectors(party, [setting.active], len(rows), self._hider)
        of_passives = take_vectors(party, setting.passives, len(rows), self._hider)
        if counted:
            self._count(rows, of_passives)
        hidden = self._hider.multiply([of_passives, hidden])  # the own ciphertexts are fresh: so is the product
        for peer in setting.passives:
            send_vector(party, peer, hidden)
        return hidden

    def _count(self, rows: Integers, of_passives: Words) -> None:
        """Add to <sum of passive parties' u> of either class."""
        assert self._labels is not None
        for label, found in self._of_class.items():
            mine = of_passives[self._labels[rows] == label]
            if len(mine):
                found.append(product_of_all(mine, self._hider))
                each = len(self._setting.passives) << (self._setting.vector_bits - 1)
                self._offsets += label * len(mine) * each

    def loss(self, own: int) -> int | None:
        """Return an epoch's loss, the sum of all own parts less passive parties' y u, to the active party alone."""
        party, setting, place = self._party, self._setting, self._party.round
        if party.name != setting.active:
            covered = self._masks.cover([own], place, "loss")
            party.send(self._coordinator, LossPart(Array.of(covered)))
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
        party.send(self._coordinator, LossCipher(Array.of(covered), Array.of(hidden)))
        answer = party.receive(self._coordinator, LossTotal).total
        padded = view(answer, np.uint64, (1, 2), peer=self._coordinator, what="LossTotal.total")
        self._of_class, self._offsets = {-1: [], 1: []}, 0
        minus_pad = to_words([-pad % (1 << RING_BITS)], 2)
        return total([padded, minus_pad])[0]


class Opener:
    """The coordinator's end: makes the key, decrypts masked numbers."""

    def __init__(self, party: Party, setting: Setting, threads: int) -> None:
        self._party, self._setting, self._threads = party, setting, threads
        self._key = make_key(setting)
        self._fields = sum_fields(setting, self._key.public.plaintext_bits)
        for name in setting.owners:
            party.send(name, SharedKey(pack(self._key.public.to_payload())))

    def open(self) -> None:
        """Decrypt every party's masked products and send them back."""
        words, limbs = self._key.public.modulus.words, -(-self._fields.width // 64)
        for name in self._setting.owners:
            count = self._setting.n_columns[name]
            plaintexts = len(self._fields.starts(count)) - 1
            message = self._party.receive(name, MaskedProducts)
            hidden = view(message.products, np.uint64, (plaintexts, words), peer=name, what="MaskedProducts.products")
            numbers = opened(self._key, hidden, count, self._fields, self._threads)
            self._party.send(name, DecryptedProducts(Array.of(to_words(numbers, limbs))))

    def loss(self) -> None:
        """Add up an epoch's masked loss for the active party."""
        party, setting, words = self._party, self._setting, self._key.public.modulus.words
        fields = loss_fields(setting, self._key.public.plaintext_bits, 1)
        parts = []
        for name in setting.passives:
            part = party.receive(name, LossPart).part
            parts.append(view(part, np.uint64, (1, 2), peer=name, what="LossPart.part"))
        told = party.receive(setting.active, LossCipher)
        parts.append(view(told.part, np.uint64, (1, 2), peer=setting.active, what="LossCipher.part"))
        hidden = view(told.hidden, np.uint64, (1, words), peer=setting.active, what="LossCipher.hidden")
        parts.append(to_words(opened(self._key, hidden, 1, fields, self._threads), 4)[:, :2])  # modulo 2^128
        ring = total(parts)[0] % (1 << RING_BITS)
        party.send(setting.active, LossTotal(Array.of(to_words([ring], 2))))


def exact_products(columns: Integers, vector: Integers) -> list[int]:
    """Return X^T v of (rows, columns) and (rows,) in Python's integers, 12 bits of v at a time to fit int64."""
    totals = [0] * columns.shape[1]
    for shift in range(0, 64, _PIECE):
        piece = vector >> shift if shift + _PIECE >= 64 else vector >> shift & ((1 << _PIECE) - 1)
        for k, product in enumerate((columns.T @ piece).tolist()):
            totals[k] += product << shift
    return totals
