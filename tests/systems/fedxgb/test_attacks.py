"""Attacks on the sums of a crowd: they succeed in paper mode where it has them, and fail in safe mode."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from systems.fedxgb.domain import (
    LENGTH,
    VICTIM,
    own_mask,
    own_vector,
    pair_masks,
    play_domain,
    server_key,
    values,
    without,
)
from systems.fedxgb.playing import crowd_rows, laid_out, options_of, play_crowd, role_input, roles_with, uniform
from treaty.crypto.keystream import add_masks, mask_key, pair_keys
from treaty.crypto.sharing.key_agreement import RoundKeys, agree
from treaty.crypto.sharing.secure_aggregation import RoundVoid
from treaty.crypto.sharing.shamir import open_bytes
from treaty.errors import ConfigError, CryptoError, PeerProtocolError
from treaty.messaging.transcript import Transcript
from treaty.systems.fedxgb import secfind as crowd_users
from treaty.systems.fedxgb.cohorts import Cohorts
from treaty.systems.fedxgb.messages import Agreements, Call, Cohort, MaskKey
from treaty.systems.fedxgb.paper import (
    KEY_BYTES,
    NUMBER_BYTES,
    InputAndShares,
    KeyShares,
    PaperDomainSums,
    PaperUserSums,
    pairs_of,
    rebuilt,
)
from treaty.systems.fedxgb.roles import domains
from treaty.systems.fedxgb.secfind import Crowd, DomainSums, UserSums, server_mask
from treaty.systems.fedxgb.system import SYSTEM
from treaty.systems.horizontal.masked_sums import MaskedInput, MaskShares, Survivors

pytestmark = pytest.mark.slow

MODES = pytest.mark.parametrize("mode", ["paper", "safe"])
PAPER = {"mode": "paper", "allow_insecure": True}

# ---------------------------------------------------------------- a whole training, with everything written down


@dataclass
class TrainingOutcome:
    """A training's model and transcripts, what users gave in plain, what edge servers opened, the server's masks."""

    model: Any
    transcripts: dict[str, Transcript]
    domains: dict[str, list[str]]
    given: dict[str, list[np.ndarray]]
    opened: dict[str, list[np.ndarray]]
    server_keys: list[dict[str, bytes]]

    def received(self, name, frm, kind):
        return [
            e.message(kind)
            for e in self.transcripts[name].entries
            if e.direction == "received" and e.peer == frm and e.step == kind.__name__
        ]


@pytest.fixture(scope="module")
def trainings():
    return {mode: train(mode) for mode in ("paper", "safe")}


def train(mode):
    parts, _, classes = crowd_rows(users=8, rows=64)
    layout = laid_out(list(parts))
    given, opened, keys = defaultdict(list), defaultdict(list), []
    total, of_crowd = DomainSums.total, Crowd.total

    def noting(give):
        def note_vector(self, call, values, *others):
            given[self._party.name].append(values)
            return give(self, call, values, *others)

        return note_vector

    def note_domain(self, number, length):
        found = total(self, number, length)
        opened[self._party.name].append(found[0])
        return found

    def note_crowd(self, length, own=None):
        nonce = server_mask(self._party, self._number + 1, 0, self._transcript.digest)
        keys.append({name: mask_key(seed, nonce) for name, seed in self._seeds.items()})
        return of_crowd(self, length, own)

    with pytest.MonkeyPatch.context() as patch:
        for kind in (UserSums, PaperUserSums):
            patch.setattr(kind, "give", noting(kind.give))
        patch.setattr(DomainSums, "total", note_domain)
        patch.setattr(Crowd, "total", note_crowd)
        options = options_of(expose="model", **(PAPER if mode == "paper" else {}))
        crowded = play_crowd(parts, options, classes, layout=layout, record_content=True)
    assert not crowded.failures
    return TrainingOutcome(crowded.model, crowded.transcripts, domains(layout), given, opened, keys)


def inputs(trained, mode):
    """Yield each user's masked vectors as its edge server received them, and its plain ones."""
    kind = InputAndShares if mode == "paper" else MaskedInput
    for name, users in trained.domains.items():
        for u in users:
            masked = [values(m) for m in trained.received(name, u, kind)]
            assert len(masked) == len(trained.given[u]) > 8
            yield masked, [plain.view(np.uint64) for plain in trained.given[u]]


