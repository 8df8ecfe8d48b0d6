import threading
import time

import numpy as np
import pytest

from systems.role_inputs import split_options
from treaty.crypto.lattice.store import HintStore
from treaty.crypto.sums.encrypted_sums import SumsBounds
from treaty.crypto.sums.lattice_sums import LatticeSumsClient, LatticeSumsServer
from treaty.errors import ConfigError
from treaty.messaging.party import Party
from treaty.runs.threads import play
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.vertical import cipher_choice
from treaty.systems.vertical.cipher_choice import Estimate, JobSize, Link, choose_cipher
from treaty.systems.vertical.messages import LinkEcho, LinkProbe

SMALL = SumsBounds(1000, 1 << 16, 1 << 14)


def offsets(columns, bins=33):
    return (np.arange(columns + 1) * bins).astype(np.int32)


def job_of(bounds=SMALL, trees=20, common=None, **options):
    common = common or BoostingOptions(**options).checked(SecureBoost())
    return JobSize(bounds, common.rules_of(2.0**-16, 2.0**-16), trees, threads=2)


def choose(bounds=SMALL, layouts=None, trees=20, store=None, delay=0.0, left=2.0**-40, **options):
    """Let an active party choose beside passive ones that answer its probes, each after `delay` per megabyte."""
    layouts = layouts or {"b": offsets(10)}
    done = threading.Event()

    def active(party: Party):
        try:
            own, given = split_options({"sums": "open", **options}, SecureBoost)
            common = BoostingOptions(**given).checked(own)
            job = job_of(bounds, trees, common)
            return choose_cipher(party, own.ciphers, common, job, layouts, store or HintStore(None))
        finally:
            for peer in layouts:
                party.send(peer, LinkEcho(b"", left))  # here: that is all
            done.set()

    def passive(party: Party):
        while isinstance(message := party.receive("a", LinkProbe, LinkEcho), LinkProbe):
            time.sleep(delay * len(message.filler) / 1e6)
            party.send("a", LinkEcho(message.filler, left))

    roles = {"a": active, **dict.fromkeys(layouts, passive)}
    links = {"a": list(layouts), **{name: ["a"] for name in layouts}}
    return play(roles, links, job="test", protocol="secureboost", timeout=20).results["a"]


@pytest.mark.parametrize("cipher", ["lattice", "ou", "paillier"])
def test_a_cipher_that_the_job_names_is_taken_without_a_probe(cipher, monkeypatch):
    monkeypatch.setattr(cipher_choice, "measure", None)
    assert choose(encryption=cipher).cipher == cipher


@pytest.mark.parametrize("key", [{"key_bits": 2048}, {"insecure_test_key_bits": 512}])
def test_naming_a_key_means_okamoto_uchiyama(key):
    assert choose(**key).cipher == "ou"


def test_naming_what_is_revealed_means_the_lattice_map(monkeypatch):
    monkeypatch.setattr(cipher_choice, "measure", None)
    assert {choose(reveal=what).cipher for what in ("column", "node")} == {"lattice"}


@pytest.mark.parametrize("own", [{"key_bits": 3072}, {"encryption": "ou"}, {"encryption": "paillier"}])
def test_columns_are_not_promised_where_rows_of_nodes_are_shown(own):
    with pytest.raises(ConfigError, match="shows rows of nodes"):
        SecureBoost(reveal="column", **own).check(BoostingOptions())


@pytest.mark.slow
def test_fast_links_get_the_lattice_map_and_slow_ones_okamoto_uchiyama_where_trees_are_deep(monkeypatch):
    monkeypatch.setattr(cipher_choice, "MODULAR", 1.0)
    fast, slow = (
        choose(SumsBounds(100_000, 1 << 16, 1 << 14)),
        choose(SumsBounds(100_000, 1 << 16, 1 << 14), delay=0.2, max_depth=8),
    )
    assert (fast.cipher, slow.cipher) == ("lattice", "ou")
    assert "for 20 trees; ou would take about" in fast.why
    assert "lattice would take about" in slow.why


def test_the_slowest_link_is_told(monkeypatch):
    speeds = {"b": 5e6, "c": 1e9}
    monkeypatch.setattr(cipher_choice, "measure", lambda party, peer: (Link(1e-4, 1 / speeds[peer]), 1.0))
    assert "link of 5.0 MB/s" in choose(layouts={"b": offsets(10), "c": offsets(10)}).why


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bounds": SumsBounds(1 << 40, 1 << 16, 1 << 14)}, "too large for the lattice map"),
        ({"bounds": SumsBounds(1000, 1 << 31, 1 << 29)}, "lower weights"),
        ({"bounds": SumsBounds(1000, 1 << 20, 1 << 32)}, "or weights"),
        ({"fractional_bits": 24}, "fractional_bits"),
        ({"layouts": {"b": offsets(2000, 256)}}, "GB of disk"),
        ({"layouts": {"b": offsets(2000, 10)}, "bounds": SumsBounds(30_000, 1 << 16, 1 << 14), "trees": 10**6}, "leak"),
    ],
)
def test_what_the_lattice_map_does_not_hold_goes_to_okamoto_uchiyama(change, said, monkeypatch):
    monkeypatch.setattr(cipher_choice, "measure", None)
    choice = choose(**change)
    assert choice.cipher == "ou"
    assert said in choice.why


def test_hints_that_would_take_more_than_half_of_the_room_are_not_made(monkeypatch):
    wide = {"b": offsets(1500)}
    assert not choose(layouts=wide, bounds=SumsBounds(20_000, 1 << 16, 1 << 14)).why.startswith("hints")
    monkeypatch.setattr(HintStore, "room", 2 * 4_000_000_000)
    choice = choose(layouts=wide, bounds=SumsBounds(20_000, 1 << 16, 1 << 14))
    assert choice.cipher == "ou"
    assert choice.why.endswith("4.9 GB of disk, expected at most 4.0 GB")


