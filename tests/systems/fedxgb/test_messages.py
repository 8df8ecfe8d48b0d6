"""What edge servers and users may be told when."""

from __future__ import annotations

import numpy as np
import pytest

from systems.fedxgb.playing import crowd_rows, laid_out, options_of, play_crowd
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Array
from treaty.systems.fedxgb.messages import KnownSplits, Values
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.order import edge_order, user_order
from treaty.systems.fedxgb.secfind import Crowd

ORDERS = {
    (expose, kind, back): order(FedXGB(expose=expose, allow_insecure=True, validation_fraction=back))
    for expose in (None, "nothing", "paper", "model")
    for back in (None, 0.2)
    for kind, order in {"user": user_order, "edge": edge_order}.items()
}


def following(kinds) -> set[str]:
    """Return the states after any of these messages."""
    return {state for then in kinds.values() for state in ([then] if isinstance(then, str) else then)}


@pytest.mark.parametrize("which", ORDERS, ids=str)
def test_training_ends_from_every_state_and_every_state_is_reached(which):
    order = ORDERS[which]
    start = "begun" if which[1] == "user" else "domain"
    after = {state: following(kinds) for state, kinds in order.items()}
    assert set().union(*after.values()) <= {*order, "over"}
    reached, waiting = {start}, [start]
    while waiting:
        new = after.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    assert reached == {*order, "over"} - ({"rows"} if which[0] in ("paper", "model") else set())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "state"), [(KnownSplits, "bins"), (Values, "between trees")])
def test_what_comes_out_of_order_is_refused(kind, state, monkeypatch):
    """The server tells a tree before bins are summed up, or its leaf values twice."""
    parts, _, classes = crowd_rows(users=6)
    options, tell = options_of(expose="model", n_estimators=1, max_depth=1), Crowd.broadcast
    none = Array.of(np.zeros(0, np.int32))

    def twice(crowd, message):
        tell(crowd, message)
        if kind is Values and isinstance(message, Values):
            tell(crowd, message)
        if kind is KnownSplits and type(message).__name__ == "CommonBins":
            tell(crowd, KnownSplits(none, none))

    monkeypatch.setattr(Crowd, "broadcast", twice)
    with pytest.raises(PeerProtocolError, match=f"got {kind.__name__}"):
        play_crowd(parts, options, classes, layout=laid_out(list(parts)))