def test_paper_mode_grows_the_same_trees(trainings):
    paper, safe = (trainings[mode].model.forest.trees for mode in ("paper", "safe"))
    assert len(paper) == len(safe)
    for one, other in zip(paper, safe, strict=True):
        assert np.array_equal(one.value, other.value)
        assert np.array_equal(one.gain, other.gain)


@MODES
def test_numbers_of_one_message_differ_as_the_users_histogram_does_in_paper_mode_alone(trainings, mode):
    """The number that occurs most often is the mask of an empty cell: less it, the message is the histogram."""
    in_pairs = []
    for masked, plain in inputs(trainings[mode], mode):
        seen, counts = np.unique(masked[-1], return_counts=True)
        read = masked[-1] - seen[np.argmax(counts)]
        assert np.array_equal(read, plain[-1]) == (mode == "paper")
        in_pairs.append(masked[-1][1::2] - masked[-1][: len(masked[-1]) // 2 * 2 : 2])
    assert uniform(*in_pairs) == (mode == "safe")


@MODES
def test_two_levels_of_a_tree_differ_as_the_users_histograms_do_in_paper_mode_alone(trainings, mode):
    differences = []
    for masked, plain in inputs(trainings[mode], mode):
        n = len(plain[-2])  # the last two sums are of the root and its children
        differences.append(masked[-1][:n] - masked[-2])
        assert np.array_equal(differences[-1], plain[-1][:n] - plain[-2]) == (mode == "paper")
    assert uniform(*differences) == (mode == "safe")


@MODES
def test_edge_server_reads_its_domains_sum_in_paper_mode_alone(trainings, mode):
    trained, seen = trainings[mode], []
    for name, users in trained.domains.items():
        for k, opened in enumerate(trained.opened[name]):
            plain = np.sum([trained.given[u][k] for u in users], axis=0)
            assert np.array_equal(opened, plain) == (mode == "paper")
            seen.append(opened.copy().view(np.uint64))
            add_masks(seen[-1], [], [trained.server_keys[k][u] for u in users])
            assert np.array_equal(seen[-1].view(np.int64), plain) == (mode == "safe")  # all that hides it
    assert uniform(*(opened.view(np.uint64) for of in trained.opened.values() for opened in of)) == (mode == "safe")


@MODES
def test_server_sees_single_domains_sums_in_paper_mode_alone(trainings, mode):
    """Also with its own masks removed; over all domains masks among edge servers cancel."""
    trained, told = trainings[mode], []
    sent = {name: [values(m).copy() for m in trained.received("server", name, MaskedInput)] for name in trained.domains}
    for k, keys in enumerate(trained.server_keys):
        for name, users in trained.domains.items():
            if mode == "safe":
                add_masks(sent[name][k], [], [keys[u] for u in users])
            plain = np.sum([trained.given[u][k] for u in users], axis=0)
            assert np.array_equal(sent[name][k].view(np.int64), plain) == (mode == "paper")
            told.append(sent[name][k])
        everything = np.sum([sent[name][k] for name in trained.domains], axis=0)
        assert np.array_equal(everything.view(np.int64), np.sum([of[k] for of in trained.given.values()], axis=0))
    assert uniform(*told) == (mode == "safe")


@pytest.mark.parametrize("role", ["server", "edge", "user"])
def test_paper_mode_is_refused_without_consent_and_says_what_leaks(role):
    parts, _, classes = crowd_rows(users=3, rows=30)
    party: Any = SimpleNamespace(name="p0")  # of which nothing is asked
    roles = roles_with({"edge0": ["p0"], "edge1": ["p1"], "edge2": ["p2"]})
    with pytest.raises(ConfigError, match=r"can read the histograms of each of its users.*allow_insecure=True"):
        SYSTEM.train[role](
            role_input(party, options_of(mode="paper"), roles, data=parts["p0"], classes=classes, alone=True)
        )


# ---------------------------------------------------------------- one domain, and an edge server that does as it likes


@pytest.fixture(scope="module")
def summed():
    return play_domain()


def withholding(sums, kind):
    """An edge server that has the victim's vector and counts it as lost."""

    class Withholding(sums):
        def _gather(self, wanted):
            came = super()._gather(wanted)
            if wanted is kind:
                self.late = values(came.pop(VICTIM))
                self._lose([VICTIM])
            return came

    return Withholding


def test_key_and_self_mask_of_a_slow_user_open_its_vector_in_paper_mode():
    played = play_domain(withholding(PaperDomainSums, InputAndShares), paper=True)
    setup = played.domain._setup
    held = {name: message.shares for name, message in played.of_sum(0, KeyShares).items()}
    key = rebuilt(setup.round, held, [VICTIM], KEY_BYTES)[VICTIM]
    of_numbers = {u: message.shares for u, message in played.of_sum(0, InputAndShares).items() if u != VICTIM}
    number = int.from_bytes(rebuilt(setup.round, of_numbers, [VICTIM], NUMBER_BYTES)[VICTIM], "little")
    mask = number + sum(pairs_of(VICTIM, key, setup, "job").values())
    assert np.array_equal(played.domain.late - np.uint64(mask % 2**64), own_vector(VICTIM, 1).view(np.uint64))
    (others, remaining, _), *_ = played.opened
    assert VICTIM not in remaining
    assert np.array_equal(others, np.sum([own_vector(u, 1) for u in remaining], axis=0))


@pytest.mark.parametrize("stage", ["setup", "shared", "masked"])
def test_paper_mode_sums_vectors_that_came_also_of_cohorts_that_differ_by_one(stage):
    """So that the difference of two sums is the vector of whoever left."""
    number = [0]

    def script(domain):
        found = []
        for number[0] in range(3):
            found.append(domain.total(number[0], LENGTH))
        return found

    leaves = {VICTIM: lambda _, at: (number[0], at) == (1, stage)}
    played = play_domain(PaperDomainSums, script, leaves=leaves, paper=True)
    assert not played.failures
    assert [VICTIM in remaining for _, remaining, _ in played.opened] == [True, stage == "masked", False]
    assert played.last_step(VICTIM) == "AbsenceNotice"
    for k, (opened, remaining, attempt) in enumerate(played.opened):
        assert (len(remaining), attempt) == (6 if VICTIM in remaining else 5, 0)
        assert np.array_equal(opened, np.sum([own_vector(u, k) for u in remaining], axis=0))


def test_vector_of_a_slow_user_stays_under_its_self_mask_in_safe_mode():
    played = play_domain(withholding(DomainSums, MaskedInput))
    answers, member = played.of_sum(0, MaskShares), played.members[VICTIM][0]
    assert VICTIM not in answers
    assert len(answers) == 5
    assert all(VICTIM not in answer.survivors for answer in answers.values())
    own = X25519PrivateKey.from_private_bytes(played.secret({u: a.lost[VICTIM] for u, a in answers.items()}))
    publics = {u: message.public for u, message in played.of_sum(0, MaskKey).items() if u != VICTIM}
    seeds = {u: agree(own, public, "job", *sorted([u, VICTIM])) for u, public in publics.items()}
    late = without(played.domain.late, *pair_keys(VICTIM, seeds, seeds, member._round.nonce))
    late = without(late, [server_key(VICTIM, 1)])  # even if the server helps
    assert not np.any(late.view(np.int64) == own_vector(VICTIM, 1))
    assert uniform(late)
    late = without(late, [own_mask(member)])
    assert np.array_equal(late.view(np.int64), own_vector(VICTIM, 1))  # the attack is right


def group_by_name(domain):
    """Have the domain's groups be of users whose names follow each other."""
    names = sorted(domain._cohorts.users)
    starts = range(0, len(names) - 2, 3)
    domain._cohorts.groups = [frozenset(names[k : None if k == starts[-1] else k + 3]) for k in starts]


def test_whoever_drops_out_when_everybody_tells_one_answer_a_sum_and_never_both_kinds_for_one_user():
    """In either of two sums one user drops out at each stage."""
    stages = {f"u{3 * k + i:02}": (k, stage) for k in range(2) for i, stage in enumerate(["setup", "shared", "masked"])}
    number = [0]

    def script(domain):
        found = []
        for number[0] in range(2):
            found.append(domain.total(number[0], LENGTH))
            group_by_name(domain)  # the second's users are a group
        return found

    leaves = {name: lambda _, stage, at=at: (number[0], stage) == at for name, at in stages.items()}
    played = play_domain(script=script, count=18, leaves=leaves)
    assert not played.failures
    assert all(played.last_step(name) == "AbsenceNotice" for name in stages)
    for k, (opened, remaining, attempt) in enumerate(played.opened):
        assert attempt == 0
        answers = played.of_sum(k, MaskShares)
        assert len(answers) == len(remaining) - 1  # all but the one that dropped out after its vector
        for answer in answers.values():
            assert answer.survivors.keys() == set(remaining)
            assert answer.lost.keys() == {name for name, at in stages.items() if at == (k, "shared")}
        sums = without(opened.view(np.uint64), [server_key(u, k) for u in remaining]).view(np.int64)
        assert np.array_equal(sums, np.sum([own_vector(u, k) for u in remaining], axis=0))
    assert all(len(played.members[u]) >= n for u, n in Counter(u for u, _ in played.received(MaskShares)).items())


class Lying(DomainSums):
    """Tells some users that the victim is lost, others that it is not."""

    told_less: tuple[str, ...] = ()

    def send(self, messages):
        super().send({
            name: Survivors([u for u in m.names if u != VICTIM])
            if isinstance(m, Survivors) and name in self.told_less
            else m
            for name, m in messages.items()
        })  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_edge_server_that_lies_about_who_is_left_never_gets_both_of_a_users_secrets(count):
    """Six users, four must have agreed to one list before any of them answers."""
    others = [f"u{k:02}" for k in range(6) if f"u{k:02}" != VICTIM]
    played = play_domain(type("Lie", (Lying,), {"told_less": tuple(others[:count])}))
    answers = played.of_sum(0, MaskShares)
    of_seed = sum(VICTIM in answer.survivors for answer in answers.values())
    of_key = sum(VICTIM in answer.lost for answer in answers.values())
    assert of_seed == (6 - count if 6 - count >= 4 else 0)
    assert of_key == (count if count >= 4 else 0)
    refused = [error for error in played.failures.values() if isinstance(error, CryptoError)]
    assert any("expected 4 signatures or more on the list of survivors" in str(error) for error in refused)


def breaking(step, change):
    """An edge server that sends `change(users)` in place of the list of a step."""

    class Breaking(DomainSums):
        def send(self, messages):
            super().send({n: step(change(m.names)) if isinstance(m, step) else m for n, m in messages.items()})

    return Breaking


def check_refused(played, kind, match):
    """Users went wrong, all of them for this reason; nobody answered, nothing was opened."""
    assert played.failures
    for error in played.failures.values():
        assert isinstance(error, kind)
        assert match in str(error)
    assert not played.received(MaskShares)
    assert not any(remaining for _, remaining, _ in played.opened)


@pytest.mark.parametrize("few", [1, 2])
def test_cohort_of_one_or_two_is_refused_before_any_key_is_made(few):
    def script(domain):
        domain._cohort = domain._running = [VICTIM, "u04"][:few]
        domain.send(dict.fromkeys(domain._cohort, Cohort(domain._cohort)))
        domain.send(dict.fromkeys(domain._cohort, Call(1, 0)))
        domain._gather(MaskKey)
        return [domain.total(2, LENGTH)]

    played = play_domain(script=script)
    check_refused(played, CryptoError, f"expected 3 members or more, got {few}")
    assert len(played.failures) == few
    assert not played.received(MaskKey)


def test_list_of_fewer_than_two_thirds_is_refused():
    played = play_domain(breaking(Survivors, lambda users: users[:3]))
    check_refused(played, CryptoError, "survivors")
    assert "expected 4 survivors or more, got 3" in str(played.failures["u00"])


@pytest.mark.parametrize("few", [1, 2])
def test_cohort_that_differs_by_one_or_two_users_is_refused(few):
    """The difference of the two sums would be that of one or two users."""

    class Forgetful(DomainSums):
        def _gather(self, wanted):
            self._cohorts = Cohorts(self._rules, self._rng)
            came = super()._gather(wanted)
            if wanted is MaskedInput and self.second:
                for name in ("u01", "u02")[:few]:
                    came.pop(name)
            return came

    def script(domain):
        domain.second = False
        first = domain.total(1, LENGTH)
        domain.second = True
        return [first, domain.total(2, LENGTH)]

    played = play_domain(Forgetful, script)
    (_, first, _), (_, second, _) = played.opened
    assert (len(first), second) == (6, [])
    assert len(played.failures) == 6 - few
    for error in played.failures.values():
        assert isinstance(error, PeerProtocolError)
        assert "expected a cohort that differs by three users or more" in str(error)


def test_nonce_of_the_servers_mask_is_used_once():
    played = play_domain(script=lambda domain: [domain.total(1, LENGTH), domain.total(1, LENGTH)])
    (_, first, _), (_, second, _) = played.opened
    assert (len(first), second) == (6, [])
    assert len(played.received(MaskedInput)) == 6
    for error in played.failures.values():
        assert isinstance(error, CryptoError)
        assert "expected a new nonce for every masked vector" in str(error)
    assert len(played.failures) == 6


@pytest.mark.parametrize("step", [Survivors, Agreements])
def test_question_that_is_asked_twice_is_refused(step):
    class Twice(DomainSums):
        def send(self, messages):
            super().send(messages)
            if all(isinstance(m, step) for m in messages.values()):
                super().send(messages)

    played = play_domain(Twice)
    assert len(played.failures) == 6
    assert all(f"got {step.__name__}" in str(error) for error in played.failures.values())
    assert len(played.received(MaskShares)) == (6 if step is Agreements else 0)


@pytest.mark.parametrize("replayed", [False, True])
def test_vector_of_an_earlier_attempt_put_in_place_of_the_new_one_opens_nothing(replayed):
    """Even where the server removes the mask of the attempt that the vector is of."""

    class Replaying(DomainSums):
        first = None

        def _gather(self, wanted):
            came = super()._gather(wanted)
            if wanted is MaskedInput:
                if self.first is None:
                    self.first = came[VICTIM]
                    raise RoundVoid("the round is void: for once")
                if replayed:
                    came[VICTIM] = self.first
            return came

    played = play_domain(Replaying)
    assert not played.failures
    ((opened, remaining, attempt),) = played.opened
    assert (len(remaining), attempt) == (6, 1)
    removed = [server_key(u, 1, 0 if replayed and u == VICTIM else 1) for u in remaining]
    sums = without(opened.view(np.uint64), removed)
    assert np.array_equal(sums.view(np.int64), np.sum([own_vector(u, 1) for u in remaining], axis=0)) != replayed
    assert uniform(sums) == replayed


@pytest.mark.parametrize("reused", [True, False], ids=["mask key reused", "fresh keys"])
def test_key_of_a_user_that_drops_out_of_a_later_sum_opens_its_earlier_vector_only_where_keys_are_reused(reused):
    """Edge server and server together: t shares of its self-mask of the first sum, t of its key of the second."""
    fixed, number = X25519PrivateKey.generate(), [0]
    dropped = [VICTIM, "u04", "u05"]

    class Reusing(RoundKeys):
        def __init__(self, job_id, name, scope, channels):
            super().__init__(job_id, name, scope, channels)
            if name == VICTIM and reused:
                self._secret = fixed
                self.public = fixed.public_key().public_bytes_raw()

    def script(domain):
        found = []
        for number[0] in (1, 2):
            found.append(domain.total(number[0], LENGTH))
            group_by_name(domain)
        return found

    leaves = dict.fromkeys(dropped, lambda _, stage: (number[0], stage) == (2, "shared"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crowd_users, "RoundKeys", Reusing)
        played = play_domain(script=script, count=12, leaves=leaves)
    assert [len(remaining) for _, remaining, _ in played.opened] == [12, 9]
    first, second = played.of_sum(0, MaskShares), played.of_sum(1, MaskShares)
    self_seed = played.secret({u: answer.survivors[VICTIM] for u, answer in first.items()})
    key = X25519PrivateKey.from_private_bytes(played.secret({u: answer.lost[VICTIM] for u, answer in second.items()}))
    publics = {u: message.public for u, message in played.of_sum(0, MaskKey).items() if u != VICTIM}
    seeds = {u: agree(key, public, "job", *sorted([u, VICTIM])) for u, public in publics.items()}
    nonce = played.members[VICTIM][0]._round.nonce
    read = without(values(played.of_sum(0, MaskedInput)[VICTIM]), *pair_keys(VICTIM, seeds, seeds, nonce))
    read = without(read, [mask_key(self_seed, nonce), server_key(VICTIM, 1)])
    assert np.array_equal(read.view(np.int64), own_vector(VICTIM, 1)) == reused
    assert uniform(read) != reused


@pytest.mark.parametrize("helps", [False, True], ids=["edge server", "edge server and server"])
def test_edge_server_and_fewer_than_t_users_learn_nothing_of_another_users_vector(summed, helps):
    """They hold its self-mask, which is opened, and their own masks with it; with others' its vector is uniform."""
    colluders, honest = ["u00", "u01", "u05"], ["u02", VICTIM, "u04"]
    assert len(colluders) < summed.members[VICTIM][0]._round.threshold
    rest = {}
    for name in honest:
        member = summed.members[name][0]
        self_seed = summed.secret({u: answer.survivors[name] for u, answer in summed.of_sum(0, MaskShares).items()})
        assert self_seed == member._self_seed
        known = {u: summed.members[u][0]._seeds.mask[name] for u in colluders}
        left = without(values(summed.of_sum(0, MaskedInput)[name]), [mask_key(self_seed, member._round.nonce)])
        left = without(left, *pair_keys(name, known, known, member._round.nonce))
        rest[name] = without(left, [server_key(name, 1)]) if helps else left
    assert uniform(*rest.values())
    left = without(rest[VICTIM], *pair_masks(summed.members[VICTIM][0], ["u02", "u04"]))
    assert uniform(left) != helps
    if not helps:  # without the server another mask is left, with it none
        left = without(left, [server_key(VICTIM, 1)])
    assert np.array_equal(left.view(np.int64), own_vector(VICTIM, 1))
    together = np.sum(list(rest.values()), axis=0)  # the sum of honest users is what the protocol tells, to the server
    assert np.array_equal(together.view(np.int64), np.sum([own_vector(u, 1) for u in honest], axis=0)) == helps
    assert uniform(together) != helps


def test_shares_of_fewer_than_t_users_do_not_give_the_mask_key_of_another(summed):
    member = summed.members[VICTIM][0]
    held = {u: summed.members[u][0]._shares[VICTIM][-48:] for u in summed.users}
    assert summed.secret(held) == member._seeds.mask_secret
    few = ["u00", "u01", "u05"]
    with pytest.raises(CryptoError, match="do not belong together"):
        open_bytes(member._round.points(few), [[held[u]] for u in few], 32)