def test_a_table_about_which_nearly_all_was_told_goes_to_okamoto_uchiyama():
    assert choose(left=2.0**-200).cipher == "ou"
    assert "b's answers have leaked nearly all" in choose(left=2.0**-200).why


def test_a_hint_that_is_kept_counts_for_the_lattice_map(tmp_path):
    codes, layout = np.zeros((1000, 1), np.uint8), np.array([0, 2], np.int32)
    with HintStore(tmp_path / "a") as ours, HintStore(None) as theirs:
        client, server = LatticeSumsClient(SMALL, ours), LatticeSumsServer(SMALL, codes, layout, ["x"], theirs)
        client.settle(bytes(32))
        server.settle(bytes(32))
        for piece in server.hint():
            client.accept_hint("b", piece, layout)
        assert "hints kept earlier" in choose(layouts={"b": layout}, store=ours).why
        assert "hints kept earlier" not in choose(layouts={"b": offsets(2)}, store=ours).why


def test_under_auto_what_sealing_would_take_is_told_with_the_others_where_it_can_be_done():
    why = choose().why
    assert why.startswith("estimated about")
    assert "; sums under seal would take about" in why
    assert "seal" not in choose(reg_alpha=0.5).why


def nodes_of(rows, trees=100, columns=20, max_depth=6, store=None, counts=(1, 2), byte=8e-9):
    """How many nodes a vector is about on links that take so long for a byte, and whether its hint is kept."""
    bounds, layouts = SumsBounds(rows, 1 << 16, 1 << 14), {"b": offsets(columns)}
    job = job_of(bounds, trees, max_depth=max_depth)
    nodes, _, kept = cipher_choice.best_nodes(
        job, layouts, {"b": Link(1e-3, byte)}, store or HintStore(None), counts
    )  # fmt: skip
    return nodes, kept


def test_vectors_are_of_two_nodes_where_many_of_long_tables_are_sent():
    assert nodes_of(10**8) == (2, False)
    assert nodes_of(10**6, byte=8e-8) == (2, False)
    for fewer in ({"rows": 10_000}, {"trees": 1}, {"max_depth": 2}, {"byte": 0.0}, {"columns": 400}, {"counts": [1]}):
        assert nodes_of(**{"rows": 10**6, "byte": 8e-8, **fewer}) == (1, False)


def test_a_kept_hint_is_used_again_for_whichever_vectors_it_is():
    rows, layout, stores = 40_000, offsets(2, 5), {}
    rng = np.random.default_rng(0)
    for nodes in (1, 2):
        stores[nodes] = HintStore(None)
        client = LatticeSumsClient(SumsBounds(rows, 1 << 16, 1 << 14), stores[nodes], nodes=nodes)
        server = LatticeSumsServer(
            client._bounds, rng.integers(0, 5, (rows, 2), np.uint8), layout, ["x", "y"], HintStore(None), nodes=nodes
        )
        for end in (client, server):
            end.settle(bytes(32))
        for piece in server.hint():
            client.accept_hint("b", piece, layout)
        bounds, links = client._bounds, {"b": Link(1e-3, 8e-9)}
        found = cipher_choice.best_nodes(job_of(bounds, 1, max_depth=6), {"b": layout}, links, stores[nodes])
        assert (found[0], found[2]) == (nodes, True)


@pytest.mark.parametrize(("depth", "one", "two"), [(1, 1, 1), (2, 2, 2), (3, 4, 3), (4, 8, 5), (6, 32, 17)])
def test_of_two_siblings_one_is_in_a_vector(depth, one, two):
    rules = job_of(max_depth=depth).rules
    assert [cipher_choice.vectors_of_a_tree(rules, nodes) for nodes in (1, 2)] == [one, two]


def test_by_best_gain_each_split_takes_a_vector():
    rules = job_of(max_depth=None, max_leaves=20).rules
    assert [cipher_choice.vectors_of_a_tree(rules, nodes) for nodes in (1, 2)] == [19, 19]
    assert (rules.full_depth, rules.most_asked) == (5, 19)


def test_estimates_grow_with_every_size():
    parameters = cipher_choice.sums_parameters(SMALL)
    base = {"rows": 1000, "features": 10, "slots": 330, "max_depth": 3, "trees": 20}
    few = estimates(parameters, **base)
    for what, size in base.items():
        many = estimates(parameters, **{**base, what: 2 * size})
        assert many[0].seconds > few[0].seconds or what == "features"
        assert many[0].nbytes >= few[0].nbytes
        assert many[1].seconds > few[1].seconds
        assert many[1].nbytes >= few[1].nbytes


def estimates(parameters, rows, features, slots, max_depth, trees):
    job = job_of(SumsBounds(rows, 1 << 16, 1 << 14), trees, max_depth=max_depth)
    lattice = cipher_choice.cost_of_lattice(parameters, job, features, slots, kept=False)
    return lattice, cipher_choice.cost_of_ou(job, features, slots)


@pytest.mark.parametrize(
    ("seconds", "nbytes", "said"),
    [
        (0.42, 1.24e6, "about 0.4 seconds and 1.2 MB"),
        (180.0, 3.45e9, "about 3 minutes and 3,450 MB"),
        (9000.0, 2e8, "about 2.5 hours and 200 MB"),
    ],
)
def test_estimates_are_said_without_exponents(seconds, nbytes, said):
    """Engineers read "about 1.8e+02 s and 3.45e+03 MB"."""
    assert str(Estimate(seconds, nbytes)) == said
