"""Each party's columns times the sum of all parties' vectors, under an additive cipher whose key a coordinator has.

Every data party k has columns X_k and, for a batch, a vector v_k: its part of 4 d, or of the Hessian's product. It gets
X_k^T (sum of all v_j) and nothing else. As in Yang et al. (and Hardy et al.), the coordinator has the key.

The loss of a batch needs no product of vectors of its own: with 4 d = u - 2 y, the Taylor loss is
log 2 + mean(d u) / 2 - mean(y u) / 4, and the mean of d u is w^T g, of which every party has its own part.

*Assumptions*: honest-but-curious parties; the cipher. The coordinator must not collude with the active party, which has
all passive parties' <v_k>. Without a coordinator see `products`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.additive import ciphers
from treaty.crypto.keystream import RING_BITS, CancellingMasks, Keystream, total
from treaty.crypto.payload import from_words, to_words
from treaty.crypto.sums.hidden_vectors import Fields, Hider, opened, product_bits
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.exchanges import send_rows
from treaty.messaging.messages import Array, Arrays, Message, leaks, leaks_by, pack, row_pieces, unpack, view
from treaty.messaging.party import Party
from treaty.systems.logistic.setup import WEIGHT_BITS, OwnData, Setting

Words = NDArray[np.uint64]

# Bits of a vector: with 28 of a column, products of 2^23 rows fit
_PIECE = 12

OWN_GRADIENT = "its own gradient: the products of its columns with the hidden vector, summed over all parties"


@leaks("the coordinator's public key", "control")
class SharedKey(Message):
    """The coordinator's public key."""

    payload: Arrays


@leaks_by(
    margins=("the sender's part of margins, under the coordinator's key", "encrypted"),
    residuals=("residuals of all rows, under the coordinator's key", "encrypted"),
)
class EncryptedVector(Message):
    """A vector, uint64 (rows, words), a ciphertext per row, of many the next ones."""

    rows: Array


@leaks("products under masks; how many columns", "masked")
class MaskedProducts(Message):
    """Packed ciphertexts of a party's products and masks, uint64 (plaintexts, words)."""

    products: Array


@leaks(OWN_GRADIENT, "aggregated", guard="batch_size")
class DecryptedProducts(Message):
    """What the coordinator decrypted, uint64 (n_columns, limbs), for the party that masked it."""

    numbers: Array


@leaks("a part of an epoch's loss", "masked")
class LossPart(Message):
    """A part of an epoch's loss modulo 2^128, uint64 (1, 2), masked."""

    part: Array


@leaks("a part of an epoch's loss", "masked")
class LossCipher(Message):
    """The active party's part, and a ciphertext uint64 (1, words) of its sum over passive vectors; both masked."""

    part: Array
    hidden: Array


@leaks("the mean loss of an epoch", "aggregated")
class LossTotal(Message):
    """The sum of all parts, uint64 (1, 2), masked by the active party."""

    total: Array


def make_key(setting: Setting) -> ciphers.PrivateKey:
    """Make a key pair of the agreed cipher and size."""
    make = ciphers.generate_key if setting.cipher == "ou" else ciphers.generate_paillier_key
    return make(setting.key_bits, insecure_test_key_bits=setting.insecure_test_key_bits)


def read_key(payload: Sequence[Array], setting: Setting, peer: str, what: str) -> ciphers.PublicKey:
    """Read a peer's public key; PeerProtocolError when it is shorter than agreed."""
    arrays = unpack(payload, peer, what)
    kind = ciphers.OUPublicKey if setting.cipher == "ou" else ciphers.PaillierPublicKey
    key = kind.from_payload(arrays, setting.insecure_test_key_bits)
    bits, least = key.n.bit_length(), setting.insecure_test_key_bits or setting.key_bits
    if bits < least:
        raise PeerProtocolError(peer, f"expected a key of {least} bits, got {bits}", at=what)
    return key


def ciphertexts(array: Array, hider: Hider, shape: tuple[int, ...], peer: str, what: str) -> Words:
    """View received ciphertexts, uint64 (*shape, words), all in range."""
    found = view(array, np.uint64, (*shape, hider.modulus.words), peer=peer, what=what)
    return hider.check(found, shape, f"{what} from {peer}")


