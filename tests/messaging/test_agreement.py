import pytest

from treaty.errors import ConfigError, LocalProtocolError, PeerAborted
from treaty.messaging.channel import memory_channels
from treaty.messaging.exchanges import agree
from treaty.messaging.messages import Message
from treaty.messaging.party import Party, run_role

STAR = {"clinic": ["lab", "shop"], "lab": ["clinic"], "shop": ["clinic"]}
TERMS = {"max_depth": 3, "learning_rate": 0.3, "encryption": "ou", "rl": False, "seed": None, "cuts": [1, 2.5, "x"]}


class Count(Message):
    n: int


def run(together, terms, after=None):
    channels = memory_channels(STAR)
    parties = {n: Party(n, "breast", "secureboost", channels[n], peers, timeout=10) for n, peers in STAR.items()}

    def role(name):
        agree(parties[name], terms[name])
        if after:
            after(parties[name])

    return together(**{n: lambda n=n: run_role(parties[n], lambda: role(n)) for n in STAR})


def test_equal_terms_pass_whatever_their_order(together):
    terms = {"clinic": TERMS, "lab": dict(reversed(TERMS.items())), "shop": dict(TERMS)}
    assert run(together, terms) == {"clinic": None, "lab": None, "shop": None}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"learning_rate": 0.1}, "same learning_rate everywhere, got 0.3 at clinic and 0.1 at lab"),
        ({"max_depth": 3.0}, "same max_depth everywhere, got 3 at clinic and 3.0 at lab"),
        ({"rl": 0}, "same rl everywhere, got False at clinic and 0 at lab"),
        ({"cuts": [1, 2.5]}, "same cuts everywhere, got"),
        ({"epsilon": 1.0}, "same epsilon everywhere, got nothing at clinic and 1.0 at lab"),
        ({"seed": "None"}, "same seed everywhere, got None at clinic and 'None' at lab"),
        ({"zeta": "a", "encryption": "paillier"}, "same encryption everywhere"),
        ({"encryption": "o" * 200 + "x"}, "same encryption everywhere"),
    ],
)
def test_first_difference_raises_the_same_config_error_at_every_party(together, change, text):
    outcome = run(together, {"clinic": TERMS, "lab": TERMS | change, "shop": TERMS})
    assert {type(error) for error in outcome.values()} == {ConfigError}
    assert len({str(error) for error in outcome.values()}) == 1
    assert text in str(outcome["shop"])


def test_long_values_that_differ_only_at_their_end_still_differ(together):
    terms = {"clinic": {"cuts": "a" * 400}, "lab": {"cuts": "a" * 399 + "b"}, "shop": {"cuts": "a" * 400}}
    assert {type(error) for error in run(together, terms).values()} == {ConfigError}


def test_term_of_another_type_is_our_own_fault(together):
    outcome = run(together, {"clinic": TERMS | {"max_depth": {"a": [1]}}, "lab": TERMS, "shop": TERMS})
    assert isinstance(outcome["clinic"], LocalProtocolError)
    assert "of the terms" in str(outcome["clinic"])
    assert isinstance(outcome["shop"], PeerAborted)


def test_protocol_goes_on_after_agreement(together):
    def after(party):
        if party.name == "clinic":
            for peer in party.peers:
                party.send(peer, Count(1))
        else:
            assert party.receive("clinic", Count).n == 1

    assert run(together, dict.fromkeys(STAR, TERMS), after) == {"clinic": None, "lab": None, "shop": None}


def test_terms_can_be_compared_with_some_peers_alone(together):
    channels = memory_channels(STAR)
    parties = {n: Party(n, "breast", "secureboost", channels[n], peers, timeout=10) for n, peers in STAR.items()}
    outcome = together(
        clinic=lambda: agree(parties["clinic"], {"rows": 3}, peers=["lab"]),
        lab=lambda: agree(parties["lab"], {"rows": 3}),
    )
    assert outcome == {"clinic": None, "lab": None}
    assert len(parties["shop"].transcript.entries) == 0
    parties["clinic"].send("shop", Count(1))
    assert parties["shop"].receive("clinic", Count).n == 1