def send_vector(party: Party, peer: str, hidden: Words) -> None:
    """Send a peer an encrypted vector (n, words)."""
    send_rows(party, peer, len(hidden), 64 * hidden.shape[1], lambda of: EncryptedVector(Array.of(hidden[of])))


def take_vectors(party: Party, peers: Sequence[str], n_rows: int, hider: Hider) -> Words:
    """Receive encrypted vectors of some peers; return the vector (n_rows, words) of their sums."""
    added = np.empty((n_rows, hider.modulus.words), np.uint64)
    for of in row_pieces(n_rows, 64 * hider.modulus.words):
        shape = (of.stop - of.start,)
        theirs = [
            ciphertexts(party.receive(peer, EncryptedVector).rows, hider, shape, peer, "EncryptedVector.rows")
            for peer in peers
        ]
        added[of] = theirs[0] if len(theirs) == 1 else hider.multiply(theirs)
    return added


def cover(hider: Hider, products: Words, fields: Fields) -> tuple[Array, list[int]]:
    """Pack encrypted products under fresh masks; return also the masks."""
    masks, half = fields.masks(len(products)), 1 << (fields.bits - 1)
    return Array.of(hider.cover(products, [half + mask for mask in masks], fields)), masks


def uncover(opened_: Array, masks: Sequence[int], fields: Fields, peer: str, what: str) -> list[int]:
    """Take the own masks off numbers, uint64 (n, limbs), that a peer has decrypted."""
    words = view(opened_, np.uint64, (len(masks), -(-fields.width // 64)), peer=peer, what=what)
    return fields.signed(from_words(words), masks)


def open_fields(
    key: ciphers.PrivateKey, hidden: Array, count: int, fields: Fields, threads: int, peer: str, what: str
) -> list[int]:
    """Decrypt `count` packed numbers, uint64 (plaintexts, words), that a peer has sent."""
    shape = (-(-count // fields.per_plaintext), key.public.modulus.words)
    return opened(key, view(hidden, np.uint64, shape, peer=peer, what=what), count, fields, threads)


def pack_numbers(numbers: Sequence[int], fields: Fields) -> Array:
    """Return decrypted numbers, still masked, uint64 (n, limbs)."""
    return Array.of(to_words(numbers, -(-fields.width // 64)))


def sum_fields(setting: Setting, plaintext_bits: int, *, masked: bool = True) -> Fields:
    """Return how products of <4 d> with columns are packed for the coordinator."""
    bits = product_bits(setting.batch_size, WEIGHT_BITS, setting.vector_bits) + len(setting.owners).bit_length()
    return Fields.of(bits, plaintext_bits, masks=int(masked), most=None if masked else 1)


def loss_fields(setting: Setting, plaintext_bits: int, masks: int) -> Fields:
    """Return how an epoch's loss lies in a plaintext, under `masks` masks."""
    # the signed sum of all parts, with their offsets
    bits = setting.largest_loss.bit_length() + 2 + len(setting.owners).bit_length()
    return Fields.of(bits, plaintext_bits, masks=masks, most=1)


class CoordinatedProducts:
    """A data party's part; `masks` cancel in sums over all data parties."""

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
        covered, masks = cover(self._hider, products, self._fields)
        self._party.send(self._coordinator, MaskedProducts(covered))
        answer = self._party.receive(self._coordinator, DecryptedProducts).numbers
        found = uncover(answer, masks, self._fields, self._coordinator, "DecryptedProducts.numbers")
        # every entry of each party's vector was shifted to be positive
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
        # the own ciphertexts are fresh: so is the product
        hidden = self._hider.multiply([of_passives, hidden])
        for peer in setting.passives:
            send_vector(party, peer, hidden)
        return hidden

    def _count(self, rows: Integers, of_passives: Words) -> None:
        """Add to <sum of passive parties' u> of either class."""
        assert self._labels is not None
        for label, found in self._of_class.items():
            mine = of_passives[self._labels[rows] == label]
            if len(mine):
                found.append(self._hider.product(mine))
                each = len(self._setting.passives) << (self._setting.vector_bits - 1)
                self._offsets += label * len(mine) * each

    def loss(self, own: int) -> int | None:
        """Return an epoch's loss, the sum of all own parts less passive parties' y u, to the active party alone."""
        party, setting, place = self._party, self._setting, self._party.round
        if party.name != setting.active:
            covered = self._masks.cover([own], place, "loss")
            party.send(self._coordinator, LossPart(Array.of(covered)))
            return None
        # <-sum of y u> of passive parties: products of either class's ciphertexts, divided. A class may have no row in
        # any batch, hence the encrypted zeros.
        zero = self._hider.hide_words(np.zeros((2, 1), np.uint64))
        more, less = (
            self._hider.multiply([zero[k : k + 1], *self._of_class[label]]) for k, label in enumerate((1, -1))
        )
        fields = loss_fields(setting, self._hider.plaintext_bits, 1)
        (mask,), half = fields.masks(1), 1 << (fields.bits - 1)
        hidden = self._hider.cover(self._hider.subtract(less, more), [half + mask], fields)
        # the coordinator must not see the sum
        pad = from_words(Keystream().bits(RING_BITS, 1))[0]
        covered = self._masks.cover([own + self._offsets - half - mask + pad], place, "loss")
        party.send(self._coordinator, LossCipher(Array.of(covered), Array.of(hidden)))
        answer = party.receive(self._coordinator, LossTotal).total
        padded = view(answer, np.uint64, (1, 2), peer=self._coordinator, what="LossTotal.total")
        self._of_class, self._offsets = {-1: [], 1: []}, 0
        minus_pad = to_words([-pad % (1 << RING_BITS)], 2)
        return total([padded, minus_pad])[0]


class Opener:
    """The coordinator's part: makes the key, decrypts masked numbers."""

    def __init__(self, party: Party, setting: Setting, threads: int) -> None:
        self._party, self._setting, self._threads = party, setting, threads
        self._key = make_key(setting)
        self._fields = sum_fields(setting, self._key.public.plaintext_bits)
        for name in setting.owners:
            party.send(name, SharedKey(pack(self._key.public.to_payload())))

    def open(self) -> None:
        """Decrypt every party's masked products and send them back."""
        for name in self._setting.owners:
            hidden, what = self._party.receive(name, MaskedProducts).products, "MaskedProducts.products"
            count = self._setting.n_columns[name]
            numbers = open_fields(self._key, hidden, count, self._fields, self._threads, name, what)
            self._party.send(name, DecryptedProducts(pack_numbers(numbers, self._fields)))

    def loss(self) -> None:
        """Add up an epoch's masked loss for the active party."""
        party, active = self._party, self._setting.active
        fields = loss_fields(self._setting, self._key.public.plaintext_bits, 1)
        parts = []
        for name in self._setting.passives:
            part = party.receive(name, LossPart).part
            parts.append(view(part, np.uint64, (1, 2), peer=name, what="LossPart.part"))
        of_active = party.receive(active, LossCipher)
        parts.append(view(of_active.part, np.uint64, (1, 2), peer=active, what="LossCipher.part"))
        numbers = open_fields(self._key, of_active.hidden, 1, fields, self._threads, active, "LossCipher.hidden")
        # modulo 2^128, in which the masks of all parts cancel
        parts.append(to_words(numbers, 4)[:, :2])
        ring = total(parts)[0] % (1 << RING_BITS)
        party.send(active, LossTotal(Array.of(to_words([ring], 2))))


def exact_products(columns: Integers, vector: Integers) -> list[int]:
    """Return X^T v of (rows, columns) and (rows,) in Python's integers, 12 bits of v at a time to fit int64."""
    totals = [0] * columns.shape[1]
    for shift in range(0, 64, _PIECE):
        piece = vector >> shift if shift + _PIECE >= 64 else vector >> shift & ((1 << _PIECE) - 1)
        for k, product in enumerate((columns.T @ piece).tolist()):
            totals[k] += product << shift
    return totals
